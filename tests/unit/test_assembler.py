"""Kernels for Hopper are never assembled by a ptxas that makes some products wrong."""

from __future__ import annotations

import subprocess

import pytest
import torch
import triton

from flexla_dist import assembler as subject
from flexla_dist.assembler import Assembler, assembler, assembling, candidates, sound_options
from flexla_dist.compiler.aot import CompileTask, compile_launch, describe_call, record_launches
from flexla_dist.errors import ExecutorError

from .compiled import graphs_of

OLD = Assembler("/somewhere/ptxas", (12, 8))
NEW = Assembler("/elsewhere/ptxas", (13, 0))


def test_one_that_is_right_is_here() -> None:
    """Triton brings one, so that nobody has to install a CUDA toolkit."""
    chosen = assembler()
    assert chosen.sound and chosen in candidates()
    said = subprocess.run([chosen.path, "--version"], capture_output=True, text=True, check=True)
    assert f"release {chosen.version[0]}.{chosen.version[1]}" in said.stdout


def test_tritons_setting_comes_back() -> None:
    before = triton.knobs.nvidia.ptxas.path
    with assembling(90) as options:
        assert triton.knobs.nvidia.ptxas.path == assembler().path
        assert options == {"ptx_version": 88}
    assert triton.knobs.nvidia.ptxas.path == before
    with pytest.raises(ZeroDivisionError), assembling(90):
        raise ZeroDivisionError
    assert triton.knobs.nvidia.ptxas.path == before


@pytest.mark.parametrize("device", [80, 89, 100, torch.device("cpu"), torch.device("meta")])
def test_other_devices_are_left_alone(device: torch.device | int) -> None:
    before = triton.knobs.nvidia.ptxas.path
    with assembling(device) as options:
        assert not options and triton.knobs.nvidia.ptxas.path == before
    assert not sound_options(device)


def test_the_usual_one_is_taken_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "candidates", lambda: (NEW, Assembler("/third/ptxas", (12, 9))))
    assert assembler() == NEW
    monkeypatch.setattr(subject, "candidates", lambda: (OLD, NEW))
    assert assembler() == NEW


def test_without_any_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "candidates", lambda: (OLD,))
    with (
        pytest.raises(ExecutorError, match=r"12\.9 or later.*/somewhere/ptxas 12\.8.*PTXAS_PATH"),
        assembling(90),
    ):
        pass


def test_an_old_one_refuses_our_kernels(tmp_path: object) -> None:
    """If the setting were lost, the kernel would not be assembled at all."""
    graphs = graphs_of("simple_gla")
    call = describe_call(graphs, tokens=64, sizes={"K": 16, "V": 16})
    launch = record_launches(CompileTask(graphs, call, ("forward",)), "forward")[0]
    seen = []

    def watch(source: object, target: object, options: dict[str, object]) -> object:
        seen.append((options["ptx_version"], triton.knobs.nvidia.ptxas.path))
        return real(source, target=target, options=options)

    real = triton.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", watch)
        compile_launch(launch)
    assert seen == [(88, assembler().path)]
    old = [one for one in candidates() if not one.sound]
    text = ".version 8.8\n.target sm_90a\n.address_size 64\n"
    for one in old:
        path = f"{tmp_path}/kernel.ptx"
        with open(path, "w") as file:
            file.write(text)
        command = [one.path, "--gpu-name=sm_90a", path, "-o", f"{tmp_path}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and "version" in done.stderr
