"""The discipline that sharded autograd nodes must follow, shown on a dummy exchange.

Four layers under activation checkpointing, one rank with every label masked, a gradient wanted on
one rank only. The nodes log every message they send; the logs must be the same on all ranks,
because a rank that leaves one out makes its neighbours wait forever.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexla_dist.testing.ranks import run_ranks

LAYERS = 4
Log = list[tuple[int, str]]


def pass_along(rank: int, world_size: int, value: Tensor, step: int) -> Tensor:
    """Sum over the ranks before this one (step=1) or after it (step=-1), by a chain."""
    received = torch.zeros_like(value)
    if 0 <= rank - step < world_size:
        dist.recv(received, rank - step)
    if 0 <= rank + step < world_size:
        dist.send(received + value, rank + step)
    return received


class DummyExchange(torch.autograd.Function):
    """y = x * (sum of x over earlier ranks): local work and exchange in one node."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: int,
        world: tuple[int, int],
        log: Log,
        kept: dict,
        anchor: Tensor,
        x: Tensor,
    ) -> Tensor:
        recompute = torch._C._current_graph_task_id() != -1
        if not recompute:
            log.append((layer, "forward"))
            kept[layer] = pass_along(*world, x.detach().sum(), 1)
        ctx.layer, ctx.world, ctx.log, ctx.entering = layer, world, log, kept[layer]
        ctx.save_for_backward(x)
        return x * (1.0 + kept[layer])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.log.append((ctx.layer, "backward"))
        leaving = pass_along(*ctx.world, (grad * x).sum(), -1)
        return None, None, None, None, None, grad * (1.0 + ctx.entering) + leaving


def train_once(rank: int, world_size: int, wanted: int, masked: int) -> tuple[Log, Tensor | None]:
    log: Log = []
    kept: dict[int, Tensor] = {}
    x = torch.linspace(0.1, 0.2, 6, dtype=torch.float64).view(2, 3) * (rank + 1)
    x.requires_grad_(rank == wanted)

    def layer_forward(layer: int, y: Tensor) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)
        return torch.tanh(DummyExchange.apply(layer, (rank, world_size), log, kept, anchor, y))

    y = x
    for layer in range(LAYERS):
        y = checkpoint(layer_forward, layer, y, use_reentrant=False)
    loss = y.sum() * 0 if rank == masked else y.sum()
    loss.backward()
    return log, x.grad


def whole_gradient(world_size: int, masked: int) -> Tensor:
    x = torch.linspace(0.1, 0.2, 6, dtype=torch.float64).view(1, 2, 3)
    x = (x * torch.arange(1, world_size + 1).view(-1, 1, 1)).requires_grad_()
    y = x
    for _ in range(LAYERS):
        sums = y.sum((1, 2))
        y = torch.tanh(y * (1.0 + sums.cumsum(0) - sums).view(-1, 1, 1))
    loss = sum(y[r].sum() for r in range(world_size) if r != masked)
    (grad,) = torch.autograd.grad(loss, x)
    return grad


@pytest.mark.parametrize("world_size,masked", [(2, 1), (3, 1), (4, 2)])
def test_tag_logs_are_equal_on_all_ranks(world_size: int, masked: int) -> None:
    results = run_ranks(train_once, world_size, 0, masked, preload=("torch._dynamo",))
    expected = [(layer, "forward") for layer in range(LAYERS)]
    expected += [(layer, "backward") for layer in reversed(range(LAYERS))]
    for log, _ in results:
        assert log == expected
    torch.testing.assert_close(results[0][1], whole_gradient(world_size, masked)[0])
    assert all(grad is None for _, grad in results[1:])
