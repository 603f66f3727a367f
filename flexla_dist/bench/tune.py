"""Searches the configuration of every kernel of a call, one kernel after the other.

Contract: a candidate runs in place of the present choice, all other kernels unchanged, in the call
with its real tensors. What counts is the time of the steps that are then different: the kernel's
own launches, and those of kernels that read another number of partial sums. A candidate's results
are compared with those of the estimates. An entry is written only where a second measurement
confirms a gain above noise. State is written after each kernel, so that a stopped search goes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flexla_dist.bench.calls import BenchCall
from flexla_dist.bench.candidates import Subject
from flexla_dist.bench.outcomes import PROGRAMS, Outcome, Provenance, info_of, line_of
from flexla_dist.bench.search_state import SearchState
from flexla_dist.bench.timing import StepTime, changed, time_plan, total
from flexla_dist.compiler.aot_pool import CompilePool, Result
from flexla_dist.compiler.executor.choosing import Tuned, arch_of, shared_limit
from flexla_dist.compiler.executor.launch import Launch, interpreting
from flexla_dist.compiler.tuned.database import (
    Database,
    KernelEntry,
    ScanEntry,
    write,
)
from flexla_dist.errors import TuningError
from flexla_dist.testing.budget import SHARDED, measure

NOISE = 0.03  # a smaller gain is none
CONFIRMATIONS = 3
Say = Callable[[str], None]


class Tuner:
    """Tunes the kernels of one call and writes what it finds to a database."""

    def __init__(
        self,
        call: BenchCall,
        file: Path,
        database: Database,
        provenance: Provenance,
        *,
        runs: int = 10,
        say: Say = print,
    ):
        self.call, self.executor = call, call.executor
        self.arch = arch_of(call.problem.device)
        # Candidates and what they are compared with must not see entries of one another.
        self.base = self.executor.tuned = self.executor.tuned.fixed(self.arch)
        self.file, self.database, self.provenance = file, database, provenance
        self.runs, self.say = runs, say
        self._wanted: dict[str, list[Tensor]] = {}
        self.written: list[KernelEntry | ScanEntry] = []

    # -- the search ---------------------------------------------------------------------------

    def run(
        self,
        found: Sequence[Subject],
        state: SearchState,
        pool: CompilePool | None,
        seconds: float | None = None,
    ) -> int:
        """Tune kernels that the state does not know; returns how many are left.

        pool: compiles `compile_tasks` of all of them; None compiles as they are launched.
        """
        begin = time.perf_counter()
        for at, subject in enumerate(found):
            if state.knows(subject.key):
                continue
            if seconds is not None and time.perf_counter() - begin > seconds:
                return sum(not state.knows(s.key) for s in found[at:])
            compiled = pool.wait(at) if pool is not None else []
            try:
                outcome = self.tune(subject, compiled)
            except Exception as error:  # the device is lost: the next run leaves this kernel out
                name = subject.emitted.name
                state.note(subject.key, name, 0.0, 0.0, [["", f"crashed: {error}"[:200]]])
                raise
            if outcome.best is not None:
                self.accept(self.entry(subject, outcome.best, outcome))
            state.note(subject.key, subject.emitted.name, outcome.before_us, outcome.us, [
                [str(launch), result] for launch, result in outcome.tried
            ])  # fmt: skip
            self.say(line_of(subject, outcome))
        return 0

    def tune(self, subject: Subject, compiled: Sequence[Result] = ()) -> Outcome:
        """Try every candidate of a kernel."""
        before = self.times(subject.direction, self.base)[0]
        own = [step.us for step in before if step.name == subject.emitted.name]
        if not own:
            return Outcome(None, 0.0, 0.0, ((subject.candidates[0], "does not run"),))
        tried: list[tuple[Launch, str]] = [(subject.candidates[0], f"{sum(own):.1f} us, present")]
        best, gain = None, NOISE
        for launch in subject.candidates[1:]:
            reason = self._unfit(subject, launch, compiled)
            found = reason or self._try(subject, launch, before)
            if isinstance(found, str):
                tried.append((launch, found))
                continue
            old, new = found
            tried.append((launch, f"{sum(own) - old + new:.1f} us"))
            if old - new > gain * sum(own):
                best, gain = launch, (old - new) / sum(own)
        if best is None:
            return Outcome(None, sum(own), sum(own), tuple(tried))
        old, new = self._confirm(subject, best)
        if new > (1 - NOISE) * old:
            return Outcome(None, old, old, (*tried, (best, f"not confirmed: {old:.1f} {new:.1f}")))
        info = info_of(subject, best, compiled)
        return Outcome(best, new, old, tuple(tried), info.shared_bytes if info else None)

    def _try(
        self, subject: Subject, launch: Launch, before: list[StepTime]
    ) -> str | tuple[float, float]:
        """Microseconds of what is changed before and after, or why the candidate is not one."""
        try:
            after, results = self.times(subject.direction, self._with(subject, launch))
        except Exception as error:  # whatever the compiler or the driver says of it
            if "illegal memory access" in str(error):
                raise
            return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        wrong = self.difference(subject.direction, results)
        return wrong or changed(before, after)

    def _confirm(self, subject: Subject, launch: Launch) -> tuple[float, float]:
        """Medians of several measurements in turn, before and after."""
        pairs = []
        for _ in range(CONFIRMATIONS):
            before = self.times(subject.direction, self.base)[0]
            after = self.times(subject.direction, self._with(subject, launch))[0]
            pairs.append(changed(before, after))
        old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
        return old, new

    def _unfit(self, subject: Subject, launch: Launch, compiled: Sequence[Result]) -> str:
        """Why a compiled candidate need not be tried; empty if it is to be."""
        info = info_of(subject, launch, compiled)
        limit = shared_limit(self.call.problem.device)
        if info is not None and limit is not None and info.shared_bytes > limit:
            return f"needs {info.shared_bytes} bytes of shared memory"
        free = info_of(subject, replace(launch, registers=None), compiled)
        if launch.registers and free is not None and free.regs and free.regs <= launch.registers:
            return f"takes {free.regs} registers without a limit"
        failed = [x for x in compiled if isinstance(x, str)]
        return failed[0][:120] if failed and info is None else ""

    def _with(self, subject: Subject, launch: Launch) -> Tuned:
        return replace(self.base, forced={**self.base.forced, subject.name: launch})

    def times(self, direction: str, tuned: Tuned) -> tuple[list[StepTime], list[Tensor]]:
        """Times of the steps of a direction, and the results of the call."""
        self.executor.tuned = tuned
        try:
            plan, tensors = self.call.prepared(direction)
            steps, results = time_plan(plan, tensors, self.call, self.runs)
            return steps, results[: self.call.compared(direction, plan)]
        finally:
            self.executor.tuned = self.base

    # -- results ------------------------------------------------------------------------------

    def wanted(self, direction: str) -> list[Tensor]:
        """The results of a direction with the estimates."""
        if direction not in self._wanted:
            programs = self.executor.programs(self.call.problem)  # cut as the candidates are
            plain = Tuned(measured=False, programs=programs)
            self._wanted[direction] = self.times(direction, plain)[1]
        return self._wanted[direction]

    def difference(self, direction: str, results: Sequence[Tensor]) -> str:
        """Why results are not those of the estimates; empty if they are, within the bound."""
        problem = self.call.problem
        bound = SHARDED[problem.output_dtype].output
        for at, (got, want) in enumerate(zip(results, self.wanted(direction), strict=True)):
            if torch.equal(got, want):
                continue
            tokens = got.ndim > 2 and got.shape[1] == problem.tokens
            report = measure(got, want, dim=1 if tokens else None)
            if not report.within(bound):
                return f"result {at} differs: {report.ratio:.1e}, worst {report.worst_chunk:.1e}"
        return ""

    # -- entries ------------------------------------------------------------------------------

    def entry(self, subject: Subject, launch: Launch, outcome: Outcome) -> KernelEntry:
        """The entry of a kernel."""
        return KernelEntry(
            subject.key,
            subject.emitted.name,
            launch.column_tile,
            launch.num_warps,
            launch.num_stages,
            launch.registers,
            outcome.shared,
            self.provenance.measured(outcome.us, outcome.before_us),
        )

    def accept(self, entry: KernelEntry | ScanEntry) -> None:
        """Write an entry; kernels that are tuned later run beside it."""
        self.base = self.executor.tuned = self.base.with_entry(entry, self.arch)
        self.database.add(entry)
        self.written.append(entry)
        write(self.database, self.file)

    def tune_segments(self, state: SearchState) -> None:
        """Try how many programs a processor should have in the scans: all directions together."""
        problem = self.call.problem
        fixed = self.executor.segment_chunks is not None or not self.executor.scan_tiles(problem)
        if fixed or interpreting() or len(self.call.directions) < 2:
            return
        key, present = self.executor.scans_key(problem), self.executor.programs(problem)
        if state.knows(key):
            return
        tried: dict[int, float] = {}
        for programs in (present, *(x for x in PROGRAMS if x != present)):
            tried[programs] = self._whole(replace(self.base, programs=programs))
        best = min(tried, key=lambda programs: tried[programs])
        before = tried[present]
        if best != present:
            again = self._whole(replace(self.base, programs=best))
            if again > (1 - NOISE) * self._whole(self.base):
                best = present
        if best != present:
            noted = self.provenance.measured(tried[best], before)
            self.accept(ScanEntry(key, f"{problem.spec.name}_scan", best, noted))
            self.base = self.executor.tuned = replace(self.base, programs=best)
            self._wanted = {}
        shown = [[str(programs), f"{us:.1f} us"] for programs, us in tried.items()]
        state.note(key, f"{problem.spec.name} scans", before, tried[best], shown)
        self.say(f"{problem.spec.name} scans: {shown}, {best} programs a processor")

    def _whole(self, tuned: Tuned) -> float:
        return sum(total(self.times(direction, tuned)[0]) for direction in self.call.directions)

    # -- all entries together -----------------------------------------------------------------

    def verify(self) -> str:
        """Run the call with everything that was written: microseconds before and after.

        Raises:
            TuningError: the results are out of bounds together; the entries are taken back.
        """
        plain = Tuned(measured=False)
        # Nothing is kept: the files are read again, as a user's call does.
        tuned = replace(self.base, programs=None, forced={}, kept=None)
        before = after = 0.0
        self._wanted = {}
        self.base = self.executor.tuned = plain
        for direction in self.call.directions:
            steps, self._wanted[direction] = self.times(direction, plain)
            before += total(steps)
        self.call.forget()
        self.base = self.executor.tuned = tuned
        for direction in self.call.directions:
            steps, results = self.times(direction, tuned)
            after += total(steps)
            wrong = self.difference(direction, results)
            if wrong:
                self._take_back()
                raise TuningError(
                    f"{self.call.problem.spec.name}: the {direction} results with all new entries "
                    f"are not those of the estimates: {wrong}. The entries of this run were taken "
                    f"out of {self.file}"
                )
        return f"all kernels: {before:.0f} us with the estimates, {after:.0f} us as tuned"

    def _take_back(self) -> None:
        for entry in self.written:
            self.database.kernels.pop(entry.key, None)
            self.database.scans.pop(entry.key, None)
        write(self.database, self.file)
