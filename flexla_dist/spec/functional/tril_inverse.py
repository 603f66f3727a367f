"""`unit_tril_inverse`: the triangular inverse at the heart of the delta rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexla_dist.spec.functional.common import (
    batch_to_front,
    compute_dtype,
    diagonal_blocks,
    padded_length,
    require,
)


def unit_tril_inverse(L: Tensor) -> Tensor:
    """Inverse of `I + tril(L, -1)`; the diagonal of `L` and what is above it are ignored.

    Blocks of 1, 2, 4, ... tokens are merged by `inv([[A, 0], [X, D]]) = [[A', 0], [-D' X A', D']]`,
    two batched products a level. As accurate as substitution, unlike a product of powers of L.

    Args:
        L: `[..., C, C]`, any C.

    Returns:
        `T`, `[..., C, C]`, unit lower triangular, in the dtype of `L` (float16 and bfloat16 are
        computed in float32). Gradient: `dL = -tril(T' dT T', -1)`, T' the transpose.

    Raises:
        ArgumentError: `L` is not square.

    Source: `T = (I + tril(diag(beta) K K', -1))^-1` of DeltaNet's WY form (arXiv 2406.06484).
    """
    if torch.overrides.has_torch_function((L,)):
        return torch.overrides.handle_torch_function(unit_tril_inverse, (L,), L)
    require(L.ndim >= 2 and L.shape[-1] == L.shape[-2], "unit_tril_inverse", "L [..., C, C]", L=L)
    return _UnitTrilInverse.apply(L)


class _UnitTrilInverse(torch.autograd.Function):
    @staticmethod
    def forward(L: Tensor) -> Tensor:
        return _merge_blocks(L.to(compute_dtype(L.dtype))).to(L.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return inverse.mT.matmul(grad).matmul(inverse.mT).tril(-1).neg()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], L: Tensor) -> tuple[Tensor, int]:
        return unit_tril_inverse(*batch_to_front(info.batch_size, in_dims, (L,))), 0


def _merge_blocks(L: Tensor) -> Tensor:
    lead, tokens = L.shape[:-2], L.shape[-1]
    size = padded_length(tokens)
    L = L.reshape(-1, tokens, tokens)
    if size != tokens:
        L = pad(L, (0, size - tokens, 0, size - tokens))
    inverse = L.new_ones(L.shape[0], size, 1, 1)  # [batch, blocks, half, half]
    half = 1
    while half < size:
        below = diagonal_blocks(L, 2 * half)[..., half:, :half]
        upper, lower = inverse.unflatten(1, (-1, 2)).unbind(2)
        merged = L.new_zeros(L.shape[0], upper.shape[1], 2 * half, 2 * half)
        merged[..., :half, :half] = upper
        merged[..., half:, half:] = lower
        merged[..., half:, :half] = -(below if half == 1 else lower @ (below @ upper))
        inverse = merged
        half *= 2
    return inverse.reshape(-1, size, size)[:, :tokens, :tokens].reshape(*lead, tokens, tokens)
