"""Recurrences over the tokens of a chunk held in registers.

Contract: axis 0 is the token axis; blocks are fp32 `[C, K]` (or `[C]`); nothing divides by a decay,
so every gate `g <= 0` is right, however steep.
"""

import triton
import triton.language as tl

from flexla_dist.compiler.emit.device.decay import exp
from flexla_dist.compiler.emit.device.rows import shift_rows


@triton.jit
def _follow(decay_a, value_a, decay_b, value_b):
    """Two spans of tokens, b after a, as one: `h -> decay h + value`."""
    return decay_a * decay_b, value_a * decay_b + value_b


@triton.jit
def decay_scan(g, x):
    """`h[r] = exp(g[r]) h[r-1] + x[r]` over axis 0, h[-1] = 0.

    g, x [C, K] fp32 give h [C, K]. Error about log2(C) roundings, all factors <= 1. Cost: C*K
    exponentials and one associative scan of pairs.
    """
    return tl.associative_scan((exp(g), x), 0, _follow)[1]


@triton.jit
def decay_scan_reverse(g, x):
    """`e[r] = x[r] + exp(g[r+1]) e[r+1]` over axis 0, zero beyond: adjoint of `decay_scan`.

    g, x [C, K] fp32 give e [C, K]; the gate of the first token is not used. Cost: that of
    `decay_scan` and a `shift_rows`.
    """
    decay = shift_rows(exp(g), g.shape[0], -1)
    return tl.associative_scan((decay, x), 0, _follow, reverse=True)[1]


@triton.jit
def cumsum(x, REVERSE: tl.constexpr = False):
    """Inclusive sum over the tokens, from the last one when REVERSE.

    x [C, K] or [C] fp32 give the same shape. Cost: one scan.
    """
    return tl.cumsum(x, 0, reverse=REVERSE)
