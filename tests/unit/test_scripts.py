"""The scripts in launch/: syntax, help, arguments, hygiene."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "launch").iterdir() if path.is_file())
NAMES = [path.name for path in SCRIPTS]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_help_says_what_it_does(script: Path) -> None:
    result = run(str(script), "--help")
    assert result.returncode == 0, result.stderr
    assert script.name in result.stdout


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=[*NAMES, "ci"])
def test_hygiene(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and os.access(script, os.X_OK)
    assert "set -euo pipefail" in text
    assert not re.search(r"https?://|--index-url|--extra-index", text)
    assert not re.search(r"(?<![\w.$}\"])/(home|work|root|usr/local)/", text)
    assert run("bash", "-n", str(script)).returncode == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launch/setup.sh", "--extra", "everything"], "--extra is train or dev, got: everything"),
        (["launch/setup.sh", "--nonsense"], "unknown argument: --nonsense"),
        (["launch/setup.sh", "--python"], "--python wants a path"),
        (["launch/torchrun_multi_node.sh", "--nodes", "2"], "--head HOST"),
        (["launch/slurm.sbatch"], "not inside a Slurm job"),
        (["launch/quickstart.sh", "--stepz", "3"], "unknown setting 'stepz'"),
        (["launch/torchrun_single_node.sh", "--ranks", "3", "--mesh.cp=2"], "the 3 ranks"),
        (["launch/mpirun.sh", "--data", "no/such"], "no such file or folder: no/such"),
    ],
)
def test_mistakes_are_told(words: list[str], text: str) -> None:
    result = run(*words)
    assert result.returncode != 0
    assert text in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count(text) == 1


def test_second_setup_is_instant() -> None:
    assert run("launch/setup.sh", "--extra", "dev").returncode == 0
    result = run("launch/setup.sh", "--extra", "dev")
    assert result.returncode == 0 and result.stdout == ""


def test_slurm_starts_one_torchrun_a_node(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands, the job's arguments come out right."""
    for name, body in {
        "scontrol": 'printf "node7\\nnode8\\n"',
        "srun": 'printf "%s\\n" "$@"',
    }.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    result = run(
        "launch/slurm.sbatch",
        "--mesh.cp",
        "4",
        "--out",
        str(tmp_path / "run"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="20123",
        SLURM_GPUS_ON_NODE="4",
        SLURM_SUBMIT_DIR=str(ROOT),
    )
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    assert words[1] == ".venv/bin/torchrun"
    assert {"--nnodes=2", "--nproc_per_node=4", "--rdzv_endpoint=node7:20123"} <= set(words)
    assert words[-6:-1] == ["-m", "flexla_dist.train", "--mesh.cp", "4", "--out"]
