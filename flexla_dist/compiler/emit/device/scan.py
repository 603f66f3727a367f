"""Recurrences over the tokens of a chunk held in registers.

Contract: axis 0 is the token axis; blocks are fp32 `[C, K]` (sums also `[C]`); nothing divides by a
decay, so every gate g <= 0 is right, -inf included.
"""

import triton
import triton.language as tl

from flexla_dist.compiler.emit.device.decay import exp


@triton.jit
def _follow(decay_a, value_a, decay_b, value_b):
    """Two spans of tokens, b after a, as one: `h -> decay h + value`."""
    return decay_a * decay_b, value_a * decay_b + value_b


@triton.jit
def decay_scan(g, x):
    """`h[r] = exp(g[r]) h[r-1] + x[r]` over axis 0, h[-1] = 0.

    g, x [C, K] fp32 give h [C, K]. Error about log2(C) roundings, all factors <= 1. Cost: C*K
    exponentials and one associative scan of pairs; 2050 clocks a chunk on an H200 (C = K = 64, four
    warps) where loading and storing alone takes 1230. The interpreter scans entry by entry, about
    0.1 ms each.
    """
    return tl.associative_scan((exp(g), x), 0, _follow)[1]


@triton.jit
def decay_scan_reverse(g, x):
    """`e[r] = x[r] + exp(g[r+1]) e[r+1]` over axis 0, zero beyond: adjoint of `decay_scan`.

    g, x [C, K] fp32 give e [C, K]; the gate of the first token is not used. Cost: that of
    `decay_scan` and three turns of a block through shared memory (2450 clocks; a reversed scan
    takes 3950).
    """
    C: tl.constexpr = g.shape[0]
    K: tl.constexpr = g.shape[1]
    tokens = tl.arange(0, C)
    turned = tl.broadcast_to((-tokens + (C - 1))[:, None], [C, K])
    # Token C - r follows token C - 1 - r; the last token has no follower.
    follower = tl.broadcast_to(((-tokens + C) % C)[:, None], [C, K])
    decay = exp(tl.gather(g, follower, 0))
    decay = tl.where((tokens == 0)[:, None], 0.0, decay)
    value = tl.associative_scan((decay, tl.gather(x, turned, 0)), 0, _follow)[1]
    return tl.gather(value, turned, 0)


@triton.jit
def cumsum(x, REVERSE: tl.constexpr = False):
    """Inclusive sum over the tokens, from the last one when REVERSE.

    x [C, K] or [C] fp32 give the same shape. Cost: one scan; 200 clocks on an H200 (C = K = 64,
    four warps), 1250 when REVERSE.
    """
    return tl.cumsum(x, 0, reverse=REVERSE)
