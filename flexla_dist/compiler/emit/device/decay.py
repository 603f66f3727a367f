"""Decays between all pairs of tokens of a chunk: the matrix of a scalar decay, and the pair sums of
a vector decay.

Contract: with `e[r,s] = exp(b_row[r] - b_col[s])` for r >= s (r > s when STRICT), else 0, the
functions return what `flexla_dist.spec.functional` returns, for any non-increasing `b_col` with
`b_row[r]` between `b_col[r]` and `b_col[r-1]`: no bound on the gates, no overflow, nothing of size
[C, C, K]. They are sums over k or elementwise in k, so a caller may cut K in tiles.

**Halving until it fits.** In a block of n tokens let m be a reference gate; then

    exp(b_row[r] - b_col[s]) = exp(b_row[r] - m) * exp(m - b_col[s]),

and one product of scaled rows and scaled columns gives all pairs of the block.
* Where no exponent of the block exceeds LIMIT, that is all: pairs that are kept have exponents that
  sum to at most 0, the others are masked. So the whole chunk is tried first, m half-way between its
  first and last gate: one product while gates stay above 2 LIMIT / C a token, -2.2 for bfloat16.
* Otherwise m is the gate in the middle of the block, with which the exponents of a row of the
  later and a column of the earlier half are <= 0 whatever the gates. That product gives those
  pairs, in all blocks of n tokens at once; the halves remain, n = C, C/2, ..., ended by the first n
  whose blocks fit, or by n = 1, the diagonal.

The path depends on the gates of the chunk alone, so the same input gives the same bits. Measured on
an H200 (C = K = 64, bfloat16, four warps, clocks a chunk and processor, loads and stores included):
1900 for one product with neither reference nor test, which overflows; 3200 for mild gates here
(`decay_rows` 3700, both sums at once 5300); 15500 when all levels run (gates to -50); 11300,
always, for all levels unrolled. Eight warps take 1.4 to 1.8 times as long.
"""

import triton
import triton.language as tl

from flexla_dist.compiler.emit.device.dot import mm


@triton.jit
def exp(x):
    """`e^x` by the base-2 unit; x fp32 of any shape. Relative error about (2 + |x|) * 2^-24."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def decay_matrix(b_row, b_col, C: tl.constexpr, STRICT: tl.constexpr):
    """`exp(b_row[r] - b_col[s])` on the region, exact zeros elsewhere: one decay a token.

    b_row, b_col [C] fp32 give [C, C] fp32. Exponents outside the region, which are positive, are
    replaced before the exponential. Cost: C*C exponentials.
    """
    gap = b_row[:, None] - b_col[None, :]
    return exp(tl.where(_region(C, STRICT), gap, float("-inf")))


@triton.jit
def decay_scores(
    q, k, b_row, b_col, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr, MODE: tl.constexpr
):
    """`sum_k q[r,k] k[s,k] exp(b_row[r,k] - b_col[s,k])` on the region, exact zeros elsewhere.

    q, k [C, K] of any float dtype, b_row, b_col [C, K] fp32 give [C, C] fp32. Operands of the
    products as MODE says, but TF32 for "fp16", whose exponents are too few. Cost: 2*C*K
    exponentials and one product [C, K] x [K, C]; as much again, and C*K references through shared
    memory, for each level of halving.
    """
    row, col, fits = _whole(b_row, b_col, C, MODE)
    out = _product(q * row, tl.trans(k * col), MODE)
    n = tl.where(fits, 0, C)
    while n > 0:
        row, col, last = _level(b_row, b_col, n, C, K, MODE)
        product = _product(q * row, tl.trans(k * col), MODE)
        out = tl.where(_pairs(n, last, C), product, out)
        n = tl.where(last, 0, n // 2)
    return tl.where(_region(C, STRICT), out, 0.0)


@triton.jit
def decay_rows(
    p, k, b_row, b_col, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr, MODE: tl.constexpr
):
    """`sum_s p[r,s] k[s,k] exp(b_row[r,k] - b_col[s,k])` over the region: dq of `decay_scores`.

    p [C, C] (entries outside the region are not read), k [C, K], b_row, b_col [C, K] fp32 give
    [C, K] fp32. Cost: as `decay_scores`, the product being [C, C] x [C, K].
    """
    p = tl.where(_region(C, STRICT), p, 0.0)
    row, col, fits = _whole(b_row, b_col, C, MODE)
    out = tl.where(fits, row * _product(p, k * col, MODE), 0.0)
    n = tl.where(fits, 0, C)
    while n > 0:
        row, col, last = _level(b_row, b_col, n, C, K, MODE)
        weights = tl.where(_pairs(n, last, C), p, 0.0)
        out += row * _product(weights, k * col, MODE)
        n = tl.where(last, 0, n // 2)
    return out


@triton.jit
def decay_cols(
    p, q, b_row, b_col, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr, MODE: tl.constexpr
):
    """`sum_r p[r,s] q[r,k] exp(b_row[r,k] - b_col[s,k])` over the region: dk of `decay_scores`.

    p [C, C] (entries outside the region are not read), q [C, K], b_row, b_col [C, K] fp32 give
    [C, K] fp32. Cost: that of `decay_rows`.
    """
    p = tl.where(_region(C, STRICT), p, 0.0)
    row, col, fits = _whole(b_row, b_col, C, MODE)
    out = tl.where(fits, col * _product(tl.trans(p), q * row, MODE), 0.0)
    n = tl.where(fits, 0, C)
    while n > 0:
        row, col, last = _level(b_row, b_col, n, C, K, MODE)
        weights = tl.where(_pairs(n, last, C), p, 0.0)
        out += col * _product(tl.trans(weights), q * row, MODE)
        n = tl.where(last, 0, n // 2)
    return out


@triton.jit
def decay_rows_cols(
    p, q, k, b_row, b_col, C: tl.constexpr, K: tl.constexpr, STRICT: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """`decay_rows(p, k, ...)` and `decay_cols(p, q, ...)`, the decays formed once.

    Two blocks [C, K] fp32. Cost: that of `decay_rows` and one more product a level. It holds many
    registers: with four warps, tiles of K = 32 fit; K = 64 spills, yet only where levels run does
    that cost more.
    """
    p = tl.where(_region(C, STRICT), p, 0.0)
    row, col, fits = _whole(b_row, b_col, C, MODE)
    rows = tl.where(fits, row * _product(p, k * col, MODE), 0.0)
    cols = tl.where(fits, col * _product(tl.trans(p), q * row, MODE), 0.0)
    n = tl.where(fits, 0, C)
    while n > 0:
        row, col, last = _level(b_row, b_col, n, C, K, MODE)
        weights = tl.where(_pairs(n, last, C), p, 0.0)
        rows += row * _product(weights, k * col, MODE)
        cols += col * _product(tl.trans(weights), q * row, MODE)
        n = tl.where(last, 0, n // 2)
    return rows, cols


# -- factors ------------------------------------------------------------------------------------


@triton.jit
def _product(a, b, MODE: tl.constexpr):
    """`mm`, with TF32 for "fp16": as many digits, and exponents for factors from e^-70 to e^70."""
    if MODE == "fp16":
        x, y = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(x, y, input_precision="tf32", out_dtype=tl.float32)
    else:
        return mm(a, b, MODE)


@triton.jit
def _factors(b_row, b_col, reference, MODE: tl.constexpr):
    """Decays of rows and of columns against a reference, [C, K] each, and whether no exponent is
    beyond the limit. Larger exponents are cut there, which only touches pairs that are masked.

    bfloat16 operands keep their digits to e^70, and sums over k and s stay finite. In fp32 an
    exponent's rounding counts: it is 2^-21 at 8.
    """
    LIMIT: tl.constexpr = 70.0 if MODE == "bf16" or MODE == "fp16" else 8.0
    row = b_row - reference
    col = b_col - reference
    fits = tl.max(tl.maximum(row, -col)) <= LIMIT
    return _capped_exp(row, LIMIT), _capped_exp(-col, LIMIT), fits


@triton.jit
def _capped_exp(x, LIMIT: tl.constexpr):
    """`exp(min(x, LIMIT))`; NaN stays NaN."""
    return exp(tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _whole(b_row, b_col, C: tl.constexpr, MODE: tl.constexpr):
    """Factors against the gate half-way between the first and the last token of the chunk."""
    tokens = tl.arange(0, C)
    ends = ((tokens == 0) | (tokens == C - 1))[:, None]
    reference = 0.5 * tl.sum(tl.where(ends, b_col, 0.0), axis=0)
    return _factors(b_row, b_col, reference[None, :], MODE)


@triton.jit
def _level(b_row, b_col, n, C: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr):
    """Factors against the gate in the middle of each block of n tokens; the third value says that
    these products complete the result."""
    tokens = tl.arange(0, C)
    middle = (tokens & -n) + tl.maximum(n // 2 - 1, 0)
    reference = tl.gather(b_col, tl.broadcast_to(middle[:, None], [C, K]), 0)
    row, col, fits = _factors(b_row, b_col, reference, MODE)
    return row, col, fits | (n == 1)


@triton.jit
def _pairs(n, last, C: tl.constexpr):
    """Pairs [C, C] that the products of a level give: those of one block, at the last level;
    before, a row of the later and a column of the earlier half of one block."""
    tokens = tl.arange(0, C)
    block = tokens & -n
    later = tokens & (n // 2)  # not 0 in the later half
    all_rows = tl.where(last, 1, 0)
    row = tl.where(later + all_rows > 0, block, -1)
    col = tl.where(later > all_rows * C, -2, block)
    return row[:, None] == col[None, :]


@triton.jit
def _region(C: tl.constexpr, STRICT: tl.constexpr):
    tokens = tl.arange(0, C)
    if STRICT:
        return tokens[:, None] > tokens[None, :]
    else:
        return tokens[:, None] >= tokens[None, :]
