"""Sharded operators over real OpenSHMEM and MPI memory, in processes of oshrun and mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from .launchers import mpirun, needs_mpirun, needs_oshrun, oshrun

PROGRAM = "tests.shmem.parallel_program"
WHICH = ["few", pytest.param("all", marks=pytest.mark.long)]


@needs_oshrun
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("ranks", [2, 4])
def test_openshmem(ranks: int, which: str, tmp_path: Path) -> None:
    output = oshrun(ranks, PROGRAM, "oshmem", which, str(tmp_path / "meet"), timeout=100)
    for rank in range(ranks):
        assert f"oshmem heap: states of rank {rank} of {ranks} are right" in output


@needs_mpirun
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_mpi(ranks: int, which: str, tmp_path: Path) -> None:
    output = mpirun(ranks, PROGRAM, "mpi_shm", which, str(tmp_path / "meet"), timeout=100)
    for rank in range(ranks):
        assert f"mpi_shm heap: states of rank {rank} of {ranks} are right" in output
