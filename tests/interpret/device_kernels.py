"""Kernels that load blocks, call one device function and store its result; one program a case."""

import triton
import triton.language as tl

from flexla_dist.compiler.emit.device import (
    cumsum,
    decay_cols,
    decay_matrix,
    decay_rows,
    decay_rows_cols,
    decay_scan,
    decay_scan_reverse,
    decay_scores,
    mm,
    mm_exact,
    place_row,
    shift_rows,
    take_row,
    unit_tril_inverse,
)


@triton.jit
def block(pointer, M: tl.constexpr, N: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    return pointer + rows[:, None] * N + tl.arange(0, N)[None, :]


@triton.jit
def vector(pointer, N: tl.constexpr):
    return pointer + tl.program_id(0) * N + tl.arange(0, N)


@triton.jit
def product(a, b, out, M: tl.constexpr, D: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
            MODE: tl.constexpr):  # fmt: skip
    x, y = tl.load(block(a, M, D)), tl.load(block(b, D, N))
    if EXACT:
        tl.store(block(out, M, N), mm_exact(x, y, MODE))
    else:
        tl.store(block(out, M, N), mm(x, y, MODE))


@triton.jit
def inverse(L, out, C: tl.constexpr, MODE: tl.constexpr):
    tl.store(block(out, C, C), unit_tril_inverse(tl.load(block(L, C, C)), C, MODE))


@triton.jit
def ratios(b_row, b_col, out, C: tl.constexpr, STRICT: tl.constexpr):
    decay = decay_matrix(tl.load(vector(b_row, C)), tl.load(vector(b_col, C)), C, STRICT)
    tl.store(block(out, C, C), decay)


@triton.jit
def scores(q, k, b_row, b_col, out, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr,
           ONE_GATE: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    x, y = tl.load(block(q, C, K)), tl.load(block(k, C, K))
    b = tl.load(block(b_row, C, K))
    c = b if ONE_GATE else tl.load(block(b_col, C, K))
    tl.store(block(out, C, C), decay_scores(x, y, b, c, C, K, STRICT, MODE))


@triton.jit
def pair_sums(p, x, b_row, b_col, out, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr,
              ONE_GATE: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    weights, y = tl.load(block(p, C, C)), tl.load(block(x, C, K))
    b = tl.load(block(b_row, C, K))
    c = b if ONE_GATE else tl.load(block(b_col, C, K))
    if ROWS:
        tl.store(block(out, C, K), decay_rows(weights, y, b, c, C, K, STRICT, MODE))
    else:
        tl.store(block(out, C, K), decay_cols(weights, y, b, c, C, K, STRICT, MODE))


@triton.jit
def both_sums(p, q, k, b_row, b_col, out_rows, out_cols, C: tl.constexpr, K: tl.constexpr,
              STRICT: tl.constexpr, ONE_GATE: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    weights, x, y = tl.load(block(p, C, C)), tl.load(block(q, C, K)), tl.load(block(k, C, K))
    b = tl.load(block(b_row, C, K))
    c = b if ONE_GATE else tl.load(block(b_col, C, K))
    by_row, by_col = decay_rows_cols(weights, x, y, b, c, C, K, STRICT, MODE)
    tl.store(block(out_rows, C, K), by_row)
    tl.store(block(out_cols, C, K), by_col)


@triton.jit
def scan(g, x, out, C: tl.constexpr, K: tl.constexpr, REVERSE: tl.constexpr):
    gate, value = tl.load(block(g, C, K)), tl.load(block(x, C, K))
    if REVERSE:
        tl.store(block(out, C, K), decay_scan_reverse(gate, value))
    else:
        tl.store(block(out, C, K), decay_scan(gate, value))


@triton.jit
def running_sum(x, out, C: tl.constexpr, K: tl.constexpr, REVERSE: tl.constexpr):
    tl.store(block(out, C, K), cumsum(tl.load(block(x, C, K)), REVERSE))


@triton.jit
def rows(x, one, placed, shifted, C: tl.constexpr, K: tl.constexpr, INDEX: tl.constexpr,
         BY: tl.constexpr):  # fmt: skip
    value = tl.load(block(x, C, K))
    row = take_row(value, INDEX)
    tl.store(vector(one, K), row)
    tl.store(block(placed, C, K), place_row(row, C, INDEX))
    tl.store(block(shifted, C, K), shift_rows(value, C, BY))


@triton.jit
def entries(x, one, placed, shifted, C: tl.constexpr, INDEX: tl.constexpr, BY: tl.constexpr):
    value = tl.load(vector(x, C))
    entry = take_row(value, INDEX)
    tl.store(one + tl.program_id(0), entry)
    tl.store(vector(placed, C), place_row(entry, C, INDEX))
    tl.store(vector(shifted, C), shift_rows(value, C, BY))
