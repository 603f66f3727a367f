"""The generated kernels on shards: interpreted on the CPU, two ranks, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flexla_dist.ops.op import compile
from flexla_dist.parallel import SequenceParallelOp, shard_sequence
from flexla_dist.spec.variants.registry import get_variant
from flexla_dist.testing.inputs import make_inputs
from flexla_dist.testing.ranks import run_ranks

TOKENS = 37
BOUND = 1e-5


def _results(op, given, executor):
    leaves = [*given.inputs.values(), *given.params.values()]
    output = op(**given.inputs, **given.params, **given.scalars, executor=executor)
    output = output[0] if isinstance(output, tuple) else output
    weight = torch.linspace(-1.0, 1.0, TOKENS)[:, None, None]
    return output, leaves, weight


def _sharded(rank: int, world_size: int, name: str) -> float:
    op = compile(get_variant(name))
    given = make_inputs(get_variant(name), batch=1, tokens=TOKENS, heads=1, value_heads=2)
    given = given.to(torch.float32)
    whole, leaves, weight = _results(op, given, "torch")
    wanted = torch.autograd.grad((whole * weight).sum(), leaves)
    group = dist.group.WORLD
    parts = {n: shard_sequence(x.detach(), group) for n, x in given.inputs.items()}
    parts = {n: x.clone().requires_grad_() for n, x in parts.items()}
    sharded = SequenceParallelOp(op, group=group)
    output = sharded(**parts, **given.params, **given.scalars, executor="triton")
    output = output[0] if isinstance(output, tuple) else output
    (output * shard_sequence(weight, group, dim=0)).sum().backward()
    pairs = [(output, shard_sequence(whole.detach(), group))]
    pairs += [
        (parts[n].grad, shard_sequence(g, group))
        for n, g in zip(given.inputs, wanted, strict=False)
    ]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule"])
def test_kernels_on_shards_equal_one_process(name: str) -> None:
    errors = run_ranks(_sharded, 2, name)
    assert max(errors) < BOUND, errors
