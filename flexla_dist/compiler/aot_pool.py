"""Forked processes that compile recorded launches side by side, in order.

Contract: the pool forks when it is made, so that functions need not be pickled; workers never use
CUDA, take launches in the order given, and `wait` returns when those asked for are done. A failed
kernel is a message, not an exception; a worker that dies is an error, never a wait without end.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any

from flexla_dist.compiler.aot import CompiledInfo, LaunchRecord, Target, compile_launch
from flexla_dist.errors import ExecutorError

Result = CompiledInfo | str


class CompilePool:
    """Compiles launches in `jobs` forked processes; with one job, in this process when asked."""

    def __init__(self, launches: Sequence[LaunchRecord], target: Target, jobs: int = 1):
        self.target = target
        self.results: dict[str, Result] = {}
        self._launches = list({launch.key: launch for launch in launches}.values())
        self._workers: dict[Connection, Any] = {}
        self._next = 0
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

    def wait(self, launches: Sequence[LaunchRecord]) -> list[Result]:
        """Results of these launches, in their order; a string says why a kernel failed."""
        wanted = [launch.key for launch in launches]
        for launch in launches:
            if not self._workers and launch.key not in self.results:
                self.results[launch.key] = _compile(launch, self.target)
        while any(key not in self.results for key in wanted):
            self._collect(None)
        return [self.results[key] for key in wanted]

    def poll(self) -> int:
        """Take in what is finished; returns how many launches are still to be compiled."""
        if self._workers:
            self._collect(0)
        return len(self._launches) - len(self.results)

    def close(self) -> None:
        """End the workers."""
        for connection, process in self._workers.items():
            connection.close()
            process.terminate()
        for process in self._workers.values():
            process.join()
        self._workers.clear()

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
        if self._next < len(self._launches):
            connection.send(self._next)
            self._next += 1

    def _collect(self, timeout: float | None) -> None:
        for ready in wait_for(list(self._workers), timeout):
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
            self.results[key] = result
            self._give(ready)


def _compile(launch: LaunchRecord, target: Target) -> Result:
    try:
        return compile_launch(launch, target)
    except Exception as error:
        detail = "".join(traceback.format_exception_only(error)).strip()
        return f"{launch.kernel} ({launch.direction}) does not compile for {target}: {detail}"


def _work(connection: Connection, launches: Sequence[LaunchRecord], target: Target) -> None:
    try:
        while True:
            launch = launches[connection.recv()]
            connection.send((launch.key, _compile(launch, target)))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        os._exit(0)
