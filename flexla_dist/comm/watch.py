"""Bounded waiting: time limits, failures of other ranks, ranks in different operations.

A wait blocks in the backend, with the time limit, and costs nothing extra. A second thread looks
ten times a second whether a wait has lasted; only then does it ask the store for failures and
compare what the ranks are doing. To end the wait it breaks this rank's connections in the group: a
receive that times out makes gloo fail everything pending. So a failure is final for the group.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from flexla_dist.comm.errors import (
    ExchangeError,
    ExchangeTimeout,
    RankMismatch,
    RemoteRankError,
)
from flexla_dist.comm.failures import FailureBoard
from flexla_dist.comm.links import GroupRanks

T = TypeVar("T")

POLL_SECONDS = 0.1
ASK_SECONDS = 1.0
DESYNC_SECONDS = 2.0
LOST_PEER_GRACE_SECONDS = 1.0
HISTORY = 32
PEERS_PER_POLL = 4
UNUSED_MESSAGE_TAG = (1 << 30) - 1
SAME_ORDER = (
    "Every rank must run the same layers in the same order with tensors of the same shapes and "
    "dtypes (the number of tokens may differ), whatever its labels, masks and requires_grad are"
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """For whom this rank waits (None: for all) and in what; `what` is made into text when asked."""

    peer: int | None
    what: object


class Watch:
    """Waits of one rank in one group, and what ends them early."""

    def __init__(self, ranks: GroupRanks, timeout: float) -> None:
        self._ranks = ranks
        self.set_timeout(timeout)
        self._board = FailureBoard(ranks)
        self._sequence = 0
        self._asked = time.monotonic()
        self._history: deque[tuple[int, object, str]] = deque(maxlen=HISTORY)
        self._error: ExchangeError | None = None
        self._current: tuple[float, Waiting] | None = None
        self._watcher: threading.Thread | None = None

    @property
    def operation(self) -> str:
        """The operation that this rank began last, and what it has to say about it."""
        if not self._history:
            return "nothing yet"
        _, what, hint = self._history[-1]
        return f"[{what}]" + (f". {hint}" if hint else "")

    @property
    def failed(self) -> bool:
        """Whether this rank has seen a failure of the group."""
        return self._error is not None

    @property
    def error(self) -> ExchangeError | None:
        """The failure of the group that this rank has seen."""
        return self._error

    @property
    def timeout(self) -> float:
        """Seconds that a wait lasts at most."""
        return self._timeout

    def hear(self, error: ExchangeError) -> None:
        """Take over what another thread found; the next exchange or check raises it."""
        if self._error is None:
            self._error = error

    def raise_error(self) -> None:
        """Raise the failure of the group that this rank has seen, if any."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def set_timeout(self, seconds: float) -> None:
        """Seconds that a wait lasts at most."""
        if not seconds > 0:
            raise ValueError(f"timeout is {seconds}, expected a positive number of seconds")
        self._timeout = seconds
        self._limit = timedelta(seconds=seconds)

    def begin(self, what: object, hint: str = "") -> None:
        """Count an operation that every rank of the group takes part in; `str(what)` names it.

        hint: what this rank adds to the message if other ranks turn out to do something else.
        """
        if self._error is not None:
            raise type(self._error)(f"{self._error} (an earlier failure; the group is unusable)")
        now = time.monotonic()
        if now - self._asked > ASK_SECONDS:
            self._asked = now
            self.raise_remote_failure()
        self._sequence += 1
        self._history.append((self._sequence, what, hint))

    def wait(self, work: dist.Work, waiting: Waiting) -> None:
        """Return when `work` is done, or raise within the limit."""
        if self._watcher is None:
            self._start_watcher()
        start = time.monotonic()
        self._current = (start, waiting)
        try:
            work.wait(self._limit)
        except RuntimeError as cause:
            self._current = None
            waited = time.monotonic() - start
            if self._error is None and waited >= self._timeout:
                self._time_out(waited, waiting)
            self.lost(waiting, cause)
        finally:
            self._current = None

    def lost(self, waiting: Waiting, cause: BaseException) -> NoReturn:
        """A connection broke: say why if that is known, else that the peer has gone."""
        deadline = time.monotonic() + LOST_PEER_GRACE_SECONDS
        while self._error is None and time.monotonic() < deadline:
            self.raise_remote_failure()
            time.sleep(POLL_SECONDS)
        if self._error is not None:
            raise self._error
        peer = "a peer" if waiting.peer is None else self._ranks.name(waiting.peer)
        self.fail(
            RemoteRankError(
                f"{self._ranks.name(self._ranks.rank)} lost {peer} in {waiting.what}: its process "
                f"has probably ended; look at its log. The backend said: {_one_line(cause)}"
            ),
            waiting.what,
        )

    def fail(self, error: ExchangeError, what: object = "") -> NoReturn:
        """Publish `error`, remember it, raise it."""
        self._error = error
        self._publish(error, what)
        raise error

    def raise_remote_failure(self) -> None:
        """Raise if some rank published a failure."""
        failure = self._ask(self._board.failure)
        if failure is not None:
            self._error = failure.as_error(self._ranks)
            raise self._error

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Publish an exception of the body, so that ranks that wait for this one raise too."""
        try:
            yield
        except ExchangeError:
            raise
        except BaseException as error:
            own = self._ranks.name(self._ranks.rank)
            self._error = ExchangeError(f"{own} failed in {what}: {error!r}")
            self._publish(error, what)
            raise

    def _publish(self, error: BaseException, what: object) -> None:
        try:
            self._board.publish(error, str(what))
        except Exception as store_error:
            error.add_note(f"(other ranks could not be told: {_one_line(store_error)})")

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except Exception as cause:
            self._error = RemoteRankError(
                f"{self._ranks.name(self._ranks.rank)} lost the store of its group: the process "
                f"that holds it has probably ended. The store said: {_one_line(cause)}"
            )
            raise self._error from cause

    def too_late(self, waited: float, waiting: Waiting) -> ExchangeTimeout:
        """The error of a wait that lasted longer than it may."""
        peer = "the other ranks" if waiting.peer is None else self._ranks.name(waiting.peer)
        own = self._ranks.name(self._ranks.rank)
        return ExchangeTimeout(
            f"{own} waited {waited:.1f} s for {peer} in {waiting.what} and got nothing; all "
            f"ranks must make the same call. If {peer} only computed longer, raise timeout= "
            f"(now {self._timeout:g} s)"
        )

    def _time_out(self, waited: float, waiting: Waiting) -> NoReturn:
        self._break_connections()
        self.fail(self.too_late(waited, waiting), waiting.what)

    def _start_watcher(self) -> None:
        self._watcher = threading.Thread(
            target=_watch_forever, args=(weakref.ref(self),), name="flexla-watch", daemon=True
        )
        self._watcher.start()

    def look(self, state: _WatcherState) -> None:
        """One look of the watcher thread at the current wait."""
        current = self._current
        if current is None or self._error is not None:
            return
        start, waiting = current
        waited = time.monotonic() - start
        if waited < POLL_SECONDS:
            return
        try:
            self.raise_remote_failure()
            if waited > DESYNC_SECONDS:
                self._compare_progress(waiting.peer, state)
        except ExchangeError:
            if self._current is current:
                self._break_connections()

    def _break_connections(self) -> None:
        """Fail all that this rank has pending in the group; gloo does so when a receive expires.

        A connection that is broken already refuses the receive at once and fails nothing else, so
        every peer is tried.
        """
        for rank, source in enumerate(self._ranks.global_ranks):
            if rank == self._ranks.rank:
                continue
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), source, self._ranks.group, UNUSED_MESSAGE_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def _compare_progress(self, peer: int | None, state: _WatcherState) -> None:
        """Compare what was done last with the awaited peer and, in turn, with some others."""
        own = {number: (str(what), hint) for number, what, hint in list(self._history)}
        if state.published != self._sequence:
            self._ask(partial(self._board.publish_progress, own))
            state.published = self._sequence
        others = [r for r in range(self._ranks.size) if r != self._ranks.rank]
        turns = range(min(PEERS_PER_POLL, len(others)))
        chosen = {others[(state.turn + i) % len(others)] for i in turns}
        state.turn += PEERS_PER_POLL
        for rank in sorted(chosen if peer is None else chosen | {peer}):
            for number, theirs in self._ask(partial(self._board.progress_of, rank)).items():
                if number in own and own[number][0] != theirs[0]:
                    self._mismatch(rank, number, own[number], theirs)

    def _mismatch(
        self, rank: int, number: int, own: tuple[str, str], theirs: tuple[str, str]
    ) -> NoReturn:
        here, there = self._ranks.name(self._ranks.rank), self._ranks.name(rank)
        hints = "".join(f". {hint}" for _, hint in (own, theirs) if hint)
        self.fail(
            RankMismatch(
                f"ranks are in different operations: as its exchange number {number} {here} does "
                f"[{own[0]}] and {there} does [{theirs[0]}]{hints}. {SAME_ORDER}"
            ),
            own[0],
        )

    def differ(self, operations: Sequence[str]) -> NoReturn:
        """Raise what all ranks found together: `operations`, by rank, are not the same."""
        by_text: dict[str, list[str]] = {}
        for rank, text in enumerate(operations):
            by_text.setdefault(text, []).append(self._ranks.name(rank))
        lines = [f"  {', '.join(ranks)}: {text}" for text, ranks in by_text.items()]
        self.fail(
            RankMismatch("\n".join(["ranks are in different operations:", *lines, SAME_ORDER])),
            self.operation,
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@dataclass
class _WatcherState:
    """What the watcher remembers between looks."""

    published: int = 0
    turn: int = 0


def _watch_forever(reference: weakref.ref[Watch]) -> None:
    """Body of the watcher thread; ends with its Watch."""
    state = _WatcherState()
    while True:
        time.sleep(POLL_SECONDS)
        watch = reference()
        if watch is None or watch.failed:
            return
        watch.look(state)
        del watch
