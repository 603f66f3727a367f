"""Forked processes that compile planned launches side by side, in order.

Contract: the pool forks when it is made, so that functions need not be pickled; workers never use
CUDA and take launches in the order of the plans. Where a kernel of a plan does not fit the target,
the plan's next level is compiled, before anything else. A failed kernel is a message, and raised
only by `kernels`; a worker that dies is an error, never a wait without end.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any

from flexla_dist.compiler.aot import (
    CompiledInfo,
    LaunchPlan,
    LaunchRecord,
    Target,
    compile_launch,
    shared_limit,
)
from flexla_dist.errors import ExecutorError

Result = CompiledInfo | str


class CompilePool:
    """Compiles the launches of plans in `jobs` forked processes; one job is this process."""

    def __init__(self, plans: Sequence[LaunchPlan], target: Target, jobs: int = 1):
        self.target, self.limit = target, shared_limit(target)
        self.results: dict[str, Result] = {}
        every = [launch for plan in plans for level in plan.levels for launch in level]
        self._launches = {launch.key: launch for launch in every}
        self._places: dict[str, list[tuple[LaunchPlan, int]]] = {}
        for plan in dict.fromkeys(plans):
            for level, launches in enumerate(plan.levels):
                for launch in launches:
                    self._places.setdefault(launch.key, []).append((plan, level))
        first = [launch.key for plan in plans for launch in plan.levels[0]]
        self._queue = deque(dict.fromkeys(first))
        self._asked = set(first)
        self._workers: dict[Connection, Any] = {}
        self._idle: list[Connection] = []
        if jobs > 1:
            for _ in range(min(jobs, len(self._launches))):
                self._start_worker()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait(self, plan: LaunchPlan) -> list[Result]:
        """Results of the first level of a plan that fits; a string says why a kernel failed."""
        for launches in plan.levels:
            results = self._level(launches)
            if not any(self._too_large(result) for result in results):
                break
        return results

    def kernels(self, plan: LaunchPlan) -> list[CompiledInfo]:
        """As `wait`; raises ExecutorError for a kernel that failed or does not fit."""
        infos = []
        for result in self.wait(plan):
            if isinstance(result, str):
                raise ExecutorError(f"{plan.name}: {result}")
            if self._too_large(result):
                raise ExecutorError(
                    f"{plan.name}: {result.kernel} needs {result.shared_bytes} bytes of shared "
                    f"memory even with the smallest tiles; {self.target} has {self.limit}"
                )
            infos.append(result)
        return infos

    def close(self) -> None:
        """End the workers."""
        for connection, process in self._workers.items():
            process.terminate()
            connection.close()
        for process in self._workers.values():
            process.join()
        self._workers.clear()
        self._idle.clear()

    # -- order --------------------------------------------------------------------------------

    def _level(self, launches: Sequence[LaunchRecord]) -> list[Result]:
        missing = [x.key for x in launches if x.key not in self._asked]
        self._put_first(missing)
        if not self._workers:
            for launch in launches:
                if launch.key not in self.results:
                    self.results[launch.key] = _compile(launch, self.target)
        while any(launch.key not in self.results for launch in launches):
            self._collect()
        return [self.results[launch.key] for launch in launches]

    def _put_first(self, keys: Sequence[str]) -> None:
        self._asked.update(keys)
        self._queue.extendleft(reversed(keys))
        while self._idle and self._queue:
            self._give(self._idle.pop())

    def _too_large(self, result: Result) -> bool:
        return (
            isinstance(result, CompiledInfo)
            and self.limit is not None
            and result.shared_bytes > self.limit
        )

    def _take(self, key: str, result: Result) -> None:
        self.results[key] = result
        if not self._too_large(result):
            return
        for plan, level in self._places[key]:
            if level + 1 < len(plan.levels):
                following = [x.key for x in plan.levels[level + 1] if x.key not in self._asked]
                self._put_first(following)

    # -- workers ------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(
            target=_work, args=(there, self._launches, self.target), daemon=True
        )
        process.start()
        there.close()
        self._workers[here] = process
        self._give(here)

    def _give(self, connection: Connection) -> None:
        if self._queue:
            connection.send(self._queue.popleft())
        else:
            self._idle.append(connection)

    def _collect(self) -> None:
        for ready in wait_for(list(self._workers)):
            assert isinstance(ready, Connection)
            try:
                key, result = ready.recv()
            except (EOFError, ConnectionError):
                process = self._workers.pop(ready)
                process.join()
                raise ExecutorError(
                    f"a process that compiles kernels ended with code {process.exitcode}; "
                    "it may have run out of memory: use fewer jobs"
                ) from None
            self._take(key, result)
            self._give(ready)


def _compile(launch: LaunchRecord, target: Target) -> Result:
    try:
        return compile_launch(launch, target)
    except Exception as error:
        detail = "".join(traceback.format_exception_only(error)).strip()
        return f"{launch.kernel} ({launch.direction}) does not compile for {target}: {detail}"


def _work(connection: Connection, launches: dict[str, LaunchRecord], target: Target) -> None:
    try:
        while True:
            key = connection.recv()
            connection.send((key, _compile(launches[key], target)))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        os._exit(0)
