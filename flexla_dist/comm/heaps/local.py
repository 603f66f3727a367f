"""`LocalHeap`: W virtual ranks in one process, for kernels that play all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.comm.heaps.block import ALIGNMENT, Block, Dialect, as_device, check_request
from flexla_dist.comm.heaps.errors import HeapArgumentError, HeapError


@dataclass(frozen=True, eq=False)
class LocalBlock:
    """One allocation of all virtual ranks.

    parts: the block of every rank, in rank order; bases: int64 [size], the addresses of the parts.
    """

    nbytes: int
    parts: tuple[Block, ...]
    bases: Tensor


class LocalHeap:
    """Memory of `size` virtual ranks on one device, CPU or GPU.

    One launch serves all ranks: a program finds its own from its index. There is nobody to agree
    with, so `allocate` returns the parts of all ranks at once.
    """

    name = "local"
    dialect: Dialect = "p2p"

    def __init__(self, size: int, device: torch.device | str) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise HeapArgumentError(
                f"LocalHeap: size is {size!r}, expected a whole number of virtual ranks, at least 1"
            )
        self.size = size
        self.device = as_device(device)
        self.closed = False

    def allocate(self, label: str, nbytes: int) -> LocalBlock:
        """A zeroed part of `nbytes` bytes for every virtual rank."""
        check_request(label, nbytes)
        self._check_open(f"allocate({label!r}, {nbytes})")
        stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
        whole = torch.zeros(self.size * stride, dtype=torch.uint8, device=self.device)
        locals_ = [whole[rank * stride :][:nbytes] for rank in range(self.size)]
        addresses = [part.data_ptr() for part in locals_]
        bases = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        parts = tuple(Block(nbytes, part, bases) for part in locals_)
        return LocalBlock(nbytes, parts, bases)

    def barrier(self) -> None:
        """Wait for the kernels launched so far."""
        self._check_open("barrier")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """No more allocations; the memory goes with its blocks."""
        self.closed = True

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise HeapError(f"{what}: this local heap has been closed; make a new one")
