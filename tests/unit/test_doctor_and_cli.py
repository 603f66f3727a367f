"""The command, its subcommands, and the tables of the doctor."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexla_dist import __version__, cli, doctor
from flexla_dist.assembler import Assembler
from flexla_dist.doctor import FAILED, MISSING, NONE, OK, Finding, table
from flexla_dist.train.launch import detect_launcher


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0 and cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian' (did you mean 'train'?)" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([name, "--help"])
    assert exit_info.value.code == 0
    assert f"flexla-dist {name}" in capsys.readouterr().out


def test_module_and_script_are_the_same_program() -> None:
    script = Path(sys.executable).parent / "flexla-dist"
    commands = [[str(script), "--version"], [sys.executable, "-m", "flexla_dist.cli", "--version"]]
    outputs = [subprocess.run(c, capture_output=True, text=True, timeout=60) for c in commands]
    assert outputs[0].stdout == outputs[1].stdout == f"flexla_dist {__version__}\n"


def test_doctor_looks_and_succeeds_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--no-run"]) == 0
    text = capsys.readouterr().out
    for word in ("python", "torch", "cpu", "gloo", "NCCL", "MPI", "OpenSHMEM", "NVSHMEM", "Triton"):
        assert word in text
    assert "the default path works" in text
    for row in ("executor torch", "executor triton", "compiling kernels"):
        assert f"\n  {row} " in text


def findings(look: Callable[[], Iterator[Finding]]) -> dict[str, Finding]:
    return {row.subject: row for row in look()}


def test_doctor_says_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = findings(doctor.engines)["executor triton"]
    assert found.state == OK and "interpreter" in found.detail
    monkeypatch.delenv("TRITON_INTERPRET")
    found = findings(doctor.engines)["executor triton"]
    assert found.state == NONE and "TRITON_INTERPRET=1" in found.remedy
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert findings(doctor.engines)["executor triton"].state == OK


def test_doctor_says_which_assembler_is_sound_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    old, new = Assembler("/old/ptxas", (12, 8)), Assembler("/new/ptxas", (12, 9))
    monkeypatch.setattr("flexla_dist.assembler.candidates", lambda: (old, new))
    found = findings(doctor.engines)["compiling kernels"]
    assert found.state == OK and "ptxas /new/ptxas 12.9, sound; Triton's own" in found.detail
    monkeypatch.setattr("flexla_dist.assembler.candidates", lambda: (old,))
    found = findings(doctor.engines)["compiling kernels"]
    assert found.state == MISSING and "need ptxas 12.9 or later" in found.detail
    monkeypatch.setattr("flexla_dist.assembler.candidates", tuple)
    assert findings(doctor.engines)["compiling kernels"].state == MISSING
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert findings(doctor.engines)["compiling kernels"].state == FAILED


def test_doctor_fails_when_something_needed_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Finding("torch", FAILED, "not installed", "pip install torch")
    monkeypatch.setattr(doctor, "versions", lambda: iter([broken]))
    assert doctor.main(["--no-run"]) == 1
    assert "broken: torch" in capsys.readouterr().out


def test_table_is_aligned_and_wrapped() -> None:
    rows = [
        Finding("a", OK, "short"),
        Finding("longer", MISSING, "word " * 40, "do this"),
    ]
    lines = table("Title", rows, width=60).splitlines()
    assert lines[1:3] == ["Title", "  a       ok       short"]
    assert all(len(line) <= 60 for line in lines)
    assert lines[-1].strip() == "-> do this"
    assert lines[-1].index("->") == lines[2].index("short")


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, "single"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"),
        ({"PMI_SIZE": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "mpi"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "slurm"),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "single"),
    ],
)
def test_launcher_is_recognised(environment: dict[str, str], launcher: str) -> None:
    assert detect_launcher(environment) == launcher
