"""Operators that move entries, sum them or multiply matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.compiler.ir.operators import dims as rules
from flexla_dist.compiler.ir.operators.registry import Sizes, operator
from flexla_dist.shapes import Dims


@operator("shape", rules.unsqueeze, linear=(0,))
def unsqueeze(x: Tensor, *, dim: int) -> Tensor:
    """Insert a dim of size one at `dim` of the result."""
    return x.unsqueeze(dim)


@operator("shape", rules.squeeze, linear=(0,))
def squeeze(x: Tensor, *, dim: int) -> Tensor:
    """Remove a dim of size one."""
    return x.squeeze(dim)


@operator("shape", rules.permute, linear=(0,))
def permute(x: Tensor, *, order: tuple[int, ...]) -> Tensor:
    """Reorder the trailing dims; `order` holds negative positions."""
    rank = len(order)
    lead = x.dim() - rank
    return x.permute(*range(lead), *(x.dim() + at for at in order))


@operator("shape", rules.expand, linear=(1,))
def expand(sizes: Sizes, x: Tensor, *, dims: Dims) -> Tensor:
    """Broadcast to `dims` explicitly."""
    rank = len(dims)
    return x.expand(*x.shape[: x.dim() - rank], *sizes.of(dims))


@operator("shape", lambda x, *, dim, index: rules.drop(x, dim=dim), linear=(0,))
def select(x: Tensor, *, dim: int, index: int) -> Tensor:
    """The entry at a constant position of a dim."""
    return x.select(dim, index)


@operator("shape", lambda _, x, *, dims, dim, index: dims, linear=(1,))
def place(sizes: Sizes, x: Tensor, *, dims: Dims, dim: int, index: int) -> Tensor:
    """Zeros of `dims` with x at a constant position of `dim`; the transpose of `select`."""
    lead = x.dim() - (len(dims) - 1)
    out = x.new_zeros(*x.shape[:lead], *sizes.of(dims))
    out.select(dim, index).copy_(x)
    return out


@operator("shape", rules.along, linear=(0,))
def shift(x: Tensor, *, dim: int, by: int) -> Tensor:
    """Move entries `by` places along a dim, zeros shifted in."""
    out = torch.zeros_like(x)
    size = x.shape[dim]
    if by >= 0:
        out.narrow(dim, min(by, size), max(size - by, 0)).copy_(x.narrow(dim, 0, max(size - by, 0)))
    else:
        out.narrow(dim, 0, max(size + by, 0)).copy_(
            x.narrow(dim, min(-by, size), max(size + by, 0))
        )
    return out


@operator("shape", rules.square, linear=(0,))
def tril(x: Tensor, *, diagonal: int) -> Tensor:
    """Lower triangle up to a diagonal, zeros above."""
    return torch.tril(x, diagonal)


@operator("shape", rules.square, linear=(0,))
def triu(x: Tensor, *, diagonal: int) -> Tensor:
    """Upper triangle from a diagonal, zeros below."""
    return torch.triu(x, diagonal)


# -- reductions, contractions ---------------------------------------------------------------------


@operator("reduce", rules.drop, linear=(0,))
def total(x: Tensor, *, dim: int) -> Tensor:
    """Sum over a dim."""
    return x.sum(dim)


@operator("reduce", rules.drop)
def amax(x: Tensor, *, dim: int) -> Tensor:
    """Maximum over a dim; the gradient is shared equally by ties."""
    return x.amax(dim)


@operator("reduce", rules.along, linear=(0,))
def cumsum(x: Tensor, *, dim: int, reverse: bool = False) -> Tensor:
    """Running sum along a dim, from the end when `reverse`."""
    if reverse:
        return x.flip(dim).cumsum(dim).flip(dim)
    return x.cumsum(dim)


@operator("contract", rules.matmul, linear=(0, 1))
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of the trailing two dims."""
    return a @ b
