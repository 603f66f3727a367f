"""Panels: how a state is cut into tiles, and how a message of one lies in memory.

A panel is one tile of one head's state, the unit that is computed, sent and signalled on its own.
With an elementwise M every entry is independent and both dims are cut; with a dense M only columns
are. A vector is one row of columns, or with a dense M one column of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flexla_dist.errors import ShardingError

HEADER_BYTES = 128
LARGEST_DENSE = 256  # rows of a dense M: what a product's accumulator can hold
TILE_ENTRIES = 4096  # of an elementwise state: 32 registers for each of 128 threads
VECTOR_ENTRIES = 1024
SLICE = 32  # of the inner dim that a dense product reads at a time


@dataclass(frozen=True)
class StateForm:
    """Shape of one state and kind of its M; the same on all ranks.

    dims: of the state, (K, V) or (K,); decay: dims of the elementwise M, each 1 or the state's, or
    None for the identity; dense: M is a [K, K] matrix on the first dim.
    """

    dims: tuple[int, ...]
    decay: tuple[int, ...] | None = None
    dense: bool = False

    def __str__(self) -> str:
        kind = "a dense M" if self.dense else "no decay"
        return f"{list(self.dims)} with " + (f"decay {list(self.decay)}" if self.decay else kind)


@dataclass(frozen=True)
class Tiling:
    """Tiles of one state: `rows` x `columns` entries in tiles of BR x BC, decay in DR x DC."""

    rows: int
    columns: int
    decay_rows: int
    decay_columns: int
    BR: int
    BC: int
    DR: int
    DC: int
    has_decay: bool
    dense: bool

    @property
    def row_tiles(self) -> int:
        """Tiles on top of each other."""
        return -(-self.rows // self.BR)

    @property
    def column_tiles(self) -> int:
        """Tiles beside each other."""
        return -(-self.columns // self.BC)

    @property
    def tiles(self) -> int:
        """Panels of one head."""
        return self.row_tiles * self.column_tiles

    @property
    def BM(self) -> int:
        """Columns of a dense M that are composed at a time."""
        return min(self.BR, 64)

    @property
    def BK(self) -> int:
        """Inner entries of a dense product that are read at a time."""
        return min(self.BR, SLICE)

    @property
    def element_words(self) -> int:
        """fp32 words of a state tile with its M."""
        factor = self.BR * self.BR if self.dense else self.DR * self.DC * self.has_decay
        return self.BR * self.BC + factor

    @property
    def scratch_words(self) -> int:
        """fp32 words that a panel needs beside the messages."""
        return 2 * self.element_words + self.BR * self.BC if self.dense else 0

    def message_bytes(self, strategy: str) -> int:
        """Bytes of a message, a multiple of 128: the state alone in a chain, else with its M."""
        words = self.BR * self.BC if strategy == "chain" else self.element_words
        return HEADER_BYTES + -(-4 * words // 128) * 128


def tiling(form: StateForm) -> Tiling:
    """Cut a state into tiles; ShardingError where a kernel cannot hold it."""
    _check(form)
    if form.dense:
        rows, columns = form.dims[0], prod(form.dims[1:])
        br = max(16, _power_of_two(rows))
        bc = max(16, min(_power_of_two(columns), 8192 // br))
        return Tiling(rows, columns, 1, 1, br, bc, 1, 1, False, True)
    rows, columns = form.dims if len(form.dims) == 2 else (1, form.dims[0])
    decay = form.decay or (1,) * len(form.dims)
    decay_rows, decay_columns = decay if len(decay) == 2 else (1, decay[0])
    if rows == 1:
        br, bc = 1, min(_power_of_two(columns), VECTOR_ENTRIES)
    else:
        bc = min(_power_of_two(columns), 64)
        br = min(_power_of_two(rows), TILE_ENTRIES // bc)
    return Tiling(
        rows,
        columns,
        decay_rows,
        decay_columns,
        br,
        bc,
        br if decay_rows > 1 else 1,
        bc if decay_columns > 1 else 1,
        form.decay is not None,
        False,
    )


def _check(form: StateForm) -> None:
    if len(form.dims) not in (1, 2) or min(form.dims) < 1:
        raise ShardingError(
            f"a state of dims {form.dims}: the device engine exchanges states of one or two dims; "
            "use the host engine for others"
        )
    if form.dense and form.decay is not None:
        raise ShardingError(
            "a state has both a decay and a dense M; multiply the rows of the matrix by the decay"
        )
    if form.dense and form.dims[0] > LARGEST_DENSE:
        raise ShardingError(
            f"a dense M of {form.dims[0]} rows: the device engine holds at most {LARGEST_DENSE}; "
            "use the host engine"
        )
    if form.decay is not None:
        fits = len(form.decay) == len(form.dims) and all(
            d in (1, size) for d, size in zip(form.decay, form.dims, strict=True)
        )
        if not fits:
            raise ShardingError(
                f"a decay of dims {form.decay} for a state of dims {form.dims}: expected as many "
                "dims, each 1 or the state's"
            )


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
