"""Inverse of a unit lower triangular chunk matrix: the T of the delta rule.

Contract: as accurate as forward substitution for any correlation of the keys. The matrix as a whole
is never raised to powers, which grow like binomials and cancel when keys are alike.

Pairs of blocks are merged, with ' for the inverse,

    inv([[A, 0], [X, D]]) = [[A', 0], [-D' X A', D']],

from 16 to C rows on the blocks alone, `[blocks, h, h]`: the last merge of C = 64 multiplies 32
by 32. Blocks of 16 are inverted all at once, masked within their 16 x 16: 2 rows need no product,
4 rows one merge, and 16 rows the polynomial `(I + M^2)(I - M) T` of `M = T L`, where T inverts the
blocks of 4 and L is what is below them. M^4 = 0 and the terms are at most three times the result;
it has three dependent products for the four of two merges.

Measured on an H200 (C = 64, clocks a chunk and processor, loads and stores included): 4000 with
four warps, 10 KiB of shared memory and 128 registers; 9000 to 11000 with eight warps, so kernels
that invert want four. Alternatives with four warps: 4700 with merges only, 10000 with row steps
in the blocks of 16, 13600 to 18300 with merges of whole [C, C] under a mask, which take 96 KiB.
"""

import triton
import triton.language as tl

from flexla_dist.compiler.emit.device.dot import mm_exact


@triton.jit
def unit_tril_inverse(L, C: tl.constexpr, MODE: tl.constexpr):
    """Inverse of `I + tril(L, -1)`; the diagonal of L and what is above it are ignored.

    L [C, C] fp32, C = 16, 32, 64 or 128, gives T [C, C] fp32, unit lower triangular with exact
    zeros above the diagonal. Products by `mm_exact`; relative error about 3e-7, also for equal
    keys with beta 1 or 2, where powers of L lose every digit. Cost: 6 products a block of
    16, then two of h x h a pair of blocks, h = 16 ... C/2.
    """
    return tl.reshape(_inverse(tl.reshape(L, [1, C, C]), 1, C, MODE), [C, C])


@triton.jit
def _inverse(L, G: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr):
    """Inverses of G matrices, L [G, N, N]."""
    if N == 16:
        return _inverse_16(L, MODE)
    else:
        HALF: tl.constexpr = N // 2
        diagonal, below = _split_blocks(L, G, HALF)
        inverses = _inverse(diagonal, 2 * G, HALF, MODE)
        pairs = tl.permute(tl.reshape(inverses, [G, 2, HALF, HALF]), [0, 2, 3, 1])
        upper, lower = tl.split(pairs)
        corner = _product(lower, _product(below, upper, G, HALF, MODE), G, HALF, MODE)
        return _join_blocks(upper, -corner, lower, G, HALF)


@triton.jit
def _inverse_16(L, MODE: tl.constexpr):
    """Inverses of blocks [G, 16, 16]."""
    i = tl.arange(0, 16)
    row = i[None, :, None]
    col = i[None, None, :]
    T = tl.where(row == col, 1.0, tl.where((row == col + 1) & (row % 2 == 1), -L, 0.0))
    in_four = ((row >> 2) == (col >> 2)) & ((row & 2) > (col & 2))
    T -= mm_exact(T, mm_exact(tl.where(in_four, L, 0.0), T, MODE), MODE)
    M = mm_exact(T, tl.where((row >> 2) > (col >> 2), L, 0.0), MODE)
    square = mm_exact(M, M, MODE)
    T -= mm_exact(M, T, MODE)
    return T + mm_exact(square, T, MODE)


@triton.jit
def _product(a, b, G: tl.constexpr, H: tl.constexpr, MODE: tl.constexpr):
    """`a @ b` for batches [G, H, H]. A batch goes to one warp, so a single matrix multiplies as
    such, and a single 32 x 32 as four products [16, 32] x [32, 16]."""
    if G > 1:
        return mm_exact(a, b, MODE)
    elif H == 32:
        x = tl.reshape(a, [2, 1, 16, 32])
        x = tl.reshape(tl.broadcast_to(x, [2, 2, 16, 32]), [4, 16, 32])
        y = tl.permute(tl.reshape(b, [32, 2, 16]), [1, 0, 2])
        y = tl.reshape(tl.broadcast_to(y[None, :, :, :], [2, 2, 32, 16]), [4, 32, 16])
        quarters = tl.reshape(mm_exact(x, y, MODE), [2, 2, 16, 16])
        return tl.reshape(tl.permute(quarters, [0, 2, 1, 3]), [1, 32, 32])
    else:
        one = mm_exact(tl.reshape(a, [H, H]), tl.reshape(b, [H, H]), MODE)
        return tl.reshape(one, [1, H, H])


@triton.jit
def _split_blocks(x, G: tl.constexpr, H: tl.constexpr):
    """[G, 2H, 2H] as its diagonal blocks [2G, H, H] and its lower left blocks [G, H, H]."""
    blocks = tl.permute(tl.reshape(x, [G, 2, H, 2, H]), [0, 2, 4, 1, 3])
    left, right = tl.split(blocks)
    upper, below = tl.split(left)
    _, lower = tl.split(right)
    diagonal = tl.permute(tl.join(upper, lower), [0, 3, 1, 2])
    return tl.reshape(diagonal, [2 * G, H, H]), below


@triton.jit
def _join_blocks(upper, below, lower, G: tl.constexpr, H: tl.constexpr):
    """`[[upper, 0], [below, lower]]` as [G, 2H, 2H]."""
    left = tl.join(upper, below)
    right = tl.join(tl.zeros_like(upper), lower)
    blocks = tl.permute(tl.join(left, right), [0, 3, 1, 4, 2])
    return tl.reshape(blocks, [G, 2 * H, 2 * H])
