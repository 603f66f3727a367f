"""Bounded waiting: time limits, failures of other ranks, ranks in different operations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

import torch.distributed as dist

from flexla_dist.comm.errors import (
    ExchangeError,
    ExchangeTimeout,
    RankMismatch,
    RemoteRankError,
)
from flexla_dist.comm.failures import FailureBoard
from flexla_dist.comm.links import GroupRanks
from flexla_dist.comm.waiters import THREADS

T = TypeVar("T")

POLL_SECONDS = 0.1
ASK_SECONDS = 1.0
DESYNC_SECONDS = 2.0
LOST_PEER_GRACE_SECONDS = 1.0
HISTORY = 32
PEERS_PER_POLL = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """For whom this rank waits (None: for all) and in what."""

    peer: int | None
    what: str


class Watch:
    """Waits of one rank in one group.

    The fast path is one hand-over to a helper thread; the store is asked by a rank that has waited
    `POLL_SECONDS` already, and once a second by one that never waits. A failure is final: what the
    ranks had begun is still pending in the group, so a new group is needed to go on.
    """

    def __init__(self, ranks: GroupRanks, timeout: float) -> None:
        self._ranks = ranks
        self.set_timeout(timeout)
        self._board = FailureBoard(ranks)
        self._sequence = 0
        self._asked = time.monotonic()
        self._history: deque[tuple[int, str]] = deque(maxlen=HISTORY)
        self._error: ExchangeError | None = None
        self._on_device: deque[tuple[dist.Work, float, Waiting]] = deque()

    def set_timeout(self, seconds: float) -> None:
        """Seconds that a wait lasts at most."""
        if not seconds > 0:
            raise ValueError(f"timeout is {seconds}, expected a positive number of seconds")
        self._timeout = seconds

    @property
    def failed(self) -> bool:
        """Whether this rank has seen a failure of the group."""
        return self._error is not None

    def begin(self, what: str) -> None:
        """Count an operation that every rank of the group takes part in."""
        if self._error is not None:
            raise type(self._error)(f"{self._error} (an earlier failure; the group is unusable)")
        now = time.monotonic()
        if now - self._asked > ASK_SECONDS:
            self._asked = now
            self.raise_remote_failure()
        self._sequence += 1
        self._history.append((self._sequence, what))
        self._check_device_works()

    def wait(self, work: dist.Work, waiting: Waiting) -> None:
        """Return when `work` is done, or raise within the limit."""
        job = THREADS.submit(work.wait)
        start = time.monotonic()
        polls, published = 0, False
        while not job.wait(POLL_SECONDS):
            self.raise_remote_failure()
            waited = time.monotonic() - start
            if waited > self._timeout:
                self._time_out(waited, waiting)
            if waited > DESYNC_SECONDS:
                if not published:
                    self._ask(lambda: self._board.publish_progress(list(self._history)))
                    published = True
                self._compare_progress(waiting.peer, polls)
                polls += 1
        if job.error is not None:
            self.lost(waiting, job.error)

    def wait_on_stream(self, work: dist.Work, waiting: Waiting) -> None:
        """Order the current stream after `work`; its time limit is checked at later operations."""
        work.wait()
        self._on_device.append((work, time.monotonic(), waiting))

    def lost(self, waiting: Waiting, cause: BaseException) -> NoReturn:
        """A connection broke: say why if the peer told, else that the peer has gone."""
        deadline = time.monotonic() + LOST_PEER_GRACE_SECONDS
        while time.monotonic() < deadline:
            self.raise_remote_failure()
            time.sleep(POLL_SECONDS)
        peer = "a peer" if waiting.peer is None else self._ranks.name(waiting.peer)
        self.fail(
            RemoteRankError(
                f"{self._ranks.name(self._ranks.rank)} lost {peer} in {waiting.what}: its process "
                f"has probably ended; look at its log. The backend said: {_one_line(cause)}"
            ),
            waiting.what,
        )

    def fail(self, error: ExchangeError, what: str = "") -> NoReturn:
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

    def _publish(self, error: BaseException, what: str) -> None:
        try:
            self._board.publish(error, what)
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

    def _time_out(self, waited: float, waiting: Waiting) -> NoReturn:
        peer = "the other ranks" if waiting.peer is None else self._ranks.name(waiting.peer)
        own = self._ranks.name(self._ranks.rank)
        self.fail(
            ExchangeTimeout(
                f"{own} waited {waited:.1f} s for {peer} in {waiting.what} and got nothing; "
                f"is {peer} in the same call? If it only computes longer, raise timeout= "
                f"(now {self._timeout:g} s)"
            ),
            waiting.what,
        )

    def _compare_progress(self, peer: int | None, polls: int) -> None:
        """Compare what was done last with the awaited peer and, in turn, with some others."""
        others = [r for r in range(self._ranks.size) if r != self._ranks.rank]
        first = polls * PEERS_PER_POLL
        chosen = {
            others[(first + i) % len(others)] for i in range(min(PEERS_PER_POLL, len(others)))
        }
        if peer is not None:
            chosen.add(peer)
        own = dict(self._history)
        for rank in sorted(chosen):
            theirs = self._ask(partial(self._board.progress_of, rank))
            for number, text in theirs:
                if number in own and own[number] != text:
                    self._mismatch(rank, number, own[number], text)

    def _mismatch(self, rank: int, number: int, own: str, theirs: str) -> NoReturn:
        here, there = self._ranks.name(self._ranks.rank), self._ranks.name(rank)
        self.fail(
            RankMismatch(
                f"ranks are in different operations: as its exchange number {number} {here} does "
                f"[{own}] and {there} does [{theirs}]. Every rank must run the same layers in the "
                "same order, whatever its labels, masks and requires_grad are"
            ),
            own,
        )

    def _check_device_works(self) -> None:
        works = self._on_device
        while works and works[0][0].is_completed():
            works.popleft()
        if works:
            _, start, waiting = works[0]
            waited = time.monotonic() - start
            if waited > POLL_SECONDS:
                self.raise_remote_failure()
            if waited > self._timeout:
                self._time_out(waited, waiting)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
