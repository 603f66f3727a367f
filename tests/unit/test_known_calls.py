"""Repeated calls take the short way, and only they: launches are doubles."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from torch.autograd import forward_ad

from flexla_dist.compiler.executor.straight import PATIENCE
from flexla_dist.errors import ArgumentError, ArgumentTypeError, DoubleBackwardError
from flexla_dist.ops.known_calls import KnownCall, KnownCalls, key_of
from scaling_runs import host_time

from .launch_doubles import OneCall, replace_launches

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing directly"
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_launches(monkeypatch)


def warm(name: str = "simple_gla", tokens: int = 64) -> tuple[OneCall, KnownCall]:
    """A call that runs as straight code from now on, and what is known of it."""
    call = OneCall(name, tokens)
    for _ in range(PATIENCE):
        call.both()
    return call, known(call)


def known(call: OneCall) -> KnownCall:
    (found,) = call.op.known_calls._calls.values()
    return found


def counts(call: OneCall, run: Callable[[], Any]) -> tuple[int, int, int]:
    """What a call adds: repeated, straight and ordinary calls."""
    calls = call.op.known_calls

    def now() -> tuple[int, int, int]:
        found = list(calls._calls.values())
        straight = sum(x.straight_calls for x in found)
        return calls.repeated, straight, sum(x.ordinary_calls for x in found)

    before = now()
    run()
    return tuple(b - a for a, b in zip(before, now(), strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "mamba2"])
def test_a_repeated_call_takes_the_short_way(name: str, tokens: int) -> None:
    call = OneCall(name, tokens)
    assert counts(call, call.both) == (1, 0, 2)  # made once before
    for _ in range(PATIENCE - 1):
        call.both()
    assert counts(call, call.both) == (1, 2, 0)
    assert counts(call, call.forward) == (1, 1, 0)
    found = call.both()
    assert [x.shape for x in found] == [x.shape for x in call.leaves]
    assert [x.dtype for x in found] == [x.dtype for x in call.leaves]


def test_results_are_tensors_of_their_own() -> None:
    call, _ = warm()
    one, two = call.forward(), call.forward()
    assert one.data_ptr() != two.data_ptr() and not one._is_view()
    one.add_(1.0)  # no view that autograd would refuse to write to
    assert one.grad_fn is not None


def test_gradients_are_wanted_or_not_from_call_to_call() -> None:
    call, _ = warm()
    with torch.no_grad():
        assert not call.forward().requires_grad
    given = call.arguments
    call.arguments = {n: x.detach() if isinstance(x, Tensor) else x for n, x in given.items()}
    assert counts(call, call.forward) == (1, 1, 0)
    assert not call.forward().requires_grad
    call.arguments["v"] = given["v"]
    output = call.forward()
    assert output.requires_grad
    (found,) = torch.autograd.grad(output, given["v"], call.seed)
    assert found.shape == given["v"].shape
    with torch.inference_mode():
        assert call.forward().is_inference()


def test_other_strides_are_looked_at() -> None:
    call, _ = warm()
    q = call.arguments["q"]
    turned = q.detach().transpose(1, 3).contiguous().transpose(1, 3)
    call.arguments["q"] = turned
    plan = call.executor.plan_of("forward")
    assert counts(call, call.forward) == (1, 1, 0)
    pointers = {x for step in plan.launches for x in step.again.arguments}  # type: ignore[union-attr]
    assert turned.data_ptr() not in pointers  # a contiguous copy instead


def test_pointers_that_16_does_not_divide_take_the_ordinary_way() -> None:
    call, _ = warm()
    q = call.arguments["q"]
    aligned = call.arguments["q"]
    call.arguments["q"] = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert counts(call, call.forward) == (1, 0, 1)
    call.arguments["q"] = aligned
    output = call.forward()
    seed = torch.ones(output.numel() + 1, dtype=output.dtype)[1:].view(output.shape)

    def backward() -> None:
        torch.autograd.grad(output, call.leaves, seed, allow_unused=True)

    assert counts(call, backward) == (0, 0, 1)


def test_what_listens_to_launches_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = warm()
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    assert counts(call, call.both) == (1, 0, 2)


def test_another_shape_dtype_or_packing_is_another_call() -> None:
    call, _ = warm()
    calls = call.op.known_calls
    given = dict(call.arguments)
    changes: list[Callable[[], Any]] = [
        lambda: {n: x.float() if isinstance(x, Tensor) else x for n, x in given.items()},
        lambda: {n: x[:, :32] if isinstance(x, Tensor) else x for n, x in given.items()},
        lambda: {**given, "cu_seqlens": [0, 30, 64]},
        lambda: {**given, "cu_seqlens": torch.tensor([0, 31, 64])},
        lambda: {**given, "executor": "triton"},
        lambda: {**given, "scale": 1},
        lambda: dict(reversed(given.items())),
    ]
    for count, change in enumerate(changes, 2):
        call.arguments = change()
        assert counts(call, call.forward)[:2] == (0, 0)
        assert len(calls) == count
        assert counts(call, call.forward)[0] == 1


def test_scalars_are_those_of_the_call() -> None:
    call, _ = warm()
    launches = call.executor.plan_of("forward").launches

    def handed() -> set[Any]:
        return {x for s in launches for x in s.again.arguments if type(x) is float}  # type: ignore[union-attr]

    for number in (0.25, 0.75):
        call.arguments["scale"] = number
        assert counts(call, call.both) == (1, 2, 0)
        assert handed() == {number}


def test_initial_states_are_checked_and_differentiable() -> None:
    call, _ = warm()
    state = torch.zeros(1, 4, 32, 32, requires_grad=True)
    call.arguments["initial_state"] = state
    assert counts(call, call.forward) == (1, 1, 0)
    (found,) = torch.autograd.grad(call.forward(), state, call.seed)
    assert found.shape == state.shape
    call.arguments["initial_state"] = state[:, :3]
    with pytest.raises(ArgumentError, match="initial state 'S' has shape"):
        call.forward()


def test_errors_are_those_of_a_first_call() -> None:
    call, _ = warm()
    given = dict(call.arguments)
    wrong: dict[str, tuple[Any, str]] = {
        "k": (given["k"][:, :10], "input 'k' has .B, T. = "),
        "v": (None, "input 'v' is missing"),
        "g": (1.0, "input 'g' is float"),
        "scale": (True, "scalar 'scale' is bool"),
        "cu_seqlens": ([0, 3], "cu_seqlens = .0, 3.; expected non-decreasing"),
        "unknown": (given["k"], "unexpected argument 'unknown'"),
    }
    for name, (value, message) in wrong.items():
        call.arguments = {**given, name: value}
        for _ in range(2):
            with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
                call.forward()
    call.arguments = given
    assert counts(call, call.both) == (1, 2, 0)


def test_saved_tensors_that_were_written_to_are_an_error() -> None:
    call, _ = warm()
    output = call.forward()
    with torch.no_grad():
        call.arguments["v"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output, call.leaves, call.seed)


def test_second_derivatives_are_refused() -> None:
    call, _ = warm()
    output = call.forward()
    v = call.arguments["v"]
    (first,) = torch.autograd.grad(output, v, call.seed, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="simple_gla: a second derivative"):
        torch.autograd.grad(first.sum(), v)


def test_missing_gradients_are_zeros() -> None:
    call, found = warm()
    before = found.straight_calls
    _, state = call.op(**call.arguments, output_final_state=True)
    assert isinstance(state, Tensor)
    torch.autograd.grad(state.sum(), call.leaves, allow_unused=True)
    assert found.straight_calls == before + 2


def test_transforms_take_the_ordinary_way() -> None:
    call, _ = warm()
    v = call.arguments["v"].detach()
    leaked: list[Tensor] = []

    def loss(v: Tensor) -> Tensor:
        leaked.append(v)
        return call.op(**{**call.arguments, "v": v})[0].sum()

    assert counts(call, lambda: torch.func.grad(loss)(v)) == (0, 0, 0)
    call.arguments["v"] = leaked[0]  # wraps a tensor of a transform that is over
    assert counts(call, call.forward) == (1, 1, 0)
    with forward_ad.dual_level():
        assert key_of(call.arguments, None, None) is None


def test_subclasses_take_the_ordinary_way() -> None:
    class Marked(Tensor):
        pass

    call, _ = warm()
    marked = call.arguments["v"].detach().as_subclass(Marked)
    assert key_of({"v": marked}, None, None) is None
    parameter = torch.nn.Parameter(call.arguments["v"].detach())
    assert key_of({"v": parameter}, None, None) == key_of({"v": parameter.data}, None, None)


def test_plans_that_are_chosen_otherwise_are_made_anew() -> None:
    call, _ = warm("simple_gla", 4096)
    call.executor.segment_chunks = 4
    assert counts(call, call.forward)[0] == 0
    assert counts(call, call.forward)[0] == 1


def test_last_plan_is_that_of_the_last_call() -> None:
    call, _ = warm()
    first = call.op.last_plan
    call.arguments["cu_seqlens"] = [0, 16, 64]
    call.forward()
    assert call.op.last_plan is not None and call.op.last_plan.num_sequences == 2
    del call.arguments["cu_seqlens"]
    assert counts(call, call.forward) == (1, 1, 0)
    assert call.op.last_plan == first


def test_the_backward_plan_is_noted_whichever_way_backward_runs() -> None:
    call, _ = warm()
    plan = call.op.last_backward_plan
    assert plan is not None and (plan.executor, plan.kernels) == ("triton", "unfused")
    call.op.ran.backward = None
    call.both()
    assert call.op.last_backward_plan == plan


def test_the_calls_used_last_are_kept() -> None:
    call = OneCall("simple_gla", 64)
    calls = call.op.known_calls = KnownCalls(most=2)
    short = {n: x[:, :48] if isinstance(x, Tensor) else x for n, x in call.arguments.items()}
    for arguments in (call.arguments, short, call.arguments, {**short, "cu_seqlens": [0, 48]}):
        call.op(**arguments)
        assert len(calls) <= 2
    assert counts(call, call.forward)[0] == 1  # used after `short`
    assert counts(call, lambda: call.op(**short))[0] == 0


def test_calls_without_tokens_are_not_kept() -> None:
    call = OneCall("simple_gla", 64)
    empty = {n: x[:, :0] if isinstance(x, Tensor) else x for n, x in call.arguments.items()}
    for _ in range(2):
        assert call.op(**empty)[0].shape[1] == 0
    assert len(call.op.known_calls) == 1


def test_code_reads_as_the_plan() -> None:
    call, found = warm("gla", 4096)
    call.both()
    for direction in ("forward", "backward"):
        plan, code = call.executor.plan_of(direction), found._code[direction]
        assert plan.code is code
        lines = code.source.splitlines()
        assert sum("stream" in line for line in lines) == 1 + len(plan.launches)
        assert sum("memory.empty" in line for line in lines) <= len(plan.results) + 6


def test_where_the_time_goes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 1)
    monkeypatch.setattr(host_time, "CALLS", 1)
    call = OneCall("gla", 4096)
    found = host_time.measure(call.op, call.arguments, call.seed)
    assert set(found) == set(host_time.COLUMNS) - {"variant", "T"}
    launches = call.executor.plan_of("forward").launches
    assert str(found["fwd launches"]).endswith(f" ({len(launches)})")


def test_compiled_graphs_run_straight_code_too() -> None:
    """An executor takes the code of a plan whoever calls it; ops of `torch.library` do."""
    call = OneCall("gla", 4096)
    names = (*call.op.spec.inputs, *call.op.spec.params)
    tensors, scalars = [call.arguments[n] for n in names], [1.0]

    def step() -> None:
        found = torch.ops.flexla_dist.attention(call.op.key, tensors, [], scalars, None, "triton")
        torch.autograd.grad(found[0], tensors, call.seed)

    for _ in range(PATIENCE + 1):
        step()
    for direction in ("forward", "backward"):
        plan = call.executor.plan_of(direction)
        assert plan.code is not None and plan.runs == PATIENCE
        before = [launch.again.launches for launch in plan.launches]  # type: ignore[union-attr]
        step()
        after = [launch.again.launches for launch in plan.launches]  # type: ignore[union-attr]
        assert after == [1 + count for count in before] and plan.runs == PATIENCE
