"""Peak memory of the torch executor: a few times the inputs, whatever the length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexla_dist.testing.inputs import CallInputs, make_inputs

from .compiled import DISTINCT, SPECS, call_op, op_of

PROMISED = 12  # times the inputs
TOKENS = 8192
QUICK = ("simple_gla", "kda", "gsa")
SIZES = {"K": 64, "V": 64, "D": 64, "M": 64}


def allocated(run: Callable[[], Any]) -> tuple[int, int]:
    """Most bytes that `run` held at once, and the largest block among them."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak, largest = max(peak, held), max(largest, event.nbytes())
    return peak, largest


def call_of(name: str, tokens: int) -> tuple[CallInputs, int]:
    call = make_inputs(
        SPECS[name],
        batch=1,
        tokens=tokens,
        heads=4,
        value_heads=4,
        sizes=SIZES,
        dtype=torch.float32,
    )
    return call, sum(x.nbytes for x in call.inputs.values())


def forward(name: str, call: CallInputs) -> None:
    with torch.no_grad():
        call_op(op_of(name), call)


def forward_and_backward(name: str, call: CallInputs) -> None:
    output, _ = call_op(op_of(name), call)
    leaves = list(call.leaves().values())
    torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)


def test_the_measure_sees_what_is_held_at_once() -> None:
    def run() -> None:
        a = torch.zeros(1 << 20)
        b = a + 1
        del a
        torch.zeros(1 << 19).add_(b[: 1 << 19])

    peak, largest = allocated(run)
    assert peak == pytest.approx(8 << 20, rel=1e-4) and largest == 4 << 20


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in DISTINCT]
)
def test_peak_memory(name: str) -> None:
    """No [T, T] (11 times these inputs), no matrix state per token (23 times)."""
    call, size = call_of(name, TOKENS)
    for run in (forward, forward_and_backward):
        run(name, call)  # programs are made at the first call
        peak, largest = allocated(lambda run=run: run(name, call))  # type: ignore[misc]
        assert peak <= PROMISED * size, (run.__name__, peak / size)
        assert largest <= 0.6 * size, (run.__name__, largest / size)


def test_what_is_needed_beside_inputs_and_gradients_does_not_grow() -> None:
    """Twice the tokens add output, gradients and little else."""
    peaks = []
    for tokens in (TOKENS // 2, TOKENS):
        call, size = call_of("gated_delta_rule", tokens)
        forward_and_backward("gated_delta_rule", call)
        peaks.append(allocated(lambda call=call: forward_and_backward("gated_delta_rule", call))[0])  # type: ignore[misc]
    assert peaks[1] - peaks[0] <= 2.5 * size / 2
