"""`MpiShmHeap`: memory of MPI shared windows, for processes of one host started by mpirun."""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

from flexla_dist.comm.heaps import Block, Dialect, HeapError, HeapMismatch


class MpiShmHeap:
    """Memory from `MPI.Win.Allocate_shared`; `bases` are what `Shared_query` says."""

    name = "mpi_shm"
    dialect: Dialect = "p2p"

    def __init__(self, communicator: MPI.Comm = MPI.COMM_WORLD) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.device = torch.device("cpu")
        self.closed = False
        self._windows: list[MPI.Win] = []

    def allocate(self, label: str, nbytes: int) -> Block:
        """A zeroed part of every rank; HeapMismatch on all if they ask for different ones."""
        self._check_open("allocate")
        requests = self._communicator.allgather((label, nbytes))
        if any(request != requests[0] for request in requests):
            raise HeapMismatch(f"ranks allocate different memory: {requests}")
        window = MPI.Win.Allocate_shared(nbytes, 1, comm=self._communicator)
        window.Lock_all()
        self._windows.append(window)
        parts = [window.Shared_query(rank)[0] for rank in range(self.size)]
        arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]
        local = torch.from_numpy(arrays[self.rank])
        local.zero_()
        bases = torch.tensor([array.ctypes.data for array in arrays], dtype=torch.int64)
        self.barrier()
        return Block(nbytes, local, bases, owner=(self, arrays))

    def barrier(self) -> None:
        """Wait for all ranks; writes to the windows before are visible afterwards."""
        self._check_open("barrier")
        for window in self._windows:
            window.Sync()
        self._communicator.Barrier()
        for window in self._windows:
            window.Sync()

    def close(self) -> None:
        """Free the windows, together."""
        if self.closed:
            return
        self.closed = True
        for window in self._windows:
            window.Unlock_all()
            window.Free()

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise HeapError(f"{what}: this heap has been closed")
