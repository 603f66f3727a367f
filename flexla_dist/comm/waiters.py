"""Threads that block on the main thread's behalf.

A gloo point-to-point operation can only be waited for by blocking: its work object never reports
completion to a poll, and a time-limited wait breaks the connection when it expires. So a helper
thread blocks, and the thread that needs the result waits for the helper with a time limit. The
threads belong to the process, not to a group; one that is stuck for good is a daemon.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

LEAVE_SECONDS = 2.0


class Job:
    """A call that runs on a helper thread."""

    __slots__ = ("_call", "_done", "error")

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._done = threading.Lock()
        self._done.acquire()
        self.error: BaseException | None = None

    def wait(self, seconds: float) -> bool:
        """Whether the call ended within `seconds`; true once only."""
        return self._done.acquire(timeout=seconds)

    def run(self, before_done: Callable[[], None]) -> None:
        """Do the call, keep its error, and mark it done."""
        try:
            self._call()
        except BaseException as error:
            self.error = error
        before_done()
        self._done.release()


class Waiters:
    """A set of helper threads that grows when all are busy."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Job]] = []
        self._background: list[Job] = []

    def submit(self, call: Callable[[], object]) -> Job:
        """Start `call` on an idle thread."""
        job = Job(call)
        try:
            queue = self._idle.pop()
        except IndexError:
            queue = SimpleQueue()
            arguments = (queue,)
            threading.Thread(
                target=self._serve, args=arguments, name="flexla-wait", daemon=True
            ).start()
        queue.put(job)
        return job

    def finish_in_background(self, waits: Sequence[tuple[Callable[[], object], object]]) -> None:
        """Do blocking calls one after the other, each keeping an object alive; nobody looks."""

        def finish() -> None:
            for call, _ in waits:
                call()

        self._background = [job for job in self._background if not job.wait(0)]
        self._background.append(self.submit(finish))

    def leave(self) -> None:
        """At the end of the program: a short wait for what is still being sent."""
        for job in self._background:
            job.wait(LEAVE_SECONDS)

    def forget(self) -> None:
        """Drop all threads, which a forked child does not have."""
        self._idle = []
        self._background = []

    def _serve(self, queue: SimpleQueue[Job]) -> None:
        idle = self._idle
        while True:
            queue.get().run(lambda: idle.append(queue))


THREADS = Waiters()
atexit.register(THREADS.leave)
os.register_at_fork(after_in_child=THREADS.forget)
