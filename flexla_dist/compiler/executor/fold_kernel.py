"""Kernels between the scans of segments: M of each segment, and the states that enter them.

Contract: written by hand, for elementwise M (dense M goes through `segments.fold`). Everything is
float32; the order of sums and products is fixed. They do in two launches what takes several
PyTorch operations for each segment of a document.
"""

from __future__ import annotations

import triton
import triton.language as tl

PRODUCT_BLOCK, PRODUCT_ROWS = 64, 16
FOLD_BLOCK = 512


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def segment_products(
    decays_ptr,  # [chunks, HV, SIZE]
    chunks_ptr,  # [segments + 1]: first chunk of each
    products_ptr,  # [segments, HV, SIZE]
    HV: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """One program multiplies the decays of the chunks of one segment, one head, BLOCK numbers."""
    segment = (tl.program_id(0) // num_blocks).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    at = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(chunks_ptr + segment).to(tl.int64)
    count = tl.load(chunks_ptr + segment + 1).to(tl.int64) - first
    inside = at < SIZE
    product = tl.full((BLOCK,), 1.0, tl.float32)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        place = ((first + row) * HV + head)[:, None] * SIZE + at[None, :]
        mask = (row < count)[:, None] & inside[None, :]
        rows = tl.load(decays_ptr + place, mask=mask, other=1.0)
        product = product * tl.reduce(rows, 0, _multiply)
    tl.store(products_ptr + (segment * HV + head) * SIZE + at, product, mask=inside)


@triton.jit(do_not_specialize=["first_head"])
def fold_segments(
    local_ptr,  # [segments, HV, ROWS, COLUMNS]: what segments leave behind from zero
    products_ptr,  # [segments, HV, MAP_ROWS, MAP_COLUMNS]: M of each; not read without DECAY
    enter_ptr,  # [documents, HV, ROWS, COLUMNS]
    owners_ptr,  # [documents + 1]: first segment of each
    entering_ptr,  # [segments, HV, ROWS, COLUMNS]
    leave_ptr,  # [documents, HV, ROWS, COLUMNS]
    first_head,
    HV: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAP_ROWS: tl.constexpr,
    MAP_COLUMNS: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """One program folds BLOCK numbers of the state of one document and head: S' = M S + local."""
    document = (tl.program_id(0) // num_blocks).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) + first_head
    at = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    size: tl.constexpr = ROWS * COLUMNS
    inside = at < size
    row = at // COLUMNS if MAP_ROWS > 1 else at * 0
    column = at % COLUMNS if MAP_COLUMNS > 1 else at * 0
    place = row * MAP_COLUMNS + column
    first = tl.load(owners_ptr + document).to(tl.int64)
    count = tl.load(owners_ptr + document + 1).to(tl.int64) - first
    whole = (document * HV + head) * size + at
    state = tl.load(enter_ptr + whole, mask=inside, other=0.0).to(tl.float32)
    for step in range(count):
        segment = first + step
        if REVERSE:
            segment = first + count - 1 - step
        base = segment * HV + head
        tl.store(entering_ptr + base * size + at, state, mask=inside)
        local = tl.load(local_ptr + base * size + at, mask=inside, other=0.0)
        if DECAY:
            decay = tl.load(
                products_ptr + base * (MAP_ROWS * MAP_COLUMNS) + place, mask=inside, other=0.0
            )
            state = state * decay + local
        else:
            state = state + local
    tl.store(leave_ptr + whole, state, mask=inside)
