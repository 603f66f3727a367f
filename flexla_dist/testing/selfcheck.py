"""A sharded layer compared with the same layer on one rank, small enough to run anywhere."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.layers import LayerConfig, LinearAttentionLayer
from flexla_dist.parallel import SequenceParallelLA, shard_sequence


def sharded_layer_error(rank: int, world_size: int, variant: str = "gated_delta_rule") -> float:
    """Largest error, relative to the largest value, of output and gradients in float64.

    Every rank of the default group calls it.
    """
    torch.manual_seed(0)
    config = LayerConfig(variant=variant, width=32, heads=2, key_dim=8, value_dim=8)
    layer = LinearAttentionLayer(config).double()
    x, weight = torch.randn(2, 2, 101, config.width, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    expected = layer(whole)
    (expected * weight).sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()

    group = dist.group.WORLD
    assert group is not None
    SequenceParallelLA(layer, group=group)
    mine = shard_sequence(x, group).requires_grad_()
    output = layer(mine)
    (output * shard_sequence(weight, group)).sum().backward()
    assert mine.grad is not None and whole.grad is not None
    errors = [
        relative_error(output, shard_sequence(expected, group)),
        relative_error(mine.grad, shard_sequence(whole.grad, group)),
    ]
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        errors.append(relative_error(parameter.grad, gradient))
    return max(errors)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    got, expected = got.detach(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
