"""Contexts, shards and groups: who owns what, and what ranks that disagree are told."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flexla_dist.errors import ArgumentError, ShardingError
from flexla_dist.layers import LayerConfig, LinearAttentionLayer
from flexla_dist.ops.op import compile
from flexla_dist.parallel import (
    SequenceParallelLA,
    SequenceParallelOp,
    mean_loss,
    parallelize_sequence,
    position_ids,
    sequence_context,
    sequence_loss,
    shard_sequence,
    unshard_sequence,
)
from flexla_dist.spec.variants.registry import get_variant
from flexla_dist.testing.inputs import make_inputs
from flexla_dist.testing.ranks import run_ranks

PRELOAD = ("flexla_dist.parallel", "flexla_dist.layers", "flexla_dist.ops.op", "torch._dynamo")
WIDTH = 12


def make_layer(width: int = WIDTH, variant: str = "gated_delta_rule") -> LinearAttentionLayer:
    torch.manual_seed(0)
    config = LayerConfig(variant=variant, width=width, heads=2, key_dim=4, value_dim=4)
    return LinearAttentionLayer(config).double()


def tokens(count: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, count, WIDTH, generator=generator, dtype=torch.float64)


# -- cutting and joining ----------------------------------------------------------------------


def cut_and_join(rank: int, world: int) -> None:
    group = dist.group.WORLD
    x = torch.arange(22.0, dtype=torch.float64).view(2, 11)
    for lengths in (None, (0, 11, 0), (5, 1, 5)):
        part = shard_sequence(x, group, lengths=lengths).requires_grad_()
        whole = unshard_sequence(part, group)
        assert torch.equal(whole, x)
        weight = torch.arange(22.0, dtype=torch.float64).view(2, 11) * (rank + 1)
        (whole * weight).sum().backward()
        expected = shard_sequence(weight / (rank + 1) * 6, group, lengths=lengths)
        assert torch.equal(part.grad, expected)
    rows = torch.arange(8).view(8, 1)
    assert torch.equal(unshard_sequence(shard_sequence(rows, group, dim=0), group, dim=0), rows)
    source = x.clone().requires_grad_()
    shard_sequence(source, group).sum().backward()
    low, high = ((0, 4), (4, 8), (8, 11))[rank]
    assert source.grad is not None and source.grad[:, low:high].eq(1).all()
    assert source.grad.sum() == 2 * (high - low)


def one_wants_the_join(rank: int, world: int) -> Tensor | None:
    """A gradient that only rank 1 wants still reaches it from everybody's copy."""
    group = dist.group.WORLD
    part = shard_sequence(torch.ones(1, 6), group).requires_grad_(rank == 1)
    whole = unshard_sequence(part, group)
    (whole.sum() * (rank + 1)).backward()
    return part.grad


def positions(rank: int, world: int) -> list[list[int]]:
    group = dist.group.WORLD
    with sequence_context(group, cu_seqlens=[0, 2, 2, 7, 9], lengths=(4, 0, 5)) as context:
        local = context.cu_seqlens.tolist()
        inside = position_ids(group)
        assert torch.equal(inside, context.position_ids)
    outside = position_ids(group, tokens=3)
    return [local, inside[0].tolist(), outside[0].tolist()]


def test_cut_and_join() -> None:
    run_ranks(cut_and_join, 3, preload=PRELOAD)
    none, grad, also_none = run_ranks(one_wants_the_join, 3, preload=PRELOAD)
    assert none is None and also_none is None
    assert torch.equal(grad, torch.full((1, 2), 6.0))


def test_positions_restart_with_every_document() -> None:
    first, second, third = run_ranks(positions, 3, preload=PRELOAD)
    assert first == [[0, 2, 2, 4], [0, 1, 0, 1], [0, 1, 2]]
    assert second == [[0, 0], [], [3, 4, 5]]
    assert third == [[0, 3, 5], [2, 3, 4, 0, 1], [6, 7, 8]]


# -- contexts ---------------------------------------------------------------------------------


def contexts(rank: int, world: int) -> None:
    """Without a context shards are as they come; the innermost context counts; all end."""
    group = dist.group.WORLD
    whole, layer = make_layer(), SequenceParallelLA(make_layer(), group=group)
    x = tokens(12)

    def check(lengths: tuple[int, ...], starts: list[int] | None = None) -> None:
        expected = whole(x, cu_seqlens=None if starts is None else torch.tensor(starts))
        part = shard_sequence(x, group, lengths=lengths)
        want = shard_sequence(expected, group, lengths=lengths)
        torch.testing.assert_close(layer(part), want, rtol=1e-10, atol=1e-12)

    check((4, 4, 4))
    check((7, 0, 5))
    with sequence_context(group, cu_seqlens=[0, 5, 12], lengths=(6, 3, 3)):
        check((6, 3, 3), [0, 5, 12])
        with sequence_context(group, cu_seqlens=torch.tensor([0, 1, 12], dtype=torch.int32)):
            check((4, 4, 4), [0, 1, 12])
            part = shard_sequence(x, group)
            layer(part, cu_seqlens=torch.tensor([0, 1, 12]))
        check((6, 3, 3), [0, 5, 12])
    with sequence_context(group) as context:
        check((2, 9, 1))
        assert context.plan.lengths == (2, 9, 1) and context.cu_seqlens is None
    check((4, 4, 4))


def changing_lengths(rank: int, world: int) -> None:
    """Totals that differ by less than the number of ranks: some shards keep their length."""
    group = dist.group.WORLD
    whole, layer = make_layer(), SequenceParallelLA(make_layer(), group=group, timeout=20.0)
    for total in (9, 10, 11, 9, 3, 1, 10):
        part = layer(shard_sequence(tokens(total), group))
        want = shard_sequence(whole(tokens(total)), group)
        torch.testing.assert_close(part, want, rtol=1e-10, atol=1e-12)


def test_contexts_nest_and_end() -> None:
    run_ranks(contexts, 3, preload=PRELOAD)


def test_lengths_may_change_without_a_context() -> None:
    run_ranks(changing_lengths, 3, preload=PRELOAD)


# -- meshes and data parallelism --------------------------------------------------------------


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(20, WIDTH).double()
        self.attn = make_layer()

    def forward(self, ids: Tensor) -> Tensor:
        return self.attn(self.embedding(ids)) @ self.embedding.weight.T


def batch_of(group: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group)
    ids = torch.randint(0, 20, (2, 9), generator=generator)
    labels = torch.randint(0, 20, (2, 9), generator=generator)
    labels[:, : 3 + 2 * group] = -100
    return ids, labels


def train_on_mesh(rank: int, world: int, wrapper: str) -> tuple[float, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = Classifier()
    parallelize_sequence(model, mesh["cp"])
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    if wrapper == "fsdp":
        fully_shard(model.attn, mesh=everyone)
        fully_shard(model, mesh=everyone)
        run: torch.nn.Module = model
    else:
        run = DistributedDataParallel(model, process_group=everyone.get_group())
    ids, labels = batch_of(mesh["dp"].get_local_rank())
    logits = run(shard_sequence(ids, mesh["cp"]))
    loss = sequence_loss(logits, shard_sequence(labels, mesh["cp"]), mesh)
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        full = getattr(parameter.grad, "full_tensor", None)
        grads[name] = parameter.grad if full is None else full()
    return float(mean_loss(loss, mesh)), grads


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_mesh_of_data_and_sequence_parallelism(wrapper: str) -> None:
    """Averaging wrappers over dp x cp give the gradient of the mean over all labels."""
    results = run_ranks(train_on_mesh, 4, wrapper, preload=PRELOAD)
    model = Classifier()
    batches = [batch_of(group) for group in (0, 1)]
    ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss.backward()
    for value, grads in results:
        assert abs(value - float(loss.detach())) < 1e-12
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-13)


# -- errors -----------------------------------------------------------------------------------


def wrong_length(rank: int) -> None:
    with sequence_context(dist.group.WORLD, lengths=(4, 4)):
        SequenceParallelLA(make_layer(), group=dist.group.WORLD)(tokens(3 if rank else 4))


def unsorted_documents(rank: int) -> None:
    with sequence_context(dist.group.WORLD, cu_seqlens=[0, 5, 3, 8]):
        pass


def unsorted_on_one_rank(rank: int) -> None:
    with sequence_context(dist.group.WORLD, cu_seqlens=[0, 5, 3, 8] if rank else [0, 3, 8]):
        pass


def other_documents(rank: int) -> None:
    with sequence_context(dist.group.WORLD, cu_seqlens=[0, 3 + rank, 8]):
        pass


def other_lengths(rank: int) -> None:
    with sequence_context(dist.group.WORLD, lengths=(4, 4) if rank else (5, 3)):
        pass


def other_packed_length(rank: int) -> None:
    with sequence_context(dist.group.WORLD, cu_seqlens=[0, 4, 8 + rank]):
        pass


def other_ids(rank: int) -> None:
    shard_sequence(torch.arange(8).view(1, 8) + rank, dist.group.WORLD)


def other_spec(rank: int) -> None:
    variant = "gated_delta_rule" if rank else "delta_rule"
    SequenceParallelLA(make_layer(variant=variant), group=dist.group.WORLD)(tokens(4))


def other_heads(rank: int) -> None:
    spec = get_variant("simple_gla")
    given = make_inputs(spec, batch=1, tokens=4, value_heads=4 if rank else 2)
    op = SequenceParallelOp(compile(spec), group=dist.group.WORLD)
    op(**given.inputs, scale=1.0)


def other_batch(rank: int) -> None:
    SequenceParallelLA(make_layer(), group=dist.group.WORLD)(tokens(4, batch=1 + rank))


def other_mode(rank: int) -> None:
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD)
    with torch.set_grad_enabled(rank == 0):
        layer(tokens(4))


def other_number_of_calls(rank: int) -> None:
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD, timeout=8.0)
    layer(tokens(4))
    if rank == 0:
        shard_sequence(torch.zeros(1, 4), dist.group.WORLD)
    layer(tokens(4))


def packed_batch(rank: int) -> None:
    with sequence_context(dist.group.WORLD, cu_seqlens=[0, 3, 8]):
        SequenceParallelLA(make_layer(), group=dist.group.WORLD)(tokens(4, batch=2))


def documents_without_context(rank: int) -> None:
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD)
    layer(tokens(4), cu_seqlens=torch.tensor([0, 3, 4]))


def wrong_initial_state(rank: int) -> None:
    spec = get_variant("simple_gla")
    given = make_inputs(spec, batch=1, tokens=4)
    op = SequenceParallelOp(compile(spec), group=dist.group.WORLD)
    state = given.initial_state[:, :1]
    op(**given.inputs, scale=1.0, initial_state=state if rank else given.initial_state)


def failing_block(rank: int) -> None:
    """A rank fails in the middle of a layer, the other waits for its state."""
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD)
    x = tokens(4)
    layer(x)
    if rank == 0:
        layer.qkv.register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("out of luck")))
    layer(x)


def other_plan(rank: int) -> None:
    """The ranks cut something else by hand in between; rank 0 does not notice by its length."""
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD, timeout=8.0)
    layer(tokens(4))
    shard_sequence(torch.zeros(1, 7), dist.group.WORLD)
    layer(tokens(4)).sum().backward()


def communicating_recomputation(rank: int) -> None:
    x = torch.ones(1, 8, requires_grad=True)
    part = shard_sequence(x, dist.group.WORLD)
    loss = checkpoint(
        lambda y: unshard_sequence(y * y, dist.group.WORLD).sin(), part, use_reentrant=False
    )
    loss.sum().backward()


def complex_initial_state(rank: int) -> None:
    spec = get_variant("simple_gla")
    given = make_inputs(spec, batch=1, tokens=4, heads=2, value_heads=2)
    state = torch.zeros(given.initial_state.shape, dtype=torch.complex128)  # type: ignore[union-attr]
    op = SequenceParallelOp(compile(spec), group=dist.group.WORLD)
    op(**given.inputs, scale=1.0, initial_state=state)


def wrong_strategy(rank: int) -> None:
    SequenceParallelLA(make_layer(), group=dist.group.WORLD, strategy="log_scam")


def other_node_size(rank: int) -> None:
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD, node_size=1 + rank)
    layer(tokens(4))


def packed_on_one_rank(rank: int) -> None:
    """The first exchange is an agreement here, a gathering of lengths there."""
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD)
    if rank:
        with sequence_context(dist.group.WORLD, cu_seqlens=[0, 3, 8]):
            layer(tokens(4))
    layer(tokens(4))


def new_length_on_one_rank(rank: int) -> None:
    layer = SequenceParallelLA(make_layer(), group=dist.group.WORLD, timeout=30.0)
    layer(tokens(4))
    layer(tokens(4 - rank)).sum().backward()


DISAGREE = "RankMismatch"
FAILURES: list[tuple[Callable[[int], None], str, str]] = [
    (wrong_length, ShardingError.__name__, "expected 4"),
    (unsorted_documents, ShardingError.__name__, "must not decrease"),
    (unsorted_on_one_rank, ShardingError.__name__, "must not decrease"),
    (other_documents, DISAGREE, "cu_seqlens"),
    (other_lengths, DISAGREE, "lengths"),
    (other_packed_length, DISAGREE, "lengths"),
    (other_ids, DISAGREE, "hash of the values"),
    (other_spec, DISAGREE, "operator="),
    (other_heads, DISAGREE, "input v"),
    (other_batch, DISAGREE, "shape="),
    (other_mode, DISAGREE, "gradients enabled"),
    (other_number_of_calls, DISAGREE, "different operations"),
    (packed_batch, ShardingError.__name__, "one packed row"),
    (documents_without_context, ShardingError.__name__, "sequence_context"),
    (wrong_initial_state, DISAGREE, "initial state"),
    (complex_initial_state, "ArgumentTypeError", "initial_state has dtype torch.complex128"),
    (failing_block, "ValueError", "out of luck"),
    (other_plan, "TagMismatch", "no context with lengths of hash"),
    (communicating_recomputation, "RecomputeError", "outside of the checkpointed"),
    (wrong_strategy, ShardingError.__name__, "did you mean 'log_scan'"),
    (other_node_size, DISAGREE, "node_size="),
    (packed_on_one_rank, DISAGREE, "rank 1: [agree(sequence_context: lengths (4, 4), cu_seqlens"),
    (new_length_on_one_rank, DISAGREE, "shard length changed on rank 1, to 3 tokens: give every"),
]


def run_failure(rank: int, world: int, name: str) -> None:
    next(program for program, _, _ in FAILURES if program.__name__ == name)(rank)


@pytest.mark.parametrize(
    "program,error,words", FAILURES, ids=[program.__name__ for program, _, _ in FAILURES]
)
def test_every_rank_is_told_within_seconds(
    program: Callable[[int], None], error: str, words: str
) -> None:
    start = time.monotonic()
    results = run_ranks(
        run_failure, 2, program.__name__, preload=PRELOAD, expect_errors=True, timeout=40.0
    )
    assert time.monotonic() - start < 15
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} noticed nothing"
        assert result.type == error or error in result.message, f"rank {rank}: {result}"
        assert words in result.message, f"rank {rank}: {result}"


def strategies_by_name(rank: int, world: int) -> None:
    group = dist.group.WORLD
    op = compile(get_variant("simple_gla"))
    for wrap in (
        lambda name: SequenceParallelOp(op, group=group, strategy=name),
        lambda name: parallelize_sequence(make_layer(), group=group, strategy=name),
        lambda name: SequenceParallelLA(make_layer(), group=group, strategy=name),
    ):
        with pytest.raises(ShardingError, match=r"strategy is 'chian'.*did you mean 'chain'"):
            wrap("chian")
    with pytest.raises(ShardingError, match="node_size is 0, expected a whole number"):
        SequenceParallelLA(make_layer(), group=group, node_size=0)


def test_strategies_are_checked_when_wrapping() -> None:
    run_ranks(strategies_by_name, 1, preload=PRELOAD)


def test_argument_errors_are_value_errors() -> None:
    assert issubclass(ShardingError, ValueError) and issubclass(ArgumentError, ValueError)
