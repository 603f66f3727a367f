"""Heaps of real OpenSHMEM and of MPI, in processes that oshrun and mpirun start."""

from __future__ import annotations

import pytest

from .launchers import mpirun, needs_mpirun, needs_oshrun, oshrun

PROGRAM = "tests.shmem.program"


@needs_oshrun
@pytest.mark.parametrize("ranks", [2, 4])
def test_openshmem(ranks: int) -> None:
    output = oshrun(ranks, PROGRAM, "oshmem")
    for rank in range(ranks):
        assert f"oshmem heap: rank {rank} of {ranks} is right" in output


@needs_mpirun
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_mpi(ranks: int) -> None:
    output = mpirun(ranks, PROGRAM, "mpi_shm")
    for rank in range(ranks):
        assert f"mpi_shm heap: rank {rank} of {ranks} is right" in output
