"""Single rows and neighbouring rows of a chunk held in registers.

Contract: every function takes a block `[C, K]` or a vector `[C]`, rows are tokens, and selects:
what is not asked for is never multiplied, so an infinity or NaN elsewhere does not leak.
"""

import triton
import triton.language as tl


@triton.jit
def take_row(x, INDEX: tl.constexpr):
    """Row `INDEX` of x; a negative index counts from the end.

    x [C, K] gives [K]; x [C] gives a scalar. Exact. Cost: C*K selects and one reduction over rows.
    """
    C: tl.constexpr = x.shape[0]
    tl.static_assert(INDEX < C and INDEX >= -C, "INDEX is a row of x")
    chosen = tl.arange(0, C) == (INDEX + C if INDEX < 0 else INDEX)
    if len(x.shape) == 2:
        chosen = chosen[:, None]
    return tl.sum(tl.where(chosen, x, 0.0), axis=0)


@triton.jit
def place_row(row, C: tl.constexpr, INDEX: tl.constexpr):
    """A chunk of zeros with `row` at row `INDEX`: the adjoint of `take_row`.

    row [K] gives [C, K]; a scalar gives [C]. A negative index counts from the end. Cost:
    C*K selects.
    """
    tl.static_assert(INDEX < C and INDEX >= -C, "INDEX is a row of the result")
    chosen = tl.arange(0, C) == (INDEX + C if INDEX < 0 else INDEX)
    if len(row.shape) == 1:
        return tl.where(chosen[:, None], row[None, :], 0.0)
    else:
        return tl.where(chosen, row, 0.0)


@triton.jit
def shift_rows(x, C: tl.constexpr, BY: tl.constexpr):
    """Rows moved by one token: `y[r] = x[r - BY]`, zero where there is no such row.

    x [C, K] or [C], BY = 1 (towards later tokens) or -1. Exact. The two directions are adjoint to
    each other. Cost: one trip of x through shared memory (or shuffles) and C*K selects.
    """
    tl.static_assert(BY == 1 or BY == -1, "BY is 1 or -1")
    rows = tl.arange(0, C)
    source = rows - BY
    inside = (source >= 0) & (source < C)
    source = tl.where(inside, source, rows)
    if len(x.shape) == 2:
        K: tl.constexpr = x.shape[1]
        moved = tl.gather(x, tl.broadcast_to(source[:, None], [C, K]), 0)
        return tl.where(inside[:, None], moved, 0.0)
    else:
        return tl.where(inside, tl.gather(x, source, 0), 0.0)
