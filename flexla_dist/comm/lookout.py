"""A thread that notices, while kernels wait, that another rank failed or that its process ended.

Contract: it asks the store and looks at processes only while exchanges are under way, twice a
second. What it finds is final for the group: it ends this rank's waits and is raised by the next
exchange or check.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence

from flexla_dist.comm.errors import ExchangeError, RemoteRankError
from flexla_dist.comm.failures import FailureBoard
from flexla_dist.comm.heaps.place import Place
from flexla_dist.comm.links import GroupRanks

LOOK_SECONDS = 0.5
IDLE_SECONDS = 5.0


def own_place() -> str:
    """This process, as text for the other ranks."""
    return json.dumps(Place.here().as_fields())


class Lookout:
    """Looks after the other ranks of a group.

    places: `own_place` of every rank. stop_waits: ends the waits of this rank's kernels.
    """

    def __init__(
        self, ranks: GroupRanks, places: Sequence[str], stop_waits: Callable[[], None]
    ) -> None:
        self._ranks = ranks
        self._places = [Place(**json.loads(text)) for text in places]
        self._board = FailureBoard(ranks)
        self._stop_waits = stop_waits
        self._busy = threading.Event()
        self._looking = threading.Lock()
        self._seen_ended: set[int] = set()
        self._thread: threading.Thread | None = None
        self.error: ExchangeError | None = None

    def name_of(self, rank: int) -> str:
        """A rank in messages."""
        return self._ranks.name(rank)

    def start(self) -> None:
        """Look from now on."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_look_forever,
                args=(weakref.ref(self), self._busy),
                name="flexla-lookout",
                daemon=True,
            )
            self._thread.start()
        self._busy.set()

    def rest(self) -> None:
        """Look no more until the next `start`; a look under way is over when this returns."""
        with self._looking:
            self._busy.clear()
            self._seen_ended.clear()

    def raise_error(self) -> None:
        """Raise what was found, if anything was."""
        if self.error is not None:
            raise type(self.error)(str(self.error))

    def look(self) -> None:
        """Look once, and end this rank's waits if something is found."""
        with self._looking:
            if self.error is None and self._busy.is_set():
                self.error = self._found()
                if self.error is not None:
                    self._stop_waits()

    def _found(self) -> ExchangeError | None:
        try:
            failure = self._board.failure()
            if failure is not None and failure.rank != self._ranks.rank:
                return failure.as_error(self._ranks)
            return self._ended()
        except Exception as cause:
            return RemoteRankError(
                f"{self._ranks.name(self._ranks.rank)} lost the store of its group: the process "
                f"that holds it has probably ended. The store said: {' '.join(str(cause).split())}"
            )

    def _ended(self) -> RemoteRankError | None:
        """A rank that two looks saw ended: one that has done its part may end while this one is
        still on its way out of the last check."""
        here = self._places[self._ranks.rank]
        for rank, place in enumerate(self._places):
            if rank == self._ranks.rank or not place.has_ended(here):
                continue
            if rank not in self._seen_ended:
                self._seen_ended.add(rank)
            else:
                error = RemoteRankError(
                    f"the process of {self._ranks.name(rank)} (pid {place.pid}) has ended while "
                    f"{self._ranks.name(self._ranks.rank)} exchanged states with it; look at its "
                    "log"
                )
                # Ranks on other hosts cannot see that process.
                self._board.publish(error, "an exchange of states by kernels")
                return error
        return None


def _look_forever(reference: weakref.ref[Lookout], busy: threading.Event) -> None:
    """Body of the thread; ends with its Lookout."""
    pause = threading.Event()
    while True:
        working = busy.wait(IDLE_SECONDS)
        pause.wait(LOOK_SECONDS)
        lookout = reference()
        if lookout is None or lookout.error is not None:
            return
        if working:
            lookout.look()
        del lookout
