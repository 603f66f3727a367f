"""Kernels between the scans of segments against PyTorch, in the interpreter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flexla_dist.compiler.executor.fold_kernel import fold_segments, segment_products
from flexla_dist.compiler.executor.layout import make_layout
from flexla_dist.compiler.executor.segments import Segments, cut, fold, fold_reverse

HEADS = 2
LAYOUTS: dict[str, Segments] = {
    "one document": cut(make_layout(1, 100, 4, None), 8),
    "two rows": cut(make_layout(2, 40, 4, None), 3),
    "packed": cut(make_layout(1, 61, 4, (0, 0, 30, 30, 33, 61)), 2),
}
STATES = {  # dims of the state and of M
    "matrix, scalar M": ((6, 5), (1, 1)),
    "matrix, M of rows": ((6, 5), (6, 1)),
    "matrix, M of columns": ((6, 5), (1, 5)),
    "matrix, full M": ((30, 20), (30, 20)),
    "vector": ((7,), (7,)),
    "identity": ((6, 5), None),
}


def table(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dims", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("segments", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_states_entering_segments(
    segments: Segments, dims: tuple[tuple[int, ...], tuple[int, ...] | None], reverse: bool
) -> None:
    state, mapped = dims
    documents = segments.documents[-1] + 1
    local = torch.randn(segments.count, HEADS, *state)
    entry = torch.randn(documents, HEADS, *state)
    decay = None if mapped is None else torch.rand(segments.count, HEADS, *mapped)
    owners = [sum(d < n for d in segments.documents) for n in range(documents + 1)]
    entering, leave = torch.full_like(local, torch.nan), torch.full_like(entry, torch.nan)
    rows, columns = (*state, 1)[:2]
    map_rows, map_columns = (1, 1) if mapped is None else (*mapped, 1)[:2]
    block = 16
    blocks = -(-rows * columns // block)
    for first, count in ((0, 1), (1, HEADS - 1)):  # heads may be folded in parts
        fold_segments[(documents * blocks, count)](
            local,
            local if decay is None else decay,
            entry,
            table(owners),
            entering,
            leave,
            first,
            HV=HEADS,
            ROWS=rows,
            COLUMNS=columns,
            MAP_ROWS=map_rows,
            MAP_COLUMNS=map_columns,
            DECAY=decay is not None,
            REVERSE=reverse,
            BLOCK=block,
            num_blocks=blocks,
        )
    want = (fold_reverse if reverse else fold)(local, decay, None, entry, segments)
    torch.testing.assert_close(entering, want)
    last = [segments.documents.index(d) for d in range(documents)]
    if not reverse:
        last = [owners[d + 1] - 1 for d in range(documents)]
    step = 1.0 if decay is None else decay[last]
    torch.testing.assert_close(leave, want[last] * step + local[last])


@pytest.mark.parametrize("size", [1, 5, 70])
@pytest.mark.parametrize("segments", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_products_of_segments(segments: Segments, size: int) -> None:
    decays = torch.rand(segments.chunks[-1], HEADS, size) + 0.5
    products = torch.full((segments.count, HEADS, size), torch.nan)
    blocks = -(-size // 16)
    segment_products[(segments.count * blocks, HEADS)](
        decays,
        table(segments.chunks),
        products,
        HV=HEADS,
        SIZE=size,
        BLOCK=16,
        ROWS=4,
        num_blocks=blocks,
    )
    want = [decays[a:b].prod(0) for a, b in pairwise(segments.chunks)]
    torch.testing.assert_close(products, torch.stack(want))
