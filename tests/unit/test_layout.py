"""How tokens are cut into chunks and slabs, gathered and scattered."""

from __future__ import annotations

import random

import pytest
import torch

from flexla_dist.compiler.executor.layout import (
    ChunkLayout,
    Slab,
    fitting_chunk_size,
    gather,
    make_layout,
    scatter,
    valid_mask,
)


def layouts() -> list[ChunkLayout]:
    rng = random.Random(0)
    out = [make_layout(b, t, c, None) for b in (1, 3) for t in (0, 1, 7, 8, 9, 64) for c in (1, 8)]
    fixed = [(0, 0), (0, 0, 0), (0, 5), (0, 8, 16), (0, 0, 3, 3, 12, 28, 28), (0, 1, 2, 3)]
    for _ in range(20):
        cuts = sorted(rng.choices(range(40), k=rng.randint(0, 6)))
        fixed.append((0, *cuts, 40))
    return out + [make_layout(1, o[-1], c, o) for o in fixed for c in (1, 4, 8, 64)]


def all_slabs(layout: ChunkLayout, size: int) -> list[Slab]:
    return list(layout.slabs(range(len(layout.chunks)), size))


@pytest.mark.parametrize("layout", layouts(), ids=lambda x: f"{x.offsets}/{x.chunk_size}")
def test_chunks_cover_every_token_once_and_never_mix_documents(layout: ChunkLayout) -> None:
    covered = []
    for chunk in layout.chunks:
        assert 1 <= chunk.length <= layout.chunk_size
        tokens = range(chunk.start, chunk.start + chunk.length)
        low, high = layout.offsets[chunk.document], layout.offsets[chunk.document + 1]
        assert low <= tokens.start and tokens.stop <= high
        assert chunk.first == (tokens.start == low) and chunk.last == (tokens.stop == high)
        assert chunk.last or chunk.length == layout.chunk_size
        covered.extend(tokens)
    assert covered == list(range(layout.tokens))
    assert layout.documents == (len(layout.offsets) - 1 if layout.packed else layout.batch)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_slabs_cover_every_chunk_in_order(size: int) -> None:
    for layout in layouts():
        slabs = all_slabs(layout, size)
        assert [c for slab in slabs for c in slab.chunks] == list(layout.chunks)
        at = 0
        for slab in slabs:
            assert slab.first == at and 1 <= slab.count <= size
            at += slab.count
            ragged = any(c.length < layout.chunk_size for c in slab.chunks)
            assert slab.padded == ragged
        if not layout.packed and layout.tokens > layout.chunk_size:
            assert sum(s.count for s in slabs if s.padded) <= 1  # whole chunks run without padding


def test_chunks_of_a_document() -> None:
    layout = make_layout(1, 28, 8, (0, 0, 3, 3, 12, 28, 28))
    by_document = [layout.chunks_of(n) for n in range(layout.documents)]
    assert [list(r) for r in by_document] == [[], [0], [], [1, 2], [3, 4], []]
    assert list(make_layout(3, 20, 8, None).chunks_of(-1)) == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("tail", [(), (3,), (2, 3)])
def test_scatter_undoes_gather(size: int, tail: tuple[int, ...]) -> None:
    for layout in layouts():
        x = torch.randn(layout.batch, layout.tokens, 2, *tail)
        out = torch.full_like(x, torch.nan)
        for slab in all_slabs(layout, size):
            part = gather(layout, slab, x)
            assert part.shape == (layout.batch, 2, slab.count, layout.chunk_size, *tail)
            scatter(layout, slab, part, out)
        assert torch.equal(out, x)


def test_gather_reads_the_tokens_of_a_chunk_and_repeats_a_real_one_as_padding() -> None:
    layout = make_layout(1, 12, 8, (0, 3, 12))
    x = torch.arange(12.0).view(1, 12, 1)
    (slab,) = all_slabs(layout, 10)
    part = gather(layout, slab, x)[0, 0]
    assert part[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2]
    assert part[1].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert part[2].tolist() == [11] * 8
    mask = valid_mask(layout, slab, torch.device("cpu"))
    assert mask.shape == (1, 1, 3, 8) and mask.sum(-1).flatten().tolist() == [3, 8, 1]


def test_gather_takes_any_strides() -> None:
    layout = make_layout(2, 21, 8, None)
    x = torch.randn(3, 2, 21, 2).permute(1, 2, 3, 0)
    for slab in all_slabs(layout, 2):
        assert torch.equal(gather(layout, slab, x), gather(layout, slab, x.contiguous()))


def test_chunks_are_no_longer_than_the_longest_document() -> None:
    assert [fitting_chunk_size(n, 64) for n in (0, 1, 2, 3, 17, 63, 64, 1000)] == [
        *(1, 1, 2, 4, 32, 64, 64, 64)
    ]
