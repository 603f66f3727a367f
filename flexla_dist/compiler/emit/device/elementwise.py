"""Functions that Triton's core lacks, exact near zero and free of overflow.

Contract: elementwise over fp32 blocks of any shape. `log1p` and `expm1` are corrected for the
rounding of `1 + x` and `exp(x)` (Kahan's forms), so that small gates keep their relative accuracy.
"""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """log(1 + x) for x > -1."""
    u = 1.0 + x
    d = u - 1.0
    safe = tl.where(d == 0.0, 1.0, d)
    return tl.where(d == 0.0, x, tl.log(u) * (x / safe))


@triton.jit
def expm1(x):
    """exp(x) - 1."""
    u = tl.exp(x)
    d = u - 1.0
    logarithm = tl.log(tl.where(u > 0.0, u, 1.0))
    safe = tl.where(logarithm == 0.0, 1.0, logarithm)
    small = tl.where(u == 1.0, x, d * (x / safe))
    return tl.where(u <= 0.0, -1.0, tl.where(x > 1.0, d, small))


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def logsigmoid(x):
    """log(sigmoid(x))."""
    return tl.minimum(x, 0.0) - log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    """tanh(x), with its relative accuracy near zero."""
    t = expm1(-2.0 * tl.abs(x))
    size = -t / (2.0 + t)
    return tl.where(x < 0.0, -size, size)
