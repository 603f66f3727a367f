"""Configurations that are worth a try for a kernel, without compiling any.

Contract: the present choice is first. `near` changes it by one step in tile and warps together,
then in stages, then in registers; `wide` is the whole grid. What certainly does not fit shared
memory or registers is left out, see `resources`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from flexla_dist.compiler.aot import SHARED_LIMITS
from flexla_dist.compiler.emit.kernel import Emitted
from flexla_dist.compiler.executor.choosing import Choice, buckets_of, fixed_tile, kernel_key
from flexla_dist.compiler.executor.launch import (
    MAX_TILE,
    MIN_TILE,
    Launch,
    power_of_two,
)
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.resources import (
    MOST_REGISTERS,
    least_registers,
    least_shared,
)
from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor
from flexla_dist.compiler.kernels import Kernel, Schedule
from flexla_dist.compiler.tuned.database import Key

GRIDS = ("near", "wide")
MOST_WARPS = 8
MOST_STAGES = 4
REGISTERS = {1: (), 2: (128, 168), 4: (96, 128, 168), 8: (96, 128)}  # by warps


@dataclass(frozen=True, eq=False)
class Subject:
    """A kernel to tune: what it is found by, its present choice, and what to try, that first."""

    direction: str
    kernel: Kernel
    emitted: Emitted
    key: Key
    current: Choice
    candidates: tuple[Launch, ...]
    column: str  # the dim that is tiled

    @property
    def name(self) -> tuple[str, str]:
        """Direction and name, as `Tuned.forced` has it."""
        return self.direction, self.kernel.name


def subjects(
    executor: TritonExecutor, problem: Problem, directions: Iterable[str], grid: str, arch: str
) -> list[Subject]:
    """The kernels of a call, each structure once.

    Without the `decays`, `map` and `summary` kernels where no document is cut: they do not run.
    """
    out: list[Subject] = []
    limit = SHARED_LIMITS.get(int(arch.removeprefix("sm_")) if arch.startswith("sm_") else arch)
    buckets, cut = buckets_of(problem), executor.cutting(problem) is not None
    for direction in directions:
        schedule = executor.forward_schedule
        if direction == "backward":
            schedule = executor.backward_schedule
        column = schedule.column
        choices = executor.configurations(problem, direction)
        for built in executor.built(direction, executor.uneven_dims(problem)):
            kernel = built.kernel
            if kernel.kind in ("decays", "map", "summary") and not cut:
                continue
            key = kernel_key(problem, kernel, built.emitted, buckets)
            if all(key != other.key for other in out):
                choice = choices[kernel.name]
                found = tuple(candidates(problem, schedule, built, choice.launch, grid, limit))
                out.append(Subject(direction, kernel, built.emitted, key, choice, found, column))
    return out


def candidates(
    problem: Problem,
    schedule: Schedule,
    built: Built,
    current: Launch,
    grid: str,
    limit: int | None,
) -> Iterator[Launch]:
    """The present choice, then others of the grid that may fit."""
    kernel = built.kernel
    tiles = _tiles(problem, schedule, kernel, current)
    looped = "STAGES" in built.emitted.constants
    found = _near(current, tiles, looped) if grid == "near" else _wide(tiles, current, looped)
    seen = {current}
    yield current
    for launch in found:
        if launch not in seen and _may_fit(problem, schedule, kernel, launch, current, limit):
            seen.add(launch)
            yield launch


def _tiles(
    problem: Problem, schedule: Schedule, kernel: Kernel, current: Launch
) -> tuple[int, ...]:
    """Column tiles that a kernel may have."""
    column = schedule.column
    nodes = (*kernel.loads, *kernel.body, *kernel.carried)
    columns = any(column in node.meta.get("dims", ()) for node in nodes)
    if fixed_tile(schedule, kernel) or not columns:
        return (current.column_tile,)
    widest = min(power_of_two(problem.size(column)), MAX_TILE)
    sizes = []
    size = MIN_TILE
    while size <= widest:
        sizes.append(size)
        size *= 2
    return tuple(sizes)


def _near(current: Launch, tiles: tuple[int, ...], looped: bool) -> Iterator[Launch]:
    t, w, s = current.column_tile, current.num_warps, current.num_stages
    around = [tile for tile in (t, t // 2, 2 * t) if tile in tiles]
    for tile in around:
        for warps in (w, 2 * w, w // 2):
            if 1 <= warps <= MOST_WARPS:
                yield replace(current, column_tile=tile, num_warps=warps)
    if looped:
        for tile in around:
            for stages in (s + 1, s - 1):
                if 1 <= stages <= MOST_STAGES:
                    yield replace(current, column_tile=tile, num_stages=stages)
    for registers in (None, *REGISTERS.get(w, ())):
        yield replace(current, registers=registers)


def _wide(tiles: tuple[int, ...], current: Launch, looped: bool) -> Iterator[Launch]:
    depths = range(1, MOST_STAGES + 1) if looped else (current.num_stages,)
    for tile in tiles:
        for warps in (1, 2, 4, 8):
            for stages in depths:
                for registers in (None, *REGISTERS[warps]):
                    yield Launch(tile, warps, stages, registers)


def _may_fit(
    problem: Problem,
    schedule: Schedule,
    kernel: Kernel,
    launch: Launch,
    current: Launch,
    limit: int | None,
) -> bool:
    """Whether a configuration may fit; registers count unless the present one spills as well."""
    if limit is not None and least_shared(problem, schedule, kernel, launch) > limit:
        return False
    needed = least_registers(problem, schedule, kernel, launch)
    allowed = launch.registers or MOST_REGISTERS
    return needed <= max(allowed, least_registers(problem, schedule, kernel, current))
