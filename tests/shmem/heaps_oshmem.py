"""`OshmemHeap`: symmetric memory of real OpenSHMEM on the CPU, for processes started by oshrun."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from shmem4py import shmem

from flexla_dist.comm.heaps import Block, Dialect, HeapError, HeapMismatch

_REQUEST_WORDS = 3


class OshmemHeap:
    """Memory from OpenSHMEM's symmetric heap; `bases` are what `shmem_ptr` says."""

    name = "oshmem"
    dialect: Dialect = "p2p"

    def __init__(self) -> None:
        self.rank, self.size = shmem.my_pe(), shmem.n_pes()
        self.device = torch.device("cpu")
        self.closed = False
        self._requests = shmem.zeros((self.size, _REQUEST_WORDS), dtype=np.int64)
        _meet()  # each element zeroes its part by itself: nobody may write before all have
        self._memory: list[np.ndarray] = []

    def allocate(self, label: str, nbytes: int) -> Block:
        """A zeroed part of every element; HeapMismatch on all if they ask for different ones."""
        self._check_open("allocate")
        self._agree(label, nbytes)
        memory = shmem.zeros(nbytes, dtype=np.uint8, align=256)
        _meet()
        self._memory.append(memory)
        peers = [shmem.ptr(memory, element) for element in range(self.size)]
        addresses = [0 if peer is None else peer.ctypes.data for peer in peers]
        bases = torch.tensor(addresses, dtype=torch.int64)
        return Block(nbytes, torch.from_numpy(memory), bases, owner=(self, peers))

    def barrier(self) -> None:
        """OpenSHMEM's own."""
        self._check_open("barrier")
        _meet()

    def close(self) -> None:
        """Free everything, together."""
        if self.closed:
            return
        self.closed = True
        _meet()
        for memory in (*self._memory, self._requests):
            shmem.free(memory)

    def _agree(self, label: str, nbytes: int) -> None:
        """Every element puts its request into the table of every other."""
        digest = hashlib.sha256(label.encode()).digest()
        words = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
        own = np.array([*words, nbytes], dtype=np.int64)
        for element in range(self.size):
            shmem.put(self._requests[self.rank], own, element)
        _meet()
        requests = self._requests.copy()
        _meet()
        differ = (requests != requests[0]).any()
        if differ:
            raise HeapMismatch(
                f"allocate({label!r}, {nbytes} bytes) on element {self.rank}, another label or "
                f"size elsewhere (sizes {requests[:, -1].tolist()})"
            )

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise HeapError(f"{what}: this heap has been closed")


def _meet() -> None:
    """A barrier behind which all puts have arrived."""
    shmem.quiet()
    shmem.barrier_all()
