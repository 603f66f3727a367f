"""Dims of a kernel: block sizes, masks, and what a value in registers looks like.

Contract: dim `K` of a spec is `size_K` (its size) and `tile_K` (a power of two, the block) in a
kernel. One dim, the column of the output, may be cut into several tiles; all others are whole. A
value whose dims are all `1` is a scalar. Entries beyond the size exist in registers; `Tile.zero`
names the dims in which they are known to be zero, and contractions mask the others. `Tile.wild`
names those in which they may be infinite or NaN, so that zero times them is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims


@dataclass(frozen=True)
class Tile:
    """A value of a kernel: its name in the source, its dims, whether it is float32 already."""

    name: str
    dims: Dims
    wide: bool = True
    zero: frozenset[str] = field(default_factory=frozenset)
    wild: frozenset[str] = field(default_factory=frozenset)

    @property
    def scalar(self) -> bool:
        """True if no dim is larger than one."""
        return all(dim == UNIT_DIM for dim in self.dims)


def shape_text(dims: Dims) -> str:
    """`[tile_C, tile_K]` as source."""
    return "[" + ", ".join("1" if dim == UNIT_DIM else f"tile_{dim}" for dim in dims) + "]"


def index_name(dim: str) -> str:
    """Variable that holds the positions along a dim."""
    return "rows" if dim == TOKEN_DIM else f"at_{dim}"


def along(vector: str, axis: int, rank: int) -> str:
    """A vector placed on an axis of a tile: `x[:, None]`."""
    if rank == 1:
        return vector
    return vector + ("[:, None]" if axis == 0 else "[None, :]")
