"""A thread that notices, while a device waits, that another rank failed or that its process ended.

Contract: it asks the store and looks at processes only while exchanges are under way, twice a
second. What it finds is final for the group: it ends this rank's waits, those of kernels before
those of a communicator, whose end waits for the device; the next exchange or check raises it.
"""

from __future__ import annotations

import json
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from flexla_dist.comm.errors import ExchangeError, RemoteRankError
from flexla_dist.comm.failures import FailureBoard
from flexla_dist.comm.heaps.place import Place
from flexla_dist.comm.links import GroupRanks

LOOK_SECONDS = 0.5
IDLE_SECONDS = 5.0


def own_place() -> str:
    """This process, as text for the other ranks."""
    return json.dumps(Place.here().as_fields())


class Waits(ABC):
    """Waits of one kind on this rank's device.

    active: they are to be looked after; `Lookout.start` and `rest` set it.
    """

    active = False

    def under_way(self) -> bool:
        """Whether the device waits for another rank; asked only once something was found."""
        return self.active

    def overdue(self) -> ExchangeError | None:
        """What to raise for a wait that has lasted too long, None where there is none."""
        return None

    @abstractmethod
    def end(self, error: ExchangeError) -> None:
        """End them all, for this reason; called by the thread of the Lookout."""


class Lookout:
    """Looks after the other ranks of a group.

    places: `own_place` of every rank.
    """

    def __init__(self, ranks: GroupRanks, places: Sequence[str]) -> None:
        self._ranks = ranks
        self._places = [Place(**json.loads(text)) for text in places]
        self._board = FailureBoard(ranks)
        self._waits: list[Waits] = []
        self._busy = threading.Event()
        self._looking = threading.Lock()
        self._seen_ended: set[int] = set()
        self._thread: threading.Thread | None = None
        self.error: ExchangeError | None = None

    def name_of(self, rank: int) -> str:
        """A rank in messages."""
        return self._ranks.name(rank)

    def add(self, waits: Waits, *, first: bool = False) -> None:
        """Look after these as well. first: they are ended before those that are there."""
        with self._looking:
            self._waits.insert(0 if first else len(self._waits), waits)

    def start(self, waits: Waits) -> None:
        """Look from now on."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_look_forever,
                args=(weakref.ref(self), self._busy),
                name="flexla-lookout",
                daemon=True,
            )
            self._thread.start()
        waits.active = True
        self._busy.set()

    def rest(self, waits: Waits) -> None:
        """Look no more until the next `start`; a look under way is over when this returns."""
        with self._looking:
            waits.active = False
            self._seen_ended.clear()
            if not any(others.active for others in self._waits):
                self._busy.clear()

    def raise_error(self) -> None:
        """Raise what was found, if anything was."""
        if self.error is not None:
            raise type(self.error)(str(self.error))

    def look(self) -> None:
        """Look once, and end this rank's waits if something is found that they wait for."""
        with self._looking:
            active = [waits for waits in self._waits if waits.active]
            if self.error is not None or not active:
                return
            found, own = self._found(active)
            if found is None or not any(waits.under_way() for waits in active):
                return
            self.error = found
            if own:  # ranks on other hosts cannot see it
                with suppress(Exception):  # the store may have gone as well
                    self._board.publish(found, "an exchange of states")
            for waits in self._waits:
                waits.end(found)

    def _found(self, active: Sequence[Waits]) -> tuple[ExchangeError | None, bool]:
        """What went wrong, and whether other ranks are still to be told."""
        try:
            failure = self._board.failure()
        except Exception as cause:
            return self._lost_store(cause), False
        if failure is not None and failure.rank != self._ranks.rank:
            return failure.as_error(self._ranks), False
        ended = self._ended()
        if ended is not None or self._seen_ended:
            return ended, True
        late = (waits.overdue() for waits in active)
        return next((error for error in late if error is not None), None), True

    def _lost_store(self, cause: Exception) -> RemoteRankError:
        return RemoteRankError(
            f"{self._ranks.name(self._ranks.rank)} lost the store of its group: the process that "
            f"holds it has probably ended. The store said: {' '.join(str(cause).split())}"
        )

    def _ended(self) -> RemoteRankError | None:
        """A rank that two looks saw ended: one that has done its part may end while this one is
        still on its way out of the last check."""
        here = self._places[self._ranks.rank]
        for rank, place in enumerate(self._places):
            if rank == self._ranks.rank or not place.has_ended(here):
                continue
            if rank in self._seen_ended:
                return RemoteRankError(
                    f"the process of {self._ranks.name(rank)} (pid {place.pid}) has ended while "
                    f"{self._ranks.name(self._ranks.rank)} exchanged states with it; look at its "
                    "log"
                )
            self._seen_ended.add(rank)
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
