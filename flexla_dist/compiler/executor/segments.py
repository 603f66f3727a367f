"""Documents cut into segments, so that a scan has enough programs to fill the device.

Contract: a segment is a run of whole chunks of one document (the last may be ragged). Every segment
is scanned from zero, which gives S_hat; with M of each segment the states entering the segments
follow by a short fold; then all segments are scanned again at once from their true states. The
reversed scan does the same with M transposed. This is the sequence-parallel scheme within one
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import ChunkLayout
from flexla_dist.compiler.executor.problem import Outline
from flexla_dist.compiler.executor.tables import device_table

MIN_CHUNKS = 8


@dataclass(frozen=True)
class Segments:
    """Segments of all documents in order.

    `documents[i]` owns segment i, `starts` are the flat token offsets and `chunks` the chunk
    offsets, each with one entry more than there are segments. `positions[j]` lists the segments
    that are the j-th of their document.
    """

    documents: tuple[int, ...]
    starts: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self.documents)

    @property
    def positions(self) -> list[list[int]]:
        """Segments by their place within the document."""
        out: list[list[int]] = []
        seen: dict[int, int] = {}
        for index, document in enumerate(self.documents):
            place = seen.get(document, 0)
            seen[document] = place + 1
            if place == len(out):
                out.append([])
            out[place].append(index)
        return out


@dataclass(frozen=True)
class Cutting:
    """How long segments are: `fixed` chunks, or so that about `segments` of them run at once."""

    fixed: int | None
    segments: int = 1

    def length(self, total: int) -> int:
        """Chunks of a segment, never very few; `total` counts the chunks of all documents."""
        if self.fixed is not None:
            return self.fixed
        return max(MIN_CHUNKS, -(-total // self.segments))

    def most_segments(self, outline: Outline) -> int:
        """Rows that hold the segments of every call of an outline; 0 if none cuts a document."""
        chunks = outline.most_chunks
        if not outline.packed:
            each = -(-chunks // self.length(outline.batch * chunks))
            return outline.batch * each if each > 1 else 0
        cuts = chunks // self.fixed if self.fixed else min(chunks // MIN_CHUNKS, self.segments)
        return outline.num_sequences + cuts if cuts else 0


def cut(layout: ChunkLayout, chunks_per_segment: int) -> Segments:
    """Cut every document into segments of that many chunks."""
    documents, starts, firsts = [], [0], [0]
    for document, start, count, tokens in _document_spans(layout):
        first = firsts[-1]
        for at in range(0, count, chunks_per_segment):
            end = min(at + chunks_per_segment, count)
            documents.append(document)
            starts.append(start + min(end * layout.chunk_size, tokens))
            firsts.append(first + end)
        if count == 0:
            documents.append(document)
            starts.append(start)
            firsts.append(first)
    return Segments(tuple(documents), tuple(starts), tuple(firsts))


def _document_spans(layout: ChunkLayout) -> list[tuple[int, int, int, int]]:
    """(document, first flat token, chunks, tokens) of every document."""
    if not layout.packed:
        count = len(layout.chunks)
        return [(b, b * layout.tokens, count, layout.tokens) for b in range(layout.batch)]
    counts = [0] * layout.documents
    for chunk in layout.chunks:
        counts[chunk.document] += 1
    offsets = layout.offsets
    return [(d, offsets[d], counts[d], offsets[d + 1] - offsets[d]) for d in range(len(counts))]


def fold(
    local: Tensor, decay: Tensor | None, matrix: Tensor | None, entry: Tensor, segments: Segments
) -> Tensor:
    """States entering the segments, from those entering the documents.

    S' = decay * S + local, or matrix @ S + local; decay and matrix None is the identity.
    """
    entering = torch.empty_like(local)
    previous: list[int] = []
    for place, indices in enumerate(segments.positions):
        if place == 0:
            entering[:] = _spread(entry, segments.documents)
            previous = indices
            continue
        owners = {segments.documents[i]: i for i in previous}
        before = [owners[segments.documents[i]] for i in indices]
        entering[select_rows(indices, local.device)] = _step(local, decay, matrix, entering, before)
        previous = indices
    return entering


def fold_reverse(
    local: Tensor, decay: Tensor | None, matrix: Tensor | None, entry: Tensor, segments: Segments
) -> Tensor:
    """Gradients of the states leaving the segments, from those leaving the documents."""
    turned = Segments(segments.documents[::-1], segments.starts[::-1], segments.chunks[::-1])
    flip = None if decay is None else decay.flip(0)
    dense = None if matrix is None else matrix.flip(0).mT
    return fold(local.flip(0), flip, dense, entry, turned).flip(0)


def _spread(entry: Tensor, documents: tuple[int, ...]) -> Tensor:
    """One row of `entry` for each segment; without an index tensor where documents are alike."""
    each = len(documents) // len(entry)
    order = list(range(len(entry)))
    if list(documents) == [d for d in order for _ in range(each)]:
        return entry.repeat_interleave(each, 0)
    if list(documents) == [d for d in reversed(order) for _ in range(each)]:
        return entry.flip(0).repeat_interleave(each, 0)
    return entry[device_table(documents, entry.device, torch.int64)]


def select_rows(indices: list[int], device: torch.device) -> slice | Tensor:
    """Indices of rows: a slice where they are equally spaced, else a table on the device."""
    if len(indices) == 1:
        return slice(indices[0], indices[0] + 1)
    step = indices[1] - indices[0]
    if step > 0 and all(b - a == step for a, b in pairwise(indices)):
        return slice(indices[0], indices[-1] + 1, step)
    return device_table(indices, device, torch.int64)


def _step(
    local: Tensor,
    decay: Tensor | None,
    matrix: Tensor | None,
    entering: Tensor,
    before: list[int],
) -> Tensor:
    rows = select_rows(before, local.device)
    state, added = entering[rows], local[rows]
    if matrix is not None:
        return torch.matmul(matrix[rows], state) + added
    if decay is None:
        return state + added
    return torch.addcmul(added, decay[rows], state)
