"""A call that stops where states cross ranks: what it tells, and that it ends like one that does
not stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap
from flexla_dist.compiler.executor.planning import Planner
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.triton_run import Launch, Pause
from flexla_dist.errors import ExecutorError
from flexla_dist.ops.op import LinearAttentionOp

from .test_triton_executor import Case, graphs_of, make_call, operator

NAMES = ("linear_attn", "simple_gla", "gla", "gated_delta_rule", "hgrn", "gsa")
CASES = {
    "rows": Case(20, batch=2, K=16, V=24, chunk_size=16),
    "segments of rows": Case(80, batch=2, K=20, V=24, chunk_size=16, segment=2),
    "packed": Case(60, documents=(0, 5, 5, 40, 60), chunk_size=16, segment=1),
}


def bound(op: LinearAttentionOp, case: Case, call: Any, double: bool) -> Problem:
    """The call's problem, in float64 for the batched executor."""

    def convert(x: Tensor) -> Tensor:
        return x.detach().double() if double else x.detach()

    inputs = {name: convert(x) for name, x in call.inputs.items()}
    params = {name: convert(x) for name, x in call.params.items()}
    documents = torch.tensor(case.documents) if case.documents else None
    return op.bind(inputs, params, call.scalars, documents)


def random_states(problem: Problem, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(s.shape, generator=generator, dtype=torch.float64).to(s.dtype)
        for s in problem.zero_state()
    )


def close(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want.double()).square().mean().sqrt()
    assert error <= 1e-5 * want.double().square().mean().sqrt().clamp(min=1e-3)


def same_map(got: SpanMap, want: SpanMap) -> None:
    for mine, exact in zip(got.states, want.states, strict=True):
        close(mine.local, exact.local)
        for a, b in ((mine.decay, exact.decay), (mine.matrix, exact.matrix)):
            if a is not None and b is not None:
                close(a.expand(b.shape), b)
            elif a is not None:  # of an empty document the batched executor says nothing
                assert (a == 1).all()
            else:
                assert b is None


def sequences(problem: Problem) -> list[int]:
    return list(range(problem.num_sequences)) if problem.layout.packed else [-1]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", NAMES)
def test_stopped_and_completed(name: str, case: Case) -> None:
    call = make_call(name, case)
    op = operator(name, case)
    executor: Any = op.executor("triton")
    batched: Any = LinearAttentionOp(graphs_of(name), "torch", case.chunk_size).executor("torch")
    problem, exact = bound(op, case, call, double=False), bound(op, case, call, double=True)
    entry, grad_exit = random_states(problem, 1), random_states(problem, 2)
    wide = tuple(x.double() for x in entry)

    opened = executor.open_forward(problem, problem.zero_state())
    for sequence in sequences(problem):
        same_map(opened.summary(sequence), batched.summary(exact, sequence))
        local = opened.spans(sequence)[0].local
        assert local.shape[1] == (problem.batch if sequence < 0 else 1)
    opened.proceed()
    done = executor.forward(problem, entry, opened)
    plain = executor.forward(problem, entry)
    for got, want in zip((done.output, *done.exit), (plain.output, *plain.exit), strict=True):
        close(got, want)

    gradient = torch.randn(plain.output.shape, generator=torch.Generator().manual_seed(3))
    opened = executor.open_backward(problem, done.saved, entry, gradient)
    saved = batched.forward(exact, wide).saved
    for sequence in sequences(problem):
        want_map = batched.adjoint_summary(exact, saved, wide, gradient.double(), sequence)
        same_map(opened.summary(sequence), want_map)
    opened.proceed()
    grads = executor.backward(problem, done.saved, entry, gradient, grad_exit, opened)
    want_grads = executor.backward(problem, plain.saved, entry, gradient, grad_exit)
    for key, want in {**want_grads.inputs, **want_grads.params}.items():
        close({**grads.inputs, **grads.params}[key], want)
    for got, want in zip(grads.entry, want_grads.entry, strict=True):
        close(got, want)


def kernels_by_pause(steps: Sequence[Any]) -> dict[str, list[str]]:
    """Names of the kernels that are launched before the pauses of each name, and at the end."""
    found: dict[str, list[str]] = {}
    here: list[str] = []
    for step in steps:
        if isinstance(step, Launch):
            here.append(step.function.__name__)
        elif isinstance(step, Pause):
            found.setdefault(step.at, []).extend(here)
            here = []
    return {**found, "end": here}


@pytest.mark.parametrize("groups", [(), ((0, 1), (1, 1))], ids=["at once", "groups"])
@pytest.mark.parametrize("name", ["linear_attn_normalized", "simple_gla", "gated_delta_rule"])
def test_the_exchange_of_backward_does_not_wait_for_states(
    name: str, groups: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What brings states back runs beside the exchange, unless what is exchanged needs them; the
    results have the bits of kernels in the order of the schedule."""
    case = Case(80, batch=2, K=16, V=16, chunk_size=16, segment=2)
    call = make_call(name, case)

    def results() -> tuple[dict[str, list[str]], list[Tensor]]:
        op = operator(name, case)
        executor: Any = op.executor("triton")
        problem = bound(op, case, call, double=False)
        entry, grad_exit = random_states(problem, 1), random_states(problem, 2)
        opened = executor.open_forward(problem, problem.zero_state(), groups)
        done = executor.forward(problem, entry, opened)
        gradient = torch.randn(done.output.shape, generator=torch.Generator().manual_seed(3))
        opened = executor.open_backward(problem, done.saved, entry, gradient, groups)
        found = executor.backward(problem, done.saved, entry, gradient, grad_exit, opened)
        tensors = [*found.inputs.values(), *found.params.values(), *found.entry]
        return kernels_by_pause(opened.run.plan.steps), tensors

    order, got = results()
    scan, needed = f"{name}_scan", name == "linear_attn_normalized"
    assert (scan in order["summary"]) == needed and (scan in order["entry"]) != needed
    monkeypatch.setattr(Planner, "_in_order", lambda self, kernels: list(kernels))
    before, want = results()
    assert scan in before["summary"]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_entry_is_not_read_before_it_is_needed() -> None:
    """An opened call may be given NaN where states enter, as long as they come later."""
    case = CASES["segments of rows"]
    call, op = make_call("gla", case), operator("gla", case)
    executor: Any = op.executor("triton")
    problem = bound(op, case, call, double=False)
    entry = random_states(problem, 1)
    nothing = tuple(torch.full_like(x, torch.nan) for x in entry)
    opened = executor.open_forward(problem, nothing)
    assert not any(x.local.isnan().any() for x in opened.spans(-1))
    opened.proceed()
    done = executor.forward(problem, entry, opened)
    assert torch.equal(done.output, executor.forward(problem, entry).output)


def test_a_call_without_rows_or_tokens_is_refused() -> None:
    case = Case(20, batch=2, chunk_size=16)
    op = operator("gla", case)
    executor: Any = op.executor("triton")
    inputs = {name: x.detach() for name, x in make_call("gla", case).inputs.items()}
    for cut in (lambda x: x[:0], lambda x: x[:, :0]):
        problem = op.bind({n: cut(x) for n, x in inputs.items()}, {}, {"scale": 1.0}, None)
        with pytest.raises(ExecutorError, match="at least one row and one token"):
            executor.open_forward(problem, problem.zero_state())


def test_gradients_of_values_without_columns() -> None:
    case = Case(20, K=16, V=0, chunk_size=16)
    call, op = make_call("gla", case), operator("gla", case)
    output, _ = op(**call.inputs, **call.params, **call.scalars)
    assert output.shape[-1] == 0
    for x, grad in zip(
        call.inputs.values(),
        torch.autograd.grad(output.sum(), list(call.inputs.values())),
        strict=True,
    ):
        assert grad.shape == x.shape and not grad.any()
