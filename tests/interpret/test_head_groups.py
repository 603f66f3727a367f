"""States that cross ranks group by group of heads: the bits of all heads at once, and the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from flexla_dist.comm.device_exchange import DeviceExchanger
from flexla_dist.comm.engines import Arriving, DeviceEngine
from flexla_dist.compiler.executor.triton_run import Launch, Pause
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.parallel import SequenceParallelOp, sequence_context, shard_sequence
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import make_inputs
from flexla_dist.testing.ranks import run_ranks
from scaling_runs.virtual_run import VirtualRanks

from . import device_parallel_cases as shards
from .test_opened import bound, random_states
from .test_triton_executor import Case, graphs_of, make_call, operator

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

TWO, THREE = ((0, 2), (2, 2)), ((0, 1), (1, 2), (3, 1))
ROWS = Case(20, batch=2, value_heads=4, K=16, V=16, chunk_size=16, segment=1)
PACKED = Case(30, value_heads=4, documents=(0, 5, 5, 30), K=16, V=16, chunk_size=16, segment=1)
CASES = [
    ("simple_gla", ROWS, (TWO, THREE)),
    ("gla", PACKED, (TWO, THREE)),
    ("gated_delta_rule", ROWS, (THREE,)),
    ("gated_delta_rule", PACKED, (THREE,)),
    ("gsa", PACKED, (TWO,)),  # two states
]


# -- one call ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case", "cuts"), CASES)
def test_a_call_in_groups_has_the_bits_of_a_whole_one(name: str, case: Case, cuts: Any) -> None:
    call, op = make_call(name, case), operator(name, case)
    executor: Any = op.executor("triton")
    problem = bound(op, case, call, double=False)
    entry, grad_exit = random_states(problem, 1), random_states(problem, 2)
    gradient = torch.randn(problem.output_shape(), generator=torch.Generator().manual_seed(3))

    def run(groups: tuple[tuple[int, int], ...]) -> list[torch.Tensor]:
        opened = executor.open_forward(problem, problem.zero_state(), groups)
        expect(opened, entry, groups)
        done = executor.forward(problem, blank(entry), opened)
        opened = executor.open_backward(problem, done.saved, entry, gradient, groups)
        expect(opened, grad_exit, groups)
        grads = executor.backward(problem, done.saved, entry, gradient, blank(grad_exit), opened)
        found = [*grads.inputs.values(), *grads.params.values(), *grads.entry]
        return [done.output, *done.exit, *found]

    filled: list[torch.Tensor] = []

    def blank(states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        filled[:] = [torch.full_like(x, torch.nan) for x in states]
        return tuple(filled)

    def expect(opened: Any, states: Any, groups: tuple[tuple[int, int], ...]) -> None:
        """States arrive head by head, just in time."""

        def arrive(heads: tuple[int, int]) -> None:
            for target, source in zip(filled, states, strict=True):
                target.narrow(1, *heads).copy_(source.narrow(1, *heads))

        opened.proceed()
        opened.expect([lambda heads=heads: arrive(heads) for heads in groups])

    wanted = run(((0, 4),))
    for groups in cuts:
        found = run(groups)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_heads_of_a_group_are_told_before_the_next_one_is_computed() -> None:
    case = PACKED
    call, op = make_call("gla", case), operator("gla", case)
    executor: Any = op.executor("triton")
    problem = bound(op, case, call, double=False)
    whole = executor.open_forward(problem, problem.zero_state()).spans(2)[0].local
    opened = executor.open_forward(problem, problem.zero_state(), TWO)
    found = opened.spans(2)[0].local
    found[:, :, 2:] = torch.nan
    assert torch.equal(found[:, :, :2], whole[:, :, :2])
    assert found.data_ptr() == opened.spans(2)[0].local.data_ptr(), "no heads are copied"
    opened.summarise(1)
    assert torch.equal(found, whole)


# -- the order --------------------------------------------------------------------------------


def steps_of(name: str, direction: str) -> list[str]:
    """Loops and pauses of a plan of two groups, in order."""
    case = Case(40, value_heads=4, K=16, V=16, chunk_size=16, segment=1)
    call, op = make_call(name, case), operator(name, case)
    executor: Any = op.executor("triton")
    problem = bound(op, case, call, double=False)
    opened = executor.open_forward(problem, problem.zero_state(), TWO)
    if direction == "backward":
        done = executor.forward(problem, problem.zero_state(), opened)
        zero = problem.zero_state()
        opened = executor.open_backward(problem, done.saved, zero, done.output, TWO)
    found = []
    for step in opened.run.plan.steps:
        if isinstance(step, Pause):
            found.append(f"{step.at} {step.group}")
        elif isinstance(step, Launch):
            kind = step.function.__name__.removeprefix(f"{name}_")
            found.append(f"{kind} {step.grid[1]} heads")
    return found


@pytest.mark.parametrize(
    ("name", "direction", "loop", "summary"),
    [
        ("gla", "forward", "scan", ["summary"]),
        ("gated_delta_rule", "forward", "scan", ["map", "summary"]),
        ("gla", "backward", "reverse", ["reverse"]),
        ("gated_delta_rule", "backward", "reverse", ["reverse"]),
    ],
)
def test_order_of_a_plan(name: str, direction: str, loop: str, summary: list[str]) -> None:
    steps = steps_of(name, direction)
    first = [f"{kind} 2 heads" for kind in summary]
    start = steps.index("summary 0") - len(first)
    told = [*first, "summary 0", *first, "summary 1"]
    assert steps[start : start + len(told)] == told, steps
    enters = steps.index("entry 0")
    ahead = steps[start + len(told) : enters]
    assert all(step.endswith("4 heads") for step in ahead), ahead
    fold = ["fold_segments 2 heads"] if name == "gla" else []
    rest = ["entry 0", *fold, f"{loop} 2 heads", "entry 1", *fold, f"{loop} 2 heads"]
    assert steps[enters : enters + len(rest)] == rest, steps
    assert all(x.endswith("4 heads") for x in (*steps[:start], *steps[enters + len(rest) :]))


@contextmanager
def noted(log: list[str]) -> Iterator[None]:
    """Launches of loops, exchanges, and what waits for them, in the order of the host."""
    launch, begin, arrive = Launch.__call__, DeviceEngine.begin, Arriving.arrive

    def launched(step: Launch, frame: Any) -> None:
        name = step.function.__name__
        kind = name.split("_")[-1]
        if kind in ("summary", "scan", "reverse") and step.grid[1] < HEADS:  # else of a blank call
            log.append(f"{kind} {step.grid[1]}")
        launch(step, frame)

    def begun(engine: DeviceEngine, *args: Any, **keywords: Any) -> Any:
        log.append(f"exchange {keywords['heads']}")
        return begin(engine, *args, **keywords)

    def arrived(arriving: Any, group: int) -> None:
        log.append(f"arrives {group}")
        arrive(arriving, group)

    with (
        mock.patch.object(Launch, "__call__", launched),
        mock.patch.object(DeviceEngine, "begin", begun),
        mock.patch.object(Arriving, "arrive", arrived),
    ):
        yield


HEADS = 3
ORDERED = shards.Case(
    "gla",
    "chain",
    (20, 17),
    initial=False,
    final="none",
    executor="triton",
    heads=HEADS,
    groups=(1, 2),
)


def ordered(rank: int, size: int) -> tuple[list[str], Any]:
    log: list[str] = []
    with noted(log):
        values = shards.run_shard(ORDERED, rank, size)
    return log, values


def test_order_of_a_rank() -> None:
    ranks = run_ranks(ordered, 2, preload=shards.PRELOAD)
    assert max(shards.errors(ORDERED, [v for _, v in ranks]).values()) < shards.BOUND
    exchanges = ["exchange (0, 1)", "exchange (1, 2)"]

    def told(kind: str) -> list[str]:
        return [f"{kind} 1", exchanges[0], f"{kind} 2", exchanges[1]]

    def rest(kind: str) -> list[str]:
        return ["arrives 0", f"{kind} 1", "arrives 1", f"{kind} 2"]

    def early(kind: str) -> list[str]:
        """A rank that sends nothing does not let others wait for its second summary."""
        return [f"{kind} 1", *exchanges, f"{kind} 2"]

    first, last = (log for log, _ in ranks)
    assert last == [*early("summary"), *rest("scan"), *told("reverse"), "reverse 1", "reverse 2"]
    assert first == [*told("summary"), "scan 1", "scan 2", *early("reverse"), *rest("reverse")]


# -- ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param("simple_gla", "chain", marks=pytest.mark.long),
        ("gla", "all_gather"),
        ("gated_delta_rule", "chain"),
    ],
)
def test_virtual_ranks_in_groups_have_the_bits_of_one_group(name: str, strategy: str) -> None:
    call = make_inputs(
        get_variant(name), batch=1, tokens=96, heads=3, value_heads=3,
        sizes={"K": 16, "V": 16}, dtype=torch.float32,
    )  # fmt: skip
    seed = torch.randn(1, 96, 3, 16, generator=torch.Generator().manual_seed(1))

    def run(groups: int | tuple[int, ...]) -> list[torch.Tensor]:
        ranks = VirtualRanks(LinearAttentionOp(graphs_of(name), "triton", 16), call, 3, groups)
        ranks.executor.segment_chunks = 1
        exchanger: DeviceExchanger = ranks.exchanger(strategy, timeout=30.0)
        found = ranks.run(exchanger, seed)
        exchanger.check()
        return [found.output, *found.gradients.values()]

    wanted = run(1)
    for groups in ((2, 1), 3):
        assert all(torch.equal(a, b) for a, b in zip(run(groups), wanted, strict=True))


LENGTHS, DOCUMENTS = (21, 0, 16), (0, 5, 30, 37)
SHARDS = [
    shards.Case("gla", "chain", LENGTHS, batch=2, executor="triton", heads=3, segment=1),
    shards.Case("gated_delta_rule", "all_gather", LENGTHS, DOCUMENTS, executor="triton", heads=3),
    shards.Case("linear_attn_normalized", "chain", LENGTHS, DOCUMENTS, heads=3, final="broadcast"),
]


def shards_in_groups(rank: int, size: int) -> list[list[shards.Values]]:
    found = []
    for case in SHARDS:
        found.append([shards.run_shard(replace(case, groups=n), rank, size) for n in (1, (1, 2))])
    return found


def test_processes_in_groups_have_the_bits_of_one_group() -> None:
    ranks = run_ranks(shards_in_groups, 3, preload=shards.PRELOAD, timeout=200)
    for number, case in enumerate(SHARDS):
        for values in ranks:
            whole, *parts = values[number]
            for part in parts:
                assert part.keys() == whole.keys()
                for name, x in part.items():
                    assert torch.equal(x, whole[name]), (case, name)
        worst = shards.errors(case, [values[number][1] for values in ranks])
        assert max(worst.values()) < shards.BOUND, (case, worst)


def recomputed(rank: int, size: int) -> list[shards.Values]:
    """Gradients without and with activation recompute, of an operator in two groups of heads."""
    given = shards.whole_inputs(SHARDS[0], torch.float32)
    found = []
    for again in (False, True):
        op = SequenceParallelOp(
            shards.compiled("gla"),
            group=dist.group.WORLD,
            strategy="chain",
            backend="device",
            groups=(1, 2),
        )
        begun = []
        with sequence_context(dist.group.WORLD, lengths=LENGTHS):
            inputs = {
                name: shard_sequence(x.detach(), dist.group.WORLD).requires_grad_()
                for name, x in given.inputs.items()
            }

            def run(op: Any = op, inputs: Any = inputs) -> torch.Tensor:
                return op(**inputs, **given.scalars, executor="triton")[0]

            with noted(begun):
                output = checkpoint(run, use_reentrant=False) if again else run()
                output.square().sum().backward()
        grads = {name: x.grad for name, x in inputs.items()}
        assert sum(line.startswith("exchange") for line in begun) == 4, begun
        found.append({"output": output.detach(), **grads})
    return found


def test_recompute_does_not_exchange_again() -> None:
    for plain, again in run_ranks(recomputed, 3, preload=shards.PRELOAD):
        assert all(torch.equal(x, again[name]) for name, x in plain.items())
