"""The ring of LASP: the local pass is a link of the chain.

A rank waits for the state, runs its whole local pass from it, and sends the state that this leaves.
Backward goes the other way with gradients. Sends and receives block, so a hop costs a message and a
local pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexla_dist.parallel.attend import full_precision
from scaling_runs.baselines.shard import Shard, Sharding, Values, executor_of

States = tuple[Tensor, ...]


@dataclass(eq=False)
class RingAttend:
    """A callable (inputs, params, scalars) -> output on this rank's shard."""

    op: Any
    sharding: Sharding

    def __call__(self, inputs: Values, params: Values, scalars: Mapping[str, float]) -> Tensor:
        """The output [B, T_local, HV, V]."""
        names = (tuple(inputs), tuple(params))
        return _RingNode.apply(self, names, dict(scalars), *inputs.values(), *params.values())

    def bind(self, names: tuple, scalars: dict[str, float], tensors: States) -> Shard:
        """The call on the tensors of the node."""
        count = len(names[0])
        inputs = dict(zip(names[0], tensors[:count], strict=True))
        params = dict(zip(names[1], tensors[count:], strict=True))
        executor = executor_of(self.op, tensors)
        return Shard.bind(self.op, executor, self.sharding, inputs, params, scalars)

    def receive(self, like: States, rank: int | None) -> States:
        """Wait for the state of a rank; zeros from nobody."""
        if rank is None:
            return like
        buffer = like[0].new_empty(sum(t.numel() for t in like))
        ranks = self.sharding.ranks
        dist.recv(buffer, ranks.global_ranks[rank], ranks.group)
        parts = buffer.split([t.numel() for t in like])
        return tuple(part.view(t.shape) for part, t in zip(parts, like, strict=True))

    def send(self, state: States, rank: int | None) -> None:
        """Send a state to a rank and wait until it has left."""
        if rank is not None:
            ranks = self.sharding.ranks
            flat = torch.cat([t.reshape(-1) for t in state])
            dist.send(flat, ranks.global_ranks[rank], ranks.group)


class _RingNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: RingAttend, names: tuple, scalars: dict[str, float], *tensors: Tensor
    ) -> Tensor:
        line = ring.sharding.line(reverse=False)
        with full_precision(tensors):
            shard = ring.bind(names, scalars, tensors)
            entry = ring.receive(shard.zero_state(), line.prev_rank)
            output, leave, saved = shard.forward(entry)
            ring.send(leave, line.next_rank)
        ctx.call, ctx.counts = (ring, names, scalars), (len(tensors), len(entry))
        ctx.save_for_backward(*tensors, *entry, *saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ring, names, scalars = ctx.call
        given, entries = ctx.counts
        tensors, kept = ctx.saved_tensors[:given], ctx.saved_tensors[given:]
        line = ring.sharding.line(reverse=True)
        with full_precision(tensors):
            shard = ring.bind(names, scalars, tensors)
            entry, saved = tuple(kept[:entries]), tuple(kept[entries:])
            zero = tuple(torch.zeros_like(t) for t in entry)
            grad_exit = ring.receive(zero, line.prev_rank)
            rows, held, grad_entry = shard.backward(saved, entry, grad_output, grad_exit)
            ring.send(grad_entry, line.next_rank)
        return (None, None, None, *rows, *held)
