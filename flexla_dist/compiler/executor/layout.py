"""How the tokens of a call are cut into chunks.

Contract: a chunk never holds tokens of two documents. Unpacked calls have B lanes that run side
by side, each one document; a packed call has one lane whose chunks come document after document.
Everything here is host integers: no device is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexla_dist.compiler.executor.tables import device_table
from flexla_dist.errors import ArgumentError


@dataclass(frozen=True)
class Chunk:
    """One chunk of a lane: its tokens `[start, start + length)` and its document."""

    start: int
    length: int
    document: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Slab:
    """A run of chunks `[first, first + count)` of the layout that is computed at once."""

    first: int
    chunks: tuple[Chunk, ...]
    padded: bool
    contiguous: bool

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.chunks)


@dataclass(frozen=True)
class ChunkLayout:
    """All chunks of a call, in order, with the documents' token spans.

    `documents` counts the states of the call: B when unpacked, N when packed. In an unpacked layout
    every chunk stands for B chunks, one a lane, and `Chunk.document` is 0.
    """

    batch: int
    tokens: int
    chunk_size: int
    packed: bool
    offsets: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def documents(self) -> int:
        """Number of states that enter and leave."""
        return len(self.offsets) - 1 if self.packed else self.batch

    def chunks_of(self, document: int) -> range:
        """Indices of one document's chunks; -1 in an unpacked layout means all of them."""
        if not self.packed:
            return range(len(self.chunks))
        mine = [at for at, chunk in enumerate(self.chunks) if chunk.document == document]
        return range(mine[0], mine[-1] + 1) if mine else range(0)

    def slabs(self, chunks: range, size: int) -> Iterator[Slab]:
        """Cut a range of chunks into slabs of at most `size`; a ragged tail is its own slab
        when the chunks before it are whole, so that they run without padding."""
        at = chunks.start
        while at < chunks.stop:
            end = min(at + size, chunks.stop)
            run = self.chunks[at:end]
            whole = [chunk.length == self.chunk_size for chunk in run]
            if not self.packed and not whole[-1] and len(run) > 1:
                end -= 1
                run = run[:-1]
                whole = whole[:-1]
            joined = all(b.start == a.start + self.chunk_size for a, b in pairwise(run))
            yield Slab(at, tuple(run), not all(whole), joined)
            at = end


@lru_cache(maxsize=64)
def make_layout(
    batch: int, tokens: int, chunk_size: int, offsets: tuple[int, ...] | None
) -> ChunkLayout:
    """Layout of an unpacked (`offsets` None) or packed call; made once."""
    spans = [(0, 0, tokens)] if offsets is None else _spans(offsets)
    chunks = []
    for document, start, end in spans:
        for at in range(start, end, chunk_size):
            length = min(chunk_size, end - at)
            chunks.append(Chunk(at, length, document, at == start, at + length == end))
    edges = (0, tokens) if offsets is None else offsets
    return ChunkLayout(batch, tokens, chunk_size, offsets is not None, edges, tuple(chunks))


def _spans(offsets: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(i, a, b) for i, (a, b) in enumerate(pairwise(offsets))]


def check_chunk_size(value: Any) -> None:
    """ArgumentError unless it is None, which lets the executor choose, or a power of two."""
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < 1 or value & (value - 1):
        raise ArgumentError(f"chunk_size must be a power of two, got {value!r}")


def fitting_chunk_size(longest: int, limit: int) -> int:
    """The power of two that holds the longest document, at most `limit`."""
    size = 1
    while size < min(longest, limit):
        size *= 2
    return size


def _positions(layout: ChunkLayout, slab: Slab, device: torch.device) -> Tensor:
    starts = device_table([chunk.start for chunk in slab.chunks], device, torch.int64)
    lengths = device_table([chunk.length for chunk in slab.chunks], device, torch.int64)
    row = torch.arange(layout.chunk_size, device=device)
    return starts[:, None] + torch.minimum(row[None, :], lengths[:, None] - 1)


def valid_mask(layout: ChunkLayout, slab: Slab, device: torch.device) -> Tensor:
    """[1, 1, n, C]: which tokens of a slab are real."""
    lengths = device_table([chunk.length for chunk in slab.chunks], device, torch.int64)
    row = torch.arange(layout.chunk_size, device=device)
    return (row[None, :] < lengths[:, None])[None, None]


def gather(layout: ChunkLayout, slab: Slab, x: Tensor) -> Tensor:
    """Tokens of a slab, [B, T, H, ...] to [B, H, n, C, ...]; padded places repeat a real token."""
    size, count = layout.chunk_size, slab.count
    if slab.contiguous and not slab.padded:
        start = slab.chunks[0].start
        part = x[:, start : start + count * size].unflatten(1, (count, size))
    else:
        flat = x[:, _positions(layout, slab, x.device).flatten()]
        part = flat.unflatten(1, (count, size))
    order = (0, 3, 1, 2, *range(4, part.dim()))
    return part.permute(order)


def scatter(layout: ChunkLayout, slab: Slab, part: Tensor, out: Tensor) -> None:
    """Write the real tokens of [B, H, n, C, ...] into [B, T, H, ...]."""
    order = (0, 2, 3, 1, *range(4, part.dim()))
    rows = part.permute(order)
    if slab.contiguous and not slab.padded:
        start = slab.chunks[0].start
        stop = start + slab.count * layout.chunk_size
        out[:, start:stop].unflatten(1, (slab.count, layout.chunk_size)).copy_(rows)
        return
    for at, chunk in enumerate(slab.chunks):
        out[:, chunk.start : chunk.start + chunk.length].copy_(rows[:, at, : chunk.length])
