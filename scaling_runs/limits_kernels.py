"""The launches of one call: their time on the GPU, and what the plan says that they move.

Contract: a launch is known by its kernel's name and by how often that name came before it in the
same call. Ours are found in the plan that `explain` counts from, launch by launch; a name that the
plan has another number of is left without counts. Kernels of other libraries have none.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flexla_dist.compiler.explain.costs import H200, Step
from flexla_dist.compiler.explain.triton_plan import triton_plan
from scaling_runs.bench import Shape
from scaling_runs.single_calls import our_call

HELPERS = ("fold_segments", "segment_products")  # kernels that bear no variant's name
COPIES = ("Memcpy", "Memset")  # of the copy engine or the driver, no kernels


@dataclass(frozen=True)
class Launch:
    """One launch of a call, and which of its name it is, from 0."""

    kernel: str
    at: int
    us: float


@dataclass(frozen=True)
class Counted:
    """What a launch, or a whole call, moves and computes, and which of the two takes longer on an
    H200 at its measured rates."""

    bytes: int
    flops: float
    bound: str = ""


def short_name(name: str) -> str:
    """The function's name alone: `void at::native::fill<4, ...>(...)` is `fill`."""
    if name.startswith(COPIES):
        return name.split(" (")[0].replace(" ", "_")
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain)[0].split("::")[-1].strip() or name


def launches_of(events: Sequence[tuple[float, float, str]], calls: int) -> list[Launch]:
    """Launches of a call from (start, microseconds, name) of several calls in a row: medians, in
    order. Where calls differ in what they launch, one entry a name, with the mean of a call."""
    ordered = sorted(events)
    each, rest = divmod(len(ordered), calls)
    names = [short_name(name) for _, _, name in ordered]
    if rest or any(names[i] != names[i % each] for i in range(len(names))):
        total: Counter[str] = Counter()
        for name, (_, us, _) in zip(names, ordered, strict=True):
            total[name] += us  # type: ignore[assignment]
        return [Launch(name, 0, us / calls) for name, us in total.items()]
    seen: Counter[str] = Counter()
    found = []
    for place in range(each):
        name = names[place]
        us = statistics.median(us for _, us, _ in ordered[place::each])
        found.append(Launch(name, seen[name], us))
        seen[name] += 1
    return found


def profile_call(call: Callable[[], object], calls: int) -> list[Launch]:
    """Launches of a call by PyTorch's profiler."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [
        (event.time_range.start, event.self_device_time_total, event.name)
        for event in profile.events()
        if event.device_type != torch.autograd.DeviceType.CPU and event.self_device_time_total > 0
    ]
    return launches_of(events, calls)


# -- what the plan counts -------------------------------------------------------------------------


def plan_steps(shape: Shape) -> tuple[list[Step], Counted]:
    """Steps of our plan for a call, in order, and the floor: inputs, output and gradients once,
    with the products that no plan can do without."""
    graphs, problem = our_call(shape)
    directions = triton_plan(graphs, problem).directions
    directions = directions if shape.direction == "fwdbwd" else directions[:1]
    steps = [step for direction in directions for step in direction.steps]
    floors = [direction.floor for direction in directions]
    moved = sum(floor.bytes_read + floor.bytes_written for floor in floors)
    return steps, Counted(moved, sum(floor.flops for floor in floors))


def counted_launches(variant: str, steps: Sequence[Step]) -> dict[tuple[str, int], Counted]:
    """Counts of our kernels by name and by which of its name a launch is."""
    seen: Counter[str] = Counter()
    found = {}
    for step in steps:
        if step.kind == "torch":
            continue
        name = step.name if step.name in HELPERS else f"{variant}_{step.name}"
        moved = step.bytes_read + step.bytes_written
        found[name, seen[name]] = Counted(moved, step.flops, step.bound(H200))
        seen[name] += 1
    return found


def matched(
    launches: Sequence[Launch], counted: dict[tuple[str, int], Counted]
) -> tuple[dict[tuple[str, int], Counted], str]:
    """Counts of those names that the plan launches as often as the call did, and what differs."""
    ran = Counter(launch.kernel for launch in launches)
    planned = Counter(name for name, _ in counted)
    wrong = sorted(name for name in planned if planned[name] != ran[name])
    said = ", ".join(f"{name} {ran[name]} not {planned[name]}" for name in wrong)
    kept = {key: value for key, value in counted.items() if key[0] not in wrong}
    return kept, f"launches that the plan does not have: {said}" if wrong else ""
