"""Forked processes that compile the kernels of calls side by side, in order.

Contract: one process plans and hands out work, `jobs` others compile; all are forked when the pool
is made, so that nothing but small messages is pickled, and none uses CUDA. Tasks are served in
order. Where a kernel does not fit the target, its direction is compiled again with smaller tiles
before anything else, as a call would. A failed kernel is a message, and raised only by `kernels`; a
process that dies is an error, never a wait without end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from types import TracebackType

from flexla_dist.compiler.aot import (
    CompiledInfo,
    CompileTask,
    LaunchRecord,
    Target,
    compile_launch,
    record_launches,
    shared_limit,
)
from flexla_dist.compiler.executor.choosing import Tuned, arch_of
from flexla_dist.compiler.executor.triton_executor import MAX_SHRINK
from flexla_dist.errors import ExecutorError, FlexlaError

Result = CompiledInfo | str
_FORK = multiprocessing.get_context("fork")


@dataclass(eq=False)
class _Part:
    """One direction of a task at one size of tiles; `done` are its kernels by position."""

    task: int
    direction: str
    shrink: int
    keys: list[str] = field(default_factory=list)
    previous: _Part | None = None


@dataclass(frozen=True)
class _Work:
    """A kernel to compile: where to find it, and its key."""

    task: int
    direction: str
    shrink: int
    position: int
    key: str


class CompilePool:
    """Compiles the kernels of tasks in `jobs` processes beside this one."""

    def __init__(self, tasks: Sequence[CompileTask], target: Target, jobs: int = 1):
        self.target, self._names = target, [task.graphs.spec.name for task in tasks]
        # The processes plan at different times, and must see the same tuning entries.
        tasks = [replace(task, tuned=_fixed(task)) for task in tasks]
        self._results: dict[int, list[Result]] = {}
        here, there = _FORK.Pipe()
        self._connection = here
        self._process = _FORK.Process(target=_serve, args=(there, here, tasks, target, jobs))
        self._process.start()
        there.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait(self, task: int) -> list[Result]:
        """Results of a task by number, in launch order; a string says why a kernel failed."""
        while task not in self._results:
            try:
                number, results = self._connection.recv()
            except (EOFError, ConnectionError):
                self._process.join()
                raise ExecutorError(
                    "the process that compiles kernels ended with code "
                    f"{self._process.exitcode}; it may have run out of memory: use fewer jobs"
                ) from None
            self._results[number] = results
        return self._results[task]

    def kernels(self, task: int) -> list[CompiledInfo]:
        """As `wait`; raises ExecutorError for a kernel that failed or does not fit."""
        infos: list[CompiledInfo] = []
        for result in self.wait(task):
            if isinstance(result, str):
                raise ExecutorError(f"{self._names[task]}: {result}")
            if _too_large(result, self.target):
                raise ExecutorError(
                    f"{self._names[task]}: {result.kernel} needs {result.shared_bytes} bytes of "
                    f"shared memory even with the smallest tiles; {self.target} has "
                    f"{shared_limit(self.target)}"
                )
            infos.append(result)
        return infos

    def close(self) -> None:
        """End the processes."""
        self._connection.close()
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()


def _fixed(task: CompileTask) -> tuple[Tuned, ...]:
    arch = arch_of(task.problem.device)
    return tuple(tuned.fixed(arch) for tuned in task.tuned)


def _too_large(result: Result, target: Target) -> bool:
    limit = shared_limit(target)
    return isinstance(result, CompiledInfo) and limit is not None and result.shared_bytes > limit


# -- the process that plans -----------------------------------------------------------------------


class _Server:
    def __init__(self, parent: Connection, tasks: Sequence[CompileTask], target: Target, jobs: int):
        self.parent, self.tasks, self.target = parent, tasks, target
        self.next = 0
        self.queue: deque[_Work] = deque()
        self.asked: set[str] = set()
        self.results: dict[str, Result] = {}
        self.parts: list[_Part] = []
        self.finished: dict[int, dict[str, list[Result]]] = {}
        self.workers: dict[Connection, multiprocessing.process.BaseProcess] = {}
        self.idle: list[Connection] = []
        for _ in range(jobs):
            self._start_worker()

    def run(self) -> None:
        while True:
            while len(self.queue) < len(self.workers) and self.next < len(self.tasks):
                self._plan_next()
            while self.idle and self.queue:
                self.idle.pop().send(self.queue.popleft())
            if len(self.idle) == len(self.workers):
                if self.next == len(self.tasks):
                    return
                continue
            for ready in wait_for([*self.workers, self.parent]):
                self._receive(ready)
            self._settle()

    def _receive(self, ready: object) -> None:
        assert isinstance(ready, Connection)
        key, result = ready.recv()  # EOFError: the parent or a worker is gone, all end
        self.results[key] = result
        self.idle.append(ready)

    def _plan_next(self) -> None:
        number, self.next = self.next, self.next + 1
        self.finished[number] = {}
        try:
            for direction in self.tasks[number].directions:
                self._plan(_Part(number, direction, 0), urgent=False)
        except FlexlaError as refusal:
            self.parts = [part for part in self.parts if part.task != number]
            self.parent.send((number, [str(refusal)]))
            return
        self._settle()

    def _plan(self, part: _Part, urgent: bool) -> None:
        records = record_launches(self.tasks[part.task], part.direction, part.shrink)
        part.keys = [record.key for record in records]
        fresh = [
            _Work(part.task, part.direction, part.shrink, at, key)
            for at, key in enumerate(part.keys)
            if key not in self.asked
        ]
        self.asked.update(part.keys)
        self.parts.append(part)
        if urgent:
            self.queue.extendleft(reversed(fresh))
        else:
            self.queue.extend(fresh)

    def _settle(self) -> None:
        """Finish parts whose kernels are compiled, or begin them again with smaller tiles."""
        while ready := [p for p in self.parts if all(key in self.results for key in p.keys)]:
            for part in ready:
                self.parts.remove(part)
                results = [self.results[key] for key in part.keys]
                if self._may_shrink(part, results):
                    smaller = _Part(part.task, part.direction, part.shrink + 1, previous=part)
                    self._plan(smaller, urgent=True)
                else:
                    self._finish(part, results)

    def _may_shrink(self, part: _Part, results: list[Result]) -> bool:
        if len(self.tasks[part.task].tuned) > 1:  # candidates: some may be too large
            return False
        unchanged = part.previous is not None and part.previous.keys == part.keys
        large = any(_too_large(result, self.target) for result in results)
        return large and not unchanged and part.shrink < MAX_SHRINK

    def _finish(self, part: _Part, results: list[Result]) -> None:
        by_direction = self.finished[part.task]
        by_direction[part.direction] = results
        directions = self.tasks[part.task].directions
        if len(by_direction) == len(directions):
            every = [result for direction in directions for result in by_direction[direction]]
            self.parent.send((part.task, every))

    def _start_worker(self) -> None:
        here, there = _FORK.Pipe()
        inherited = [*self.workers, here, self.parent]
        process = _FORK.Process(
            target=_work, args=(there, inherited, self.tasks, self.target), daemon=True
        )
        process.start()
        there.close()
        self.workers[here] = process
        self.idle.append(here)

    def close(self) -> None:
        for connection, process in self.workers.items():
            process.terminate()
            connection.close()


def _serve(
    parent: Connection, other: Connection, tasks: Sequence[CompileTask], target: Target, jobs: int
) -> None:
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = _Server(parent, tasks, target, jobs)
    try:
        server.run()
        parent.recv()  # until the parent closes
    except (EOFError, ConnectionError):
        pass
    finally:
        server.close()


# -- the processes that compile -------------------------------------------------------------------


def _work(
    connection: Connection,
    inherited: Sequence[Connection],
    tasks: Sequence[CompileTask],
    target: Target,
) -> None:
    for other in inherited:
        other.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    place: tuple[int, str, int] | None = None
    records: list[LaunchRecord] = []
    try:
        while True:
            work = connection.recv()
            if place != (work.task, work.direction, work.shrink):
                place = (work.task, work.direction, work.shrink)
                records = record_launches(tasks[work.task], work.direction, work.shrink)
            connection.send((work.key, _compile(records[work.position], target)))
    except (EOFError, ConnectionError):
        os._exit(0)


def _compile(launch: LaunchRecord, target: Target) -> Result:
    try:
        return compile_launch(launch, target)
    except Exception as error:
        detail = "".join(traceback.format_exception_only(error)).strip()
        return f"{launch.kernel} ({launch.direction}) does not compile for {target}: {detail}"
