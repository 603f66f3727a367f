"""The chunk form of two variants as plain batched PyTorch, what torch.compile gets to work on.

No loop over chunks: states entering all chunks come from one product with the matrix of decays
between chunks, so the work grows with the square of the number of chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def _chunks(x: Tensor) -> Tensor:
    """[B, T, H, ...] to [B, H, N, C, ...]."""
    return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)


def _tokens(x: Tensor) -> Tensor:
    """[B, H, N, C, V] to [B, T, H, V]."""
    return x.movedim(1, 3).flatten(1, 2)


def linear_attn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal linear attention without a divisor; T must be a multiple of the chunk."""
    q, k, v = _chunks(q) * scale, _chunks(k), _chunks(v)
    inside = (q @ k.mT).tril() @ v
    added = (k.mT @ v).float()
    states = added.cumsum(2) - added
    return _tokens(inside + q @ states.to(q.dtype))


def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    """One decay a head; T must be a multiple of the chunk."""
    q, k, v = _chunks(q) * scale, _chunks(k), _chunks(v)
    b = _chunks(g).float().cumsum(-1)
    last = b[..., -1:]
    scores = (q @ k.mT).float() * _decays(b)
    inside = scores.to(v.dtype) @ v
    added = ((k * (last - b).exp()[..., None].to(k.dtype)).mT @ v).float()
    total = last[..., 0].cumsum(-1)
    before = total - last[..., 0]
    between = (before[..., :, None] - total[..., None, :]).tril(-1).exp().tril(-1)
    states = torch.einsum("bhnm,bhmkv->bhnkv", between, added)
    entering = (q * b.exp()[..., None].to(q.dtype)) @ states.to(q.dtype)
    return _tokens(inside + entering)


def _decays(b: Tensor) -> Tensor:
    """exp(b[r] - b[s]) for r >= s, else 0."""
    return (b[..., :, None] - b[..., None, :]).tril().exp().tril()
