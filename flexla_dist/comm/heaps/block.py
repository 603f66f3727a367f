"""`Block` and `SymmetricHeap`: memory that every rank of a group has, and that its peers write to.

Contract: a rank writes a peer's part by its address, `bases[peer] + offset`; the offset means the
same on every rank. What a rank wrote is visible to its owner after the heap's barrier, or after a
flag that was set with release order behind the write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from flexla_dist.comm.heaps.errors import HeapArgumentError

Dialect = Literal["p2p", "nvshmem"]
ALIGNMENT = 256  # of every part, in bytes: enough for the widest vector stores


@dataclass(frozen=True, eq=False)
class Block:
    """One symmetric allocation as one rank sees it.

    nbytes: size of every rank's part.
    local: uint8 [nbytes] on the heap's device, this rank's part; zero after allocation.
    bases: int64 [size] on the heap's device, the address of every rank's part as this rank sees
        it; 0 where a kernel cannot address the peer's memory.
    owner: what keeps the addresses valid; they are as long as the block or its heap is held.
    """

    nbytes: int
    local: Tensor
    bases: Tensor
    owner: object = field(default=None, repr=False)

    def view(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """A view of `local` from byte `offset` on, of another dtype and shape.

        Raises HeapArgumentError if it is not aligned to the dtype or does not fit.
        """
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize:
            raise HeapArgumentError(
                f"view at byte {offset} as {dtype}; expected a multiple of {dtype.itemsize}, "
                "not negative: place the view on a multiple of the item's size"
            )
        if offset + size > self.nbytes:
            raise HeapArgumentError(
                f"view of shape {tuple(shape)} as {dtype} at byte {offset} ends at byte "
                f"{offset + size}, and the block has {self.nbytes}; allocate a larger block"
            )
        return self.local[offset : offset + size].view(dtype).view(tuple(shape))


class SymmetricHeap(Protocol):
    """Symmetric memory of one group, seen from one rank.

    name: "posix_shm", "torch_symm", "nvshmem", or that of a heap of one's own.
    dialect: "p2p" if kernels write to peers by address, "nvshmem" if by NVSHMEM's functions.
    """

    @property
    def name(self) -> str: ...

    @property
    def dialect(self) -> Dialect: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, label: str, nbytes: int) -> Block:
        """A zeroed part of `nbytes` bytes on every rank; all ranks call it in the same order.

        When it returns, all parts have been zeroed, and peers may be written to.

        Raises HeapMismatch on every rank if label or nbytes differ.
        """
        ...

    def barrier(self) -> None:
        """Wait for all ranks; what they wrote to heap memory before is visible afterwards."""
        ...

    def close(self) -> None:
        """Give the memory back once all ranks have come here; a second call does nothing."""
        ...


def as_device(device: torch.device | str) -> torch.device:
    """The device with its number, if it is here; HeapArgumentError if not."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise HeapArgumentError(
            f"a heap on device {str(device)!r} was asked for, and there is none here ({reason}); "
            "name a device of this machine"
        ) from None


def check_request(label: str, nbytes: int) -> None:
    """Refuse what no heap can allocate."""
    if not isinstance(label, str) or not label:
        raise HeapArgumentError(
            f"allocate: label is {label!r}, expected a text that names the memory, such as 'panels'"
        )
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise HeapArgumentError(
            f"allocate({label!r}): nbytes is {nbytes!r}, expected a whole number of bytes, at "
            "least 1"
        )
