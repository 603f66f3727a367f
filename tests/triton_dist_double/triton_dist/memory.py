"""The symmetric memory that the double works on, and how it finds a peer's address."""

from dataclasses import dataclass, field
from typing import Any

import triton.language as tl


@dataclass
class Symmetric:
    """Blocks of symmetric memory: their size and the addresses of all ranks' parts."""

    rank: int = -1
    size: int = 0
    blocks: list[tuple[int, list[int]]] = field(default_factory=list)

    def address(self, own: int, peer: int) -> int:
        """The address at `peer` that corresponds to one of this rank."""
        if not 0 <= peer < self.size:
            raise ValueError(f"rank {peer} of {self.size}")
        for nbytes, bases in self.blocks:
            offset = own - bases[self.rank]
            if 0 <= offset < nbytes:
                return bases[peer] + offset
        raise ValueError(f"address {own:#x} is not in symmetric memory")


SYMMETRIC = Symmetric()


def bind(rank: int, size: int, blocks: list[tuple[int, list[int]]]) -> None:
    """Say which memory is symmetric: (bytes, addresses of all parts) of every block."""
    SYMMETRIC.rank, SYMMETRIC.size, SYMMETRIC.blocks = rank, size, blocks


def number(value: Any) -> int:
    """The integer of a scalar of the interpreter."""
    if isinstance(value, tl.constexpr):
        value = value.value
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)


def element(value: Any) -> int:
    """The number of a rank, which must be a 32-bit integer."""
    if isinstance(value, tl.tensor) and value.dtype != tl.int32:
        raise TypeError(f"a rank is {value.dtype}, expected int32")
    return number(value)


def scalar_pointer(pointer: Any, what: str) -> tl.tensor:
    """A pointer to one value, as these functions want it."""
    if not isinstance(pointer, tl.tensor) or not pointer.type.is_ptr():
        raise TypeError(f"{what}: got {pointer}, expected a scalar pointer")
    return pointer


def at_peer(pointer: tl.tensor, peer: int) -> tl.tensor:
    """The same pointer in the part of `peer`."""
    own = number(pointer.to(tl.int64))
    return tl.cast(tl.full([], SYMMETRIC.address(own, peer), tl.int64), pointer.dtype)
