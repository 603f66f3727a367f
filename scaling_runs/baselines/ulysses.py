"""Ulysses: tokens are exchanged for heads, the operator runs on whole sequences, and back.

One all-to-all brings all inputs of this rank's heads, another takes the outputs to the ranks that
hold their tokens. All tensors of a dtype travel in one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from scaling_runs.baselines.shard import (
    HeadRange,
    Refused,
    Sharding,
    Values,
    head_counts,
)


@dataclass(eq=False)
class HeadAttend:
    """A callable (inputs, params, scalars) -> output on this rank's shard."""

    op: Any
    sharding: Sharding

    def __call__(self, inputs: Values, params: Values, scalars: Mapping[str, float]) -> Tensor:
        """The output [B, T_local, HV, V]; Refused where the ranks do not divide the heads."""
        part = self._own_heads(inputs)
        whole: dict[str, Tensor] = {}
        for dtype in sorted({x.dtype for x in inputs.values()}, key=str):
            names = [name for name, x in inputs.items() if x.dtype == dtype]
            found = _ToHeads.apply(self.sharding, *(inputs[name] for name in names))
            whole |= dict(zip(names, found, strict=True))
        some = {name: x[part.value_heads] for name, x in params.items()}
        arguments = {name: whole[name] for name in inputs}
        output, _ = self.op(**arguments, **some, **scalars)
        return _ToTokens.apply(self.sharding, output)

    def _own_heads(self, inputs: Values) -> HeadRange:
        size, rank = self.sharding.ranks.size, self.sharding.ranks.rank
        heads, value_heads = head_counts(self.op.spec, inputs)
        check_heads(size, heads, value_heads)
        if self.sharding.tokens != next(iter(inputs.values())).shape[1]:
            raise Refused(
                f"ulysses: inputs have another number of tokens than {self.sharding.tokens}, the "
                "length of this rank's shard"
            )
        q, v = heads // size, value_heads // size
        return HeadRange(slice(rank * q, (rank + 1) * q), slice(rank * v, (rank + 1) * v))


def check_heads(size: int, heads: int, value_heads: int) -> None:
    """Raises Refused where `size` ranks do not divide both numbers of heads."""
    if heads % size or value_heads % size:
        raise Refused(
            f"ulysses cuts the heads over the ranks: {heads} heads of q and k and {value_heads} of "
            f"v do not divide by {size} ranks; use at most as many ranks as heads, and a divisor"
        )


def exchange_heads(sharding: Sharding, tensors: Sequence[Tensor]) -> list[Tensor]:
    """[B, T_local, heads, ...] of all heads -> [B, T, heads / P, ...] of this rank's."""
    size, lengths = sharding.ranks.size, sharding.lengths
    batch, tokens = tensors[0].shape[:2]
    widths = [x.shape[2:].numel() // size for x in tensors]
    rows = [
        _by_rank(x, size).reshape(size, tokens * batch, width)
        for x, width in zip(tensors, widths, strict=True)
    ]
    sent = torch.cat(rows, 2).reshape(size * tokens * batch, sum(widths))
    received = sent.new_empty(sum(lengths) * batch, sum(widths))
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=[n * batch for n in lengths],
        input_split_sizes=[tokens * batch] * size,
        group=sharding.ranks.group,
    )
    found = []
    for x, part in zip(tensors, received.split(widths, 1), strict=True):
        shape = (sum(lengths), batch, x.shape[2] // size, *x.shape[3:])
        found.append(part.reshape(shape).transpose(0, 1))
    return found


def exchange_tokens(sharding: Sharding, tensors: Sequence[Tensor]) -> list[Tensor]:
    """[B, T, heads / P, ...] of this rank's heads -> [B, T_local, heads, ...]; the inverse."""
    size, lengths, own = sharding.ranks.size, sharding.lengths, sharding.tokens
    batch = tensors[0].shape[0]
    widths = [x.shape[2:].numel() for x in tensors]
    rows = [
        x.transpose(0, 1).reshape(sum(lengths) * batch, width)
        for x, width in zip(tensors, widths, strict=True)
    ]
    sent = torch.cat(rows, 1)
    received = sent.new_empty(size * own * batch, sum(widths))
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=[own * batch] * size,
        input_split_sizes=[n * batch for n in lengths],
        group=sharding.ranks.group,
    )
    found = []
    for x, part in zip(tensors, received.split(widths, 1), strict=True):
        parts = part.reshape(size, own, batch, *x.shape[2:])
        found.append(parts.permute(2, 1, 0, *range(3, parts.dim())).flatten(2, 3))
    return found


def _by_rank(x: Tensor, size: int) -> Tensor:
    """[B, T, heads, ...] -> [P, T, B, heads / P, ...]."""
    parts = x.unflatten(2, (size, x.shape[2] // size))
    return parts.permute(2, 1, 0, *range(3, parts.dim())).contiguous()


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharding: Sharding, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sharding = sharding
        return tuple(exchange_heads(sharding, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *exchange_tokens(ctx.sharding, grads))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharding: Sharding, output: Tensor) -> Tensor:
        ctx.sharding = sharding
        return exchange_tokens(sharding, [output])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *exchange_heads(ctx.sharding, [grad]))
