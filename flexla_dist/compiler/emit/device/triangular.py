"""Inverse of a unit lower triangular chunk matrix."""

import triton
import triton.language as tl

from flexla_dist.compiler.emit.device.dot import mm_exact
from flexla_dist.compiler.emit.device.sizes import log2


@triton.jit
def unit_tril_inverse(L, C: tl.constexpr, MODE: tl.constexpr):
    """Inverse of `I + tril(L, -1)`; the diagonal of L and what is above it are ignored.

    L [C, C] fp32 gives T [C, C] fp32, unit lower triangular.
    """
    rows = tl.arange(0, C)
    row = rows[:, None]
    col = rows[None, :]
    T = tl.where(row == col, 1.0, 0.0)
    T = tl.where((row == col + 1) & (row % 2 == 1), -L, T)
    LEVELS: tl.constexpr = log2(C)
    for i in tl.static_range(1, LEVELS):
        corner = ((row >> (i + 1)) == (col >> (i + 1))) & (((row >> i) & 1) > ((col >> i) & 1))
        below = tl.where(corner, L, 0.0)
        T -= mm_exact(T, mm_exact(below, T, MODE), MODE)
    return T
