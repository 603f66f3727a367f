"""Batch dims, dtypes and block views shared by the domain operators.

Contract: shapes only; nothing here knows a decay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError


def expand_batch(name: str, event_dims: int, **tensors: Tensor) -> list[Tensor]:
    """Broadcast the leading dims of all tensors against each other; the last `event_dims` stay.

    Raises ArgumentError naming the operator and the shapes when they do not broadcast.
    """
    values = list(tensors.values())
    lead = {value.shape[: value.ndim - event_dims] for value in values}
    if any(value.ndim < event_dims for value in values):
        raise _shape_error(name, tensors, f"at least {event_dims} dims each")
    if len(lead) == 1:
        return values
    try:
        batch = torch.broadcast_shapes(*lead)
    except RuntimeError:
        raise _shape_error(name, tensors, "leading dims that broadcast") from None
    return [value.expand(*batch, *value.shape[value.ndim - event_dims :]) for value in values]


def require(condition: bool, name: str, expected: str, **tensors: Tensor) -> None:
    """Raise ArgumentError with all shapes unless `condition` holds."""
    if not condition:
        raise _shape_error(name, tensors, expected)


def _shape_error(name: str, tensors: dict[str, Tensor], expected: str) -> ArgumentError:
    got = ", ".join(f"{key} {list(value.shape)}" for key, value in tensors.items())
    return ArgumentError(f"{name}: expected {expected}; got {got}")


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Promoted dtype of the operands."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which decays are formed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_dtype(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Every tensor in `dtype`."""
    return [tensor.to(dtype) for tensor in tensors]


def padded_length(tokens: int) -> int:
    """Smallest power of two that is at least `tokens` (1 for an empty chunk)."""
    return 1 << max(tokens - 1, 0).bit_length()


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """View of the diagonal blocks of `[..., C, C]` as `[..., C / size, size, size]`."""
    blocks = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def batch_to_front(
    size: int, in_dims: Sequence[int | None], args: Sequence[Tensor]
) -> list[Tensor]:
    """Move the mapped dim of a `torch.vmap` rule to the front; unmapped operands are expanded."""
    moved = []
    for arg, dim in zip(args, in_dims, strict=True):
        moved.append(arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0))
    return moved
