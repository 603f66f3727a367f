"""What a search compiles, and what became of a kernel's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexla_dist.bench.candidates import Subject
from flexla_dist.compiler.aot import CompiledInfo, CompileTask
from flexla_dist.compiler.aot_pool import Result
from flexla_dist.compiler.executor.choosing import Tuned
from flexla_dist.compiler.executor.launch import Launch
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.compiler.tuned.database import Measured

PROGRAMS = (1, 2, 3, 4)  # for each processor, that scans may be cut for


@dataclass(frozen=True)
class Provenance:
    """What is noted with every entry."""

    date: str
    commit: str
    gpu: str

    def measured(self, us: float, before: float) -> Measured:
        """Of one entry."""
        return Measured(round(us, 2), round(before, 2), self.date, self.commit, self.gpu)


@dataclass(frozen=True)
class Outcome:
    """The best candidate of a kernel (None: the present choice stays), microseconds of what it
    changes with it and before, and what became of every candidate."""

    best: Launch | None
    us: float
    before_us: float
    tried: tuple[tuple[Launch, str], ...]
    shared: int | None = None


def compile_tasks(
    graphs: Graphs, problem: Problem, base: Tuned, found: Sequence[Subject]
) -> list[CompileTask]:
    """What to compile: for each kernel the call with every candidate."""
    return [
        CompileTask(
            graphs,
            problem,
            (subject.direction,),
            tuned=tuple(replace(base, forced={subject.name: c}) for c in subject.candidates),
        )
        for subject in found
    ]


def segment_task(
    graphs: Graphs, problem: Problem, base: Tuned, directions: Sequence[str]
) -> CompileTask:
    """What to compile to try other segments: whole scans and cut ones are other kernels."""
    tuned = tuple(replace(base, programs=programs) for programs in PROGRAMS)
    return CompileTask(graphs, problem, tuple(directions), tuned=tuned)


def info_of(subject: Subject, launch: Launch, compiled: Sequence[Result]) -> CompiledInfo | None:
    """What a candidate was compiled to; of several binaries the one with most shared memory."""
    infos = [
        x
        for x in compiled
        if isinstance(x, CompiledInfo)
        and x.kernel == subject.emitted.name
        and (x.warps, x.stages, x.limit) == (launch.num_warps, launch.num_stages, launch.registers)
        and launch.column_tile >= x.tiles.get(f"tile_{subject.column}", launch.column_tile)
    ]
    return max(infos, key=lambda x: x.shared_bytes, default=None)


def line_of(subject: Subject, outcome: Outcome) -> str:
    """One line for people."""
    what = f"{subject.emitted.name} ({subject.direction}): {len(outcome.tried)} tried"
    if outcome.best is None:
        return f"{what}, {outcome.before_us:.1f} us stay"
    gain = 1 - outcome.us / outcome.before_us
    return f"{what}, {outcome.before_us:.1f} -> {outcome.us:.1f} us ({gain:.0%}) {outcome.best}"
