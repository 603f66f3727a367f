"""Operators without operands: constants made from the sizes of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.compiler.ir.operators.registry import Sizes, operator
from flexla_dist.shapes import Dims


@operator("source", lambda _, *, dims, value: dims)
def full(sizes: Sizes, *, dims: Dims, value: float) -> Tensor:
    """A constant tensor."""
    return torch.full(sizes.of(dims), value, dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim: (dim, dim))
def eye(sizes: Sizes, *, dim: str) -> Tensor:
    """The identity matrix."""
    return torch.eye(sizes.of((dim,))[0], dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim: (dim,))
def iota(sizes: Sizes, *, dim: str) -> Tensor:
    """0, 1, 2, ... along a dim."""
    return torch.arange(sizes.of((dim,))[0], dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim: ())
def size(sizes: Sizes, *, dim: str) -> Tensor:
    """The size of a dim as a number."""
    return torch.full((), sizes.of((dim,))[0], dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim, diagonal: (dim, dim))
def tri_mask(sizes: Sizes, *, dim: str, diagonal: int) -> Tensor:
    """True at row r, column s where s <= r + diagonal."""
    n = sizes.of((dim,))[0]
    return torch.ones(n, n, dtype=torch.bool, device=sizes.device).tril(diagonal)
