"""What this rank's device waits for: works of NCCL or its like, and the headers of what arrives.

Contract: a host that posts a work goes on at once, and nothing on the device ends a wait for a rank
that is gone. So a `Lookout` looks after the works from the first one posted: it notices a failure,
a process that ended, a wait over its limit, keeps the error for the next exchange or check, and
ends the waits by aborting the group's communicators. This is final for the group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.comm.errors import ExchangeError
from flexla_dist.comm.links import GroupRanks
from flexla_dist.comm.lookout import Lookout, Waits
from flexla_dist.comm.watch import Waiting, Watch

PENDING_HEADERS = 64
STARTING_SECONDS = 1.0  # a call that takes longer is itself a wait, for ranks that connect
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.00002, 0.001


@dataclass(frozen=True, slots=True)
class Pending:
    """A work. awaited: the stream waits for it, so that its time is limited; False for a send."""

    work: dist.Work
    since: float
    waiting: Waiting
    awaited: bool


class StreamWorks(Waits):
    """The works of one rank in one group."""

    def __init__(self, ranks: GroupRanks, watch: Watch) -> None:
        self.lookout: Lookout | None = None
        self.no_backward = False
        self._ranks = ranks
        self._watch = watch
        self._device = torch.device("cpu")
        self._lock = threading.Lock()
        self._pending: deque[Pending] = deque()
        self._starting: tuple[float, Waiting] | None = None
        self._headers: deque[tuple[Tensor, torch.cuda.Event, Callable[[list[int]], None]]] = deque()

    def look_after(self, lookout: Lookout) -> None:
        """Have the works that are posted from now on looked after."""
        self.lookout = lookout
        lookout.add(self)

    @contextmanager
    def starting(self, waiting: Waiting, device: torch.device) -> Iterator[None]:
        """Around a call that posts works on `device`: it may itself wait for other ranks.

        Raises the failure of the group if one is known: its communicators may be gone.
        """
        self._device = device
        self._starting = (time.monotonic(), waiting)
        if self.lookout is not None:
            self.lookout.start(self)
        try:
            self._watch.raise_error()
            yield
        finally:
            self._starting = None

    def wait(self, work: dist.Work, waiting: Waiting) -> None:
        """Order the current stream after `work`."""
        try:
            work.wait()
        except RuntimeError as cause:  # its communicator was aborted
            self._watch.lost(waiting, cause)
        self.keep(work, waiting, awaited=True)

    def keep(self, work: dist.Work, waiting: Waiting, *, awaited: bool = False) -> None:
        """Look after a work that no stream waits for, such as a send."""
        with self._lock:
            self._pending.append(Pending(work, time.monotonic(), waiting, awaited))

    def remember_header(self, words: Tensor, compare: Callable[[list[int]], None]) -> None:
        """Compare a header on the device later, without a stall now."""
        copy = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        copy.copy_(words, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._headers.append((copy, event, compare))

    def compare_headers(self, *, wait: bool) -> None:
        """Compare the headers that have arrived. wait: all of them.

        Raises what a comparison raises, and the failure of the group once one is known.
        """
        while self._headers:
            copy, event, compare = self._headers[0]
            if not event.query():
                if not wait and len(self._headers) < PENDING_HEADERS:
                    return
                self._wait_for(event)
            self._watch.raise_error()  # a wait that was ended left no header
            self._headers.popleft()
            compare(copy.tolist())

    def check(self) -> None:
        """Return once this rank has all that it waits for; raise what went wrong.

        It waits for what arrives, not for what other kernels do afterwards.
        """
        if not self.active or _capturing(self._device):
            return
        self.compare_headers(wait=True)
        self._watch.raise_error()
        self.no_backward = False
        self.forget_completed()
        if not self._pending and self.lookout is not None:
            self.lookout.rest(self)

    def forget_completed(self) -> None:
        """Look no more after works that are done."""
        with self._lock:
            while self._pending and self._pending[0].work.is_completed():
                self._pending.popleft()

    def under_way(self) -> bool:
        """See `Waits`."""
        starting = self._starting
        if starting is not None and time.monotonic() - starting[0] > STARTING_SECONDS:
            return True
        with self._lock:
            pending = list(self._pending)
        with self._on_device():
            return any(not entry.work.is_completed() for entry in reversed(pending))

    def overdue(self) -> ExchangeError | None:
        """See `Waits`; the failure that this rank has seen itself, too: others do not go on."""
        if self._watch.error is not None:
            return self._watch.error
        now, starting = time.monotonic(), self._starting
        if starting is not None and now - starting[0] > self._watch.timeout:
            return self._watch.too_late(now - starting[0], starting[1])
        with self._lock:
            old = [p for p in self._pending if p.awaited and now - p.since > self._watch.timeout]
        with self._on_device():
            late = next((entry for entry in old if not entry.work.is_completed()), None)
        return None if late is None else self._watch.too_late(now - late.since, late.waiting)

    def end(self, error: ExchangeError) -> None:
        """See `Waits`: abort the group's communicators, which ends their kernels.

        Not while the other thread is inside of a call that uses them, unless that hangs.
        """
        self._watch.hear(error)
        deadline = time.monotonic() + STARTING_SECONDS
        while self._starting is not None and time.monotonic() < deadline:
            time.sleep(LONGEST_PAUSE_SECONDS)
        with self._on_device():
            try:
                backend = self._ranks.group._get_backend(self._device)
                # TORCH_DISTRIBUTED_DEBUG=DETAIL puts one around it that aborts nothing.
                getattr(backend, "wrapped_pg", backend).abort()
            except RuntimeError as cause:
                error.add_note(f"(its communicators could not be aborted: {cause})")

    def _wait_for(self, event: torch.cuda.Event) -> None:
        """By looking: an error is raised even if nothing can end the wait."""
        pause = SHORTEST_PAUSE_SECONDS
        while not event.query():
            self._watch.raise_error()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _on_device(self) -> AbstractContextManager[object]:
        """A thread that asks CUDA without it would make a context on the first GPU."""
        cuda = self._device.type == "cuda"
        return torch.cuda.device(self._device) if cuda else nullcontext()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
