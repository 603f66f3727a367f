"""Who takes part in which exchange: messages counted, gradients wanted by few, recomputation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flexla_dist.comm.channel import Channel
from flexla_dist.errors import DoubleBackwardError, RecomputeError
from flexla_dist.layers import LayerConfig, LinearAttentionLayer
from flexla_dist.ops.op import compile
from flexla_dist.parallel import (
    SequenceExchange,
    SequenceParallelLA,
    sequence_context,
    shard_sequence,
)
from flexla_dist.spec.variants.registry import get_variant
from flexla_dist.testing.ranks import run_ranks

PRELOAD = ("flexla_dist.parallel", "flexla_dist.layers", "flexla_dist.ops.op", "torch._dynamo")
WIDTH = 12
BOUND = 1e-10


def make_layer(variant: str = "gated_delta_rule") -> LinearAttentionLayer:
    torch.manual_seed(0)
    config = LayerConfig(variant=variant, width=WIDTH, heads=2, key_dim=4, value_dim=4)
    return LinearAttentionLayer(config).double()


def tokens(count: int, seed: int = 1, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, WIDTH, generator=generator, dtype=torch.float64)


def sharded_layer(variant: str = "gated_delta_rule", **settings: object) -> LinearAttentionLayer:
    return SequenceParallelLA(make_layer(variant), group=dist.group.WORLD, timeout=20.0, **settings)  # type: ignore[arg-type]


def close(got: Tensor, want: Tensor) -> None:
    error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    assert error <= BOUND, f"off by {error:.1e}"


# -- messages ---------------------------------------------------------------------------------


def count_messages(
    rank: int, world: int, starts: tuple[int, ...], strategy: str
) -> tuple[Counter, Counter]:
    """Point-to-point messages sent by this rank, by kind and direction, and all-gathers."""
    sent: Counter = Counter()
    gathered: Counter = Counter()
    exchange, all_gather = Channel.exchange, Channel.all_gather

    def counted(self, kind, tag, sends=(), receives=(), reset=False):  # type: ignore[no-untyped-def]
        sent[f"{kind.name} {tag.direction}"] += len(sends)
        return exchange(self, kind, tag, sends, receives, reset)

    def gathers(self, kind, tag, tensors, reset=False):  # type: ignore[no-untyped-def]
        gathered[f"{kind.name} {tag.direction}"] += 1
        return all_gather(self, kind, tag, tensors, reset)

    Channel.exchange, Channel.all_gather = counted, gathers  # type: ignore[method-assign]
    layer = sharded_layer(strategy=strategy)
    group = dist.group.WORLD
    with sequence_context(group, cu_seqlens=starts):
        layer(shard_sequence(tokens(starts[-1]), group)).sum().backward()
    return +sent, +gathered


@pytest.mark.parametrize("strategy", ["chain", "log_scan", "all_gather"])
def test_nothing_is_sent_where_no_document_crosses(strategy: str) -> None:
    results = run_ranks(count_messages, 4, (0, 3, 6, 6, 9, 12), strategy, preload=PRELOAD)
    assert results == [(Counter(), Counter())] * 4


def test_only_neighbours_of_a_crossed_cut_send() -> None:
    """The document [2, 5) crosses the first of three cuts; ranks 2 and 3 are left alone."""
    results = run_ranks(count_messages, 4, (0, 2, 5, 6, 9, 12), "chain", preload=PRELOAD)
    forward = {"STATE forward": 1, "ROWS forward": 1}
    backward = {"STATE backward": 1, "ROW_GRADIENTS backward": 1}
    assert [dict(sent) for sent, _ in results] == [forward, backward, {}, {}]


# -- gradients that few want ------------------------------------------------------------------


def one_wants(rank: int, world: int, wanted: int, recompute: bool) -> Tensor | None:
    group = dist.group.WORLD
    layer = sharded_layer().requires_grad_(False)
    x = shard_sequence(tokens(13), group, lengths=(5, 1, 0, 7)).requires_grad_(rank == wanted)
    run = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
    output = run(torch.tanh(run(x)))
    assert output.requires_grad
    (output.square() * (rank != 3)).sum().backward()
    return x.grad


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_gradient_wanted_on_one_rank_only(wanted: int, recompute: bool) -> None:
    """The others take part although nothing of theirs needs a gradient; rank 3 is masked."""
    results = run_ranks(one_wants, 4, wanted, recompute, preload=PRELOAD)
    layer, x = make_layer(), tokens(13).requires_grad_()
    layer(torch.tanh(layer(x)))[:, :6].square().sum().backward()
    low = {0: 0, 1: 5, 3: 6}[wanted]
    for rank, grad in enumerate(results):
        if rank == wanted:
            torch.testing.assert_close(
                grad, x.grad[:, low : low + grad.shape[1]], rtol=BOUND, atol=1e-12
            )
        else:
            assert grad is None


def no_gradient(rank: int, world: int) -> tuple[bool, bool]:
    group = dist.group.WORLD
    layer = sharded_layer()
    x = shard_sequence(tokens(9), group)
    with torch.no_grad():
        evaluated = layer(x)
    trained = layer(x)
    close(evaluated, trained.detach())
    return evaluated.requires_grad, trained.requires_grad


def test_evaluation_and_training_take_turns() -> None:
    assert run_ranks(no_gradient, 2, preload=PRELOAD) == [(False, True)] * 2


# -- recomputation ----------------------------------------------------------------------------

Forward = Callable[[LinearAttentionLayer, Tensor], Tensor]


def save_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def plainly(layer: LinearAttentionLayer, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def selectively(layer: LinearAttentionLayer, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def to_the_end(layer: LinearAttentionLayer, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False, early_stop=False)


def nested(layer: LinearAttentionLayer, x: Tensor) -> Tensor:
    inner = partial(checkpoint, layer, use_reentrant=False)
    return checkpoint(lambda y: torch.sin(inner(torch.tanh(y))), x, use_reentrant=False)


def twice(layer: LinearAttentionLayer, x: Tensor) -> Tensor:
    """One layer called twice in a recomputed region, the second time with other values."""
    return checkpoint(lambda y: layer(layer(y).tanh()), x, use_reentrant=False)


def same_input_twice(layer: LinearAttentionLayer, x: Tensor) -> Tensor:
    return checkpoint(lambda y: layer(y) * layer(y), x, use_reentrant=False)


def unshared(name: str) -> Forward:
    """The same function without recomputation."""
    return {
        "plainly": lambda layer, x: layer(x),
        "selectively": lambda layer, x: layer(x),
        "to_the_end": lambda layer, x: layer(x),
        "nested": lambda layer, x: torch.sin(layer(torch.tanh(x))),
        "twice": lambda layer, x: layer(layer(x).tanh()),
        "same_input_twice": lambda layer, x: layer(x) * layer(x),
    }[name]


WAYS: tuple[Forward, ...] = (plainly, selectively, to_the_end, nested, twice, same_input_twice)


def recomputed(rank: int, world: int) -> dict[str, Tensor]:
    group = dist.group.WORLD
    found = {}
    for way in WAYS:
        layer = sharded_layer()
        for documents in (None, (0, 4, 9, 11)):
            with sequence_context(group, cu_seqlens=documents, lengths=(4, 4, 3)):
                x = shard_sequence(tokens(11), group).requires_grad_()
                loss = way(layer, x).square().sum()
            again = way is not selectively
            loss.backward(retain_graph=again)
            assert x.grad is not None
            first = x.grad.clone()
            if again:
                loss.backward()
                close(x.grad - first, first)
            found[f"{way.__name__} {documents}"] = first
    return found


def test_every_way_of_recomputing() -> None:
    """Selective, nested, without early stop, a layer twice, backward twice."""
    results = run_ranks(recomputed, 3, preload=PRELOAD)
    for name in results[0]:
        way, _, documents = name.partition(" ")
        starts = None if documents == "None" else torch.tensor([0, 4, 9, 11])
        layer, x = make_layer(), tokens(11).requires_grad_()
        unshared(way)(lambda y: layer(y, cu_seqlens=starts), x).square().sum().backward()  # type: ignore[arg-type]  # noqa: B023
        close(torch.cat([values[name] for values in results], 1), x.grad)


def two_equal_micro_batches(rank: int, world: int) -> Tensor:
    """Rank 0 sees the same tokens in both micro-batches, rank 1 does not."""
    group = dist.group.WORLD
    layer = sharded_layer()
    kept = []
    for seed in (1, 2):
        with sequence_context(group, lengths=(4, 4)):
            x = shard_sequence(half_equal(seed), group).requires_grad_()
            kept.append((x, plainly(layer, x).square().sum()))
    for _, loss in kept:
        loss.backward()
    return torch.cat([x.grad for x, _ in kept], 1)  # type: ignore[misc]


def half_equal(seed: int) -> Tensor:
    return torch.cat([tokens(4, 1), tokens(4, 10 + seed)], 1)


def test_equal_inputs_of_two_micro_batches() -> None:
    """The first rank receives nothing, so either record will do; its gradients still differ."""
    results = run_ranks(two_equal_micro_batches, 2, preload=PRELOAD)
    for place, seed in enumerate((1, 2)):
        layer, x = make_layer(), half_equal(seed).requires_grad_()
        layer(x).square().sum().backward()
        part = slice(4 * place, 4 * place + 4)
        assert x.grad is not None
        close(torch.cat([values[:, part] for values in results], 1), x.grad)


def ambiguous(rank: int, world: int) -> None:
    """Rank 1 sees the same tokens twice but receives other states: nobody can tell them apart."""
    group = dist.group.WORLD
    layer = sharded_layer()
    kept = []
    for seed in (1, 2):
        with sequence_context(group, lengths=(4, 4)):
            x = (tokens(4, seed) if rank == 0 else tokens(4, 9)).requires_grad_()
            kept.append(plainly(layer, x).square().sum())
    for loss in kept:
        loss.backward()


def test_ambiguous_recomputation_is_an_error_on_every_rank() -> None:
    results = run_ranks(ambiguous, 2, preload=PRELOAD, expect_errors=True, timeout=40.0)
    assert results[1].type == RecomputeError.__name__
    assert "sequence_context" in results[1].message
    assert results[0].type == "RemoteRankError" and "RecomputeError" in results[0].message


def kept_activations(rank: int, world: int) -> tuple[int, int]:
    """Inputs of the operator that are still alive after forward, without and with recomputation."""
    found = []
    for way in (lambda layer, x: layer(x), plainly):
        layer = sharded_layer()
        alive: list[weakref.ref[Tensor]] = []
        inputs = layer.operator_inputs

        def remember(*args: Tensor, inputs=inputs, alive=alive) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
            made = inputs(*args)
            alive += [weakref.ref(value.untyped_storage()) for value in made.values()]
            return made

        layer.operator_inputs = remember  # type: ignore[method-assign]
        x = shard_sequence(tokens(9), dist.group.WORLD).requires_grad_()
        output = way(layer, x)
        found.append(sum(ref() is not None for ref in alive))
        output.sum().backward()
    return found[0], found[1]


def test_recomputed_activations_are_not_kept() -> None:
    for plain, again in run_ranks(kept_activations, 2, preload=PRELOAD):
        assert plain > 0 and again == 0


def reentrant(rank: int, world: int) -> None:
    layer = sharded_layer()
    x = shard_sequence(tokens(8), dist.group.WORLD).requires_grad_()
    checkpoint(layer, x, use_reentrant=True)


def second_derivative(rank: int, world: int) -> None:
    layer = sharded_layer()
    x = shard_sequence(tokens(8), dist.group.WORLD).requires_grad_()
    torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    "program,error,words",
    [
        (reentrant, RecomputeError, "use_reentrant=False"),
        (second_derivative, DoubleBackwardError, "create_graph=True"),
    ],
)
def test_refused_by_name(program: Callable, error: type[Exception], words: str) -> None:
    results = run_ranks(program, 2, preload=PRELOAD, expect_errors=True, timeout=40.0)
    for result in results:
        assert result is not None
        assert result.type == error.__name__ or error.__name__ in result.message
        assert words in result.message


# -- layers with several exchanges ------------------------------------------------------------


class TwoOperators(torch.nn.Module):
    """The final state of a first operator, known to all ranks, enters a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.op = compile(get_variant("simple_gla"), chunk_size=4)
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH + 2).double()

    def forward(self, x: Tensor, exchange: SequenceExchange | None = None) -> Tensor:
        width = 2
        before = x.new_zeros(1, width, WIDTH) if exchange is None else exchange.halo(x, width)
        x = x + torch.cat([before, x], 1)[:, :-width]
        q, k, v, g = self.project(x).split([WIDTH, WIDTH, WIDTH, 2], -1)
        heads = {"q": q, "k": k, "v": v}
        inputs = {name: t.unflatten(-1, (2, -1)) for name, t in heads.items()}
        inputs["g"] = torch.nn.functional.logsigmoid(g)
        if exchange is None:
            first, state = self.op(**inputs, scale=0.5, output_final_state=True)
            return (first + self.op(**inputs, scale=0.5, initial_state=state)[0]).flatten(-2)
        scalars = {"scale": 0.5}
        first, state = exchange.attend(self.op, inputs, {}, scalars, output_final_state="broadcast")
        second = exchange.attend(self.op, inputs, {}, scalars, initial_state=state)
        return (first + second).flatten(-2)


def several_exchanges(rank: int, world: int, recompute: bool) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    torch.manual_seed(0)
    layer = SequenceParallelLA(TwoOperators(), group=group, timeout=20.0)
    x = shard_sequence(tokens(11), group, lengths=(3, 1, 0, 7)).requires_grad_()
    y = plainly(layer, x) if recompute else layer(x)
    y.square().sum().backward()
    assert x.grad is not None and layer.project.weight.grad is not None
    ran = layer.op.last_backward_plan
    assert (ran is None) == (x.shape[1] == 0)
    assert ran is None or (ran.executor, ran.kernels) == ("torch", "batched")
    return x.grad, layer.project.weight.grad


@pytest.mark.parametrize("recompute", [False, True])
def test_several_exchanges_in_one_layer(recompute: bool) -> None:
    results = run_ranks(several_exchanges, 4, recompute, preload=PRELOAD)
    torch.manual_seed(0)
    layer, x = TwoOperators(), tokens(11).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None and layer.project.weight.grad is not None
    close(torch.cat([grad for grad, _ in results], 1), x.grad)
    close(torch.stack([grad for _, grad in results]).sum(0), layer.project.weight.grad)


def unfreeze(rank: int, world: int) -> list[bool]:
    """Frozen at first, then trained: all ranks find out at once."""
    group = dist.group.WORLD
    layer = sharded_layer().requires_grad_(False)
    x = shard_sequence(tokens(9), group)
    found = [layer(x).requires_grad]
    layer.requires_grad_(True)
    output = layer(x)
    output.sum().backward()
    return [*found, output.requires_grad, layer.qkv.weight.grad is not None]


def test_a_layer_may_be_unfrozen() -> None:
    assert run_ranks(unfreeze, 3, preload=PRELOAD) == [[False, True, True]] * 3
