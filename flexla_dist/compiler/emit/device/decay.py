"""Pair sums of a chunk under a vector decay, and the decay matrix of a scalar decay.

With `e[r,s,k] = exp(b_row[r,k] - b_col[s,k])` for r >= s (r > s when STRICT), else 0.
"""

import triton
import triton.language as tl

from flexla_dist.compiler.emit.device.dot import mm
from flexla_dist.compiler.emit.device.sizes import log2

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """`e^x` by the base-2 unit; x fp32 of any shape."""
    return tl.exp2(x * LOG2E)


@triton.jit
def decay_matrix(b_row, b_col, C: tl.constexpr, STRICT: tl.constexpr):
    """`exp(b_row[r] - b_col[s])` for r >= s (r > s when STRICT), else 0."""
    rows = tl.arange(0, C)
    if STRICT:
        kept = rows[:, None] > rows[None, :]
    else:
        kept = rows[:, None] >= rows[None, :]
    gap = tl.where(kept, b_row[:, None] - b_col[None, :], float("-inf"))
    return exp(gap)


@triton.jit
def _reference(b, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    blocks = tl.reshape(b, [C // N, N, K])
    chosen = (tl.arange(0, N) == N // 2 - 1)[None, :, None]
    row = tl.sum(tl.where(chosen, blocks, 0.0), axis=1)
    return tl.reshape(tl.broadcast_to(row[:, None, :], [C // N, N, K]), [C, K])


@triton.jit
def _level(b_row, b_col, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    ref = _reference(b_col, C, K, N)
    later = ((tl.arange(0, C) & (N // 2)) != 0)[:, None]
    return exp(tl.where(later, b_row - ref, ref - b_col)), later


@triton.jit
def _corner(C: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, C)
    same = (rows[:, None] // N) == (rows[None, :] // N)
    return same & ((rows & (N // 2)) != 0)[:, None] & ((rows & (N // 2)) == 0)[None, :]


@triton.jit
def decay_scores(
    q, k, b_row, b_col, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr, MODE: tl.constexpr
):
    """`sum_k q[r,k] k[s,k] e[r,s,k]`."""
    rows = tl.arange(0, C)
    if STRICT:
        out = tl.zeros([C, C], dtype=tl.float32)
    else:
        on_diagonal = tl.sum(q * k * exp(b_row - b_col), axis=1)
        out = tl.where(rows[:, None] == rows[None, :], on_diagonal[:, None], 0.0)
    LEVELS: tl.constexpr = log2(C)
    for i in tl.static_range(0, LEVELS):
        e, later = _level(b_row, b_col, C, K, C >> i)
        row = tl.where(later, q * e, 0.0)
        col = tl.where(later, 0.0, k * e)
        out = tl.where(_corner(C, C >> i), mm(row, tl.trans(col), MODE), out)
    return out


@triton.jit
def decay_rows(
    p, k, b_row, b_col, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr, MODE: tl.constexpr
):
    """`sum_s p[r,s] k[s,k] e[r,s,k]`."""
    rows = tl.arange(0, C)
    if STRICT:
        out = tl.zeros([C, K], dtype=tl.float32)
    else:
        weight = tl.sum(tl.where(rows[:, None] == rows[None, :], p, 0.0), axis=1)
        out = weight[:, None] * k * exp(b_row - b_col)
    LEVELS: tl.constexpr = log2(C)
    for i in tl.static_range(0, LEVELS):
        e, later = _level(b_row, b_col, C, K, C >> i)
        weights = tl.where(_corner(C, C >> i), p, 0.0)
        out += tl.where(later, e * mm(weights, tl.where(later, 0.0, k * e), MODE), 0.0)
    return out


@triton.jit
def decay_cols(
    p, q, b_row, b_col, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr, MODE: tl.constexpr
):
    """`sum_r p[r,s] q[r,k] e[r,s,k]`."""
    rows = tl.arange(0, C)
    if STRICT:
        out = tl.zeros([C, K], dtype=tl.float32)
    else:
        weight = tl.sum(tl.where(rows[:, None] == rows[None, :], p, 0.0), axis=0)
        out = weight[:, None] * q * exp(b_row - b_col)
    LEVELS: tl.constexpr = log2(C)
    for i in tl.static_range(0, LEVELS):
        e, later = _level(b_row, b_col, C, K, C >> i)
        weights = tl.where(_corner(C, C >> i), p, 0.0)
        total = mm(tl.trans(weights), tl.where(later, q * e, 0.0), MODE)
        out += tl.where(later, 0.0, e * total)
    return out
