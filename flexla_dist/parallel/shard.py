"""Cut a sequence over the ranks of a group, and join it again.

Contract: shards are contiguous and in rank order. Both functions are called by every rank of the
group; cutting moves no data, and now and then compares that all ranks were given the same sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.tag import Tag
from flexla_dist.errors import DoubleBackwardError, ShardingError
from flexla_dist.parallel.context import current_context
from flexla_dist.parallel.documents import check_lengths, shard_lengths, shard_offsets
from flexla_dist.parallel.mesh import MeshOrGroup, sequence_group
from flexla_dist.parallel.recompute import refuse_recomputation
from flexla_dist.parallel.runtime import GroupRuntime, runtime_of

FIRST_CHECKS = 4
CHECK_EVERY = 101
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


def shard_sequence(
    x: Tensor,
    mesh: MeshOrGroup,
    dim: int = 1,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """This rank's part of a whole sequence that every rank holds, cut along `dim`.

    The first calls, and every 101st, compare a hash of x over the ranks. lengths: tokens of every
    rank; by default those of the `sequence_context`, else as even as can be. Outside of a context,
    sharded layers take what was cut last as their plan.
    Differentiable: the gradient is zero outside the part. Raises ShardingError for lengths that do
    not fit, RankMismatch when the ranks hold different sequences.
    """
    runtime = runtime_of(sequence_group(mesh))
    with runtime.guard("shard_sequence"):
        refuse_recomputation("shard_sequence")
        dim = _dim(x, dim)
        chosen = _lengths(runtime, x.shape[dim], lengths)
        _compare(runtime, x, dim)
    low = shard_offsets(chosen)[runtime.rank]
    return x.narrow(dim, low, chosen[runtime.rank]).contiguous()


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ShardingError(
            f"dim {dim} is no dim of a tensor of shape {list(x.shape)}; tokens are dim 1 of "
            "[B, T, ...]"
        )
    return dim % x.dim()


def _lengths(runtime: GroupRuntime, total: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Tokens of every rank; a context that does not know its lengths learns them here."""
    context = current_context(runtime.group)
    plan = None if context is None else context.known_plan
    if given is not None:
        chosen = check_lengths(given, runtime.size, total)
    elif plan is not None:
        if sum(plan.lengths) != total:
            raise ShardingError(
                f"the sequence has {total} tokens, but its sequence_context has {plan.describe()}; "
                "pass the whole sequence that cu_seqlens describes"
            )
        chosen = plan.lengths
    else:
        chosen = shard_lengths(total, runtime.size)
    if plan is not None and plan.lengths != chosen:
        raise ShardingError(
            f"lengths {chosen} differ from those of the sequence_context, {plan.lengths}; give "
            "them to one of the two"
        )
    if context is None:
        runtime.remember_lengths(chosen)
    elif plan is None:
        context.settle(chosen)
    return chosen


def _compare(runtime: GroupRuntime, x: Tensor, dim: int) -> None:
    """Now and then, RankMismatch unless all ranks hold the same x."""
    call = runtime.shard_calls
    runtime.shard_calls += 1
    if runtime.size == 1 or (call >= FIRST_CHECKS and call % CHECK_EVERY):
        return
    fields = ("shape", "dtype", "dim", "hash of the values")
    values = (str(list(x.shape)), str(x.dtype), dim, content_hash(x))
    runtime.exchanger().agree(
        "shard_sequence (every rank passes the whole sequence)", values, fields
    )


def content_hash(x: Tensor) -> int:
    """A 64-bit hash of values and their order; equal tensors have equal hashes on any device."""
    flat = x.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = flat.view(widths[flat.element_size()]).to(torch.int64)
    place = torch.arange(1, words.numel() + 1, device=words.device) * _MIX
    mixed = (words ^ (place >> 29)) * (place | 1)
    return int(((mixed ^ (mixed >> 32)) * _MIX).sum())


class GatherShards(torch.autograd.Function):
    """All shards joined on every rank; gradients of all copies go back to the owner, summed."""

    @staticmethod
    def forward(
        ctx: Any,
        exchanger: StateExchanger,
        lengths: tuple[int, ...],
        dim: int,
        tag: Tag,
        anchor: Tensor,
        x: Tensor,
    ) -> Tensor:
        ctx.exchanger, ctx.lengths, ctx.dim, ctx.tag = exchanger, lengths, dim, tag
        return exchanger.gather_rows(x, lengths, tag, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError("unshard_sequence has first derivatives only")
        tag = Tag(ctx.tag.step, ctx.tag.micro_batch, ctx.tag.layer, ctx.tag.call, "backward")
        total = ctx.exchanger.all_reduce_sum(grad.contiguous(), tag)
        rank = ctx.exchanger.rank
        low = shard_offsets(ctx.lengths)[rank]
        mine = total.narrow(ctx.dim, low, ctx.lengths[rank]).contiguous()
        return None, None, None, None, None, mine


def unshard_sequence(x: Tensor, mesh: MeshOrGroup, dim: int = 1) -> Tensor:
    """The whole sequence, on every rank, from the shards x of all ranks joined along `dim`.

    Shards may differ in length. Differentiable: what every rank does with its copy counts, so the
    gradients of all copies are summed; a loss that all ranks compute alike is to be divided by P.
    Raises ShardingError when shapes or dtypes of the ranks do not fit.
    """
    runtime = runtime_of(sequence_group(mesh))
    if runtime.size == 1:
        return x
    exchanger = runtime.exchanger()
    with runtime.guard("unshard_sequence"):
        refuse_recomputation("unshard_sequence")
        dim = _dim(x, dim)
        rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
        fields = ("shape besides the tokens", "dtype", "dim", "gradients enabled")
        values = (str(rest), str(x.dtype), dim, str(torch.is_grad_enabled()))
        exchanger.agree("unshard_sequence", values, fields)
        wanted = int(torch.is_grad_enabled() and x.requires_grad)
        rows = exchanger.gather_integers("unshard_sequence", [x.shape[dim], wanted])
        lengths = tuple(row[0] for row in rows)
        anchor = (
            x.new_zeros((), requires_grad=any(row[1] for row in rows))
            if x.is_floating_point()
            else x
        )
        return GatherShards.apply(exchanger, lengths, dim, Tag(), anchor, x)
