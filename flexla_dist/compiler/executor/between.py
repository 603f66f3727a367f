"""PyTorch operations between and after the kernels of a launch plan.

Contract: results lie in memory of their own, never in that of an argument: another value may be
written there as soon as the argument has no more readers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.compiler.executor.segments import (
    Segments,
    fold,
    fold_reverse,
    select_rows,
)


def input_sum(found: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """[tiles, B, T, HV, ...] to [B, T, H, ...]."""
    if group > 1:
        found = found.unflatten(3, (found.shape[3] // group, group)).sum(4)
    if found.shape[0] == 1:
        return found[0].to(dtype, copy=group == 1)
    return found.sum(0).to(dtype)


def param_sum(found: Tensor, dtype: torch.dtype) -> Tensor:
    """[tiles, chunks, HV, ...] to [HV, ...]."""
    return found.sum((0, 1)).to(dtype)


def identities(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Identity matrices [*lead, K, K]."""
    return torch.eye(shape[-1], device=device).expand(shape).contiguous()


def folded(
    local: Tensor, entry: Tensor, matrix: Tensor, *, reverse: bool, segments: Segments
) -> Tensor:
    """States entering the segments, or gradients of those leaving; `matrix` is M of each."""
    return (fold_reverse if reverse else fold)(local, None, matrix, entry, segments)


def fold_heads(
    local: Tensor,
    entry: Tensor,
    matrix: Tensor,
    entering: Tensor,
    *,
    reverse: bool,
    segments: Segments,
    heads: tuple[int, int],
) -> None:
    """`folded` for heads (first, count) alone, into those of `entering`."""
    own, start, mapped = (x.narrow(1, *heads) for x in (local, entry, matrix))
    found = folded(own, start, mapped, reverse=reverse, segments=segments)
    entering.narrow(1, *heads).copy_(found)


def exit_rows(leave: Tensor, rows: list[int]) -> Tensor:
    """The states that leave the documents, of those that leave the segments."""
    return leave[select_rows(rows, leave.device)].clone()
