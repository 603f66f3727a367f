"""Times of the steps of a launch plan, each in its place within the whole call.

Contract: events around every kernel and every PyTorch operation; the device is kept busy first, so
that it never waits for the host between two events. What a kernel finds in caches is what the step
before it left there, as in a real call.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexla_dist.compiler.executor.triton_run import Change, Compute, Frame, Launch, Plan, Run
from flexla_dist.ops.autograd import full_precision

Mark = Callable[[], None]
BUSY_CYCLES = 2_000_000  # about a millisecond, in which the host runs ahead
WARM = 2


@dataclass(frozen=True)
class StepTime:
    """A kernel or PyTorch operation: what tells it from others, and microseconds."""

    signature: tuple[Any, ...]
    name: str
    us: float


def time_plan(
    plan: Plan, tensors: Sequence[Tensor], call: Any, runs: int
) -> tuple[list[StepTime], list[Tensor]]:
    """Median times of the steps that do work, and the results of the last run.

    call: has the problem of the plan (`BenchCall`). Raises what a launch raises.
    """
    problem = call.problem
    steps = [step for step in plan.steps if isinstance(step, Launch | Compute | Change)]
    every: list[list[float]] = []
    with full_precision(problem.device), torch.no_grad():
        for number in range(WARM + runs):
            run = Run(plan, tensors, problem.scalars, problem.device)
            found = _one_run(plan, run.frame, problem.device)
            if number >= WARM:
                every.append(found)
    results = [run.frame.slots[slot] for slot in plan.results]
    medians = [1e3 * statistics.median(times) for times in zip(*every, strict=True)]
    named = zip(steps, medians, strict=True)
    return [StepTime(_signature(step), _name(step), us) for step, us in named], results


def _one_run(plan: Plan, frame: Frame, device: torch.device) -> list[float]:
    """Milliseconds of each step that does work."""
    marks: list[tuple[Any, Any]] = []
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda._sleep(BUSY_CYCLES)
    for step in plan.steps:
        if not isinstance(step, Launch | Compute | Change):
            step(frame)
            continue
        begin = _mark(cuda)
        step(frame)
        marks.append((begin, _mark(cuda)))
    if cuda:
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) for begin, end in marks]
    return [1e3 * (end - begin) for begin, end in marks]


def _mark(cuda: bool) -> Any:
    if not cuda:  # the interpreter
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _signature(step: Launch | Compute | Change) -> tuple[Any, ...]:
    """Equal for steps that do the same work."""
    if isinstance(step, Launch):
        return (*step.key, step.grid)
    function: Any = step.function
    if isinstance(function, partial):
        function = function.func
    places = step.sources if isinstance(step, Compute) else step.places
    return (function.__name__, *(place.shape for place in places))


def _name(step: Launch | Compute | Change) -> str:
    if isinstance(step, Launch):
        return str(getattr(step.function, "__name__", "kernel"))
    function: Any = step.function
    return f"torch {getattr(function, 'func', function).__name__}"


def changed(before: Sequence[StepTime], after: Sequence[StepTime]) -> tuple[float, float]:
    """Microseconds before and after, of the steps that are not the same in both."""
    return _apart(before, after), _apart(after, before)


def _apart(mine: Sequence[StepTime], theirs: Sequence[StepTime]) -> float:
    known = Counter(step.signature for step in theirs)
    total = 0.0
    for step in mine:
        if known[step.signature]:
            known[step.signature] -= 1
        else:
            total += step.us
    return total


def total(steps: Sequence[StepTime]) -> float:
    """Microseconds of all steps."""
    return sum(step.us for step in steps)
