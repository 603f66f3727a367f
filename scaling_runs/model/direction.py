"""One direction of a call as programs see it: ranks in the order of the scan, work, messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scaling_runs.model.events import Event, Process
from scaling_runs.model.network import Network
from scaling_runs.model.workload import Workload


@dataclass(frozen=True)
class Direction:
    """One direction of a call: before the exchange `pre`, after it `post`, seconds."""

    network: Network
    load: Workload
    reverse: bool
    pre: float
    post: float

    @property
    def ranks(self) -> int:
        """P."""
        return self.load.ranks

    def rank(self, at: int) -> int:
        """The rank at a place of the scan."""
        return self.ranks - 1 - at if self.reverse else at

    def send(self, kind: str, at: int, to: int, size: float, what: object) -> None:
        """Post a message from place to place."""
        key = (self.reverse, at, to, what)
        self.network.send(kind, self.rank(at), self.rank(to), size, key)

    def received(self, at: int, to: int, what: object) -> Event:
        """Post the receive of a message; the event is its arrival."""
        return self.network.receive((self.reverse, at, to, what))

    def gather(self, what: object, size: float) -> Event:
        """Take part in an all-gather."""
        return self.network.gather((self.reverse, what), size)

    def work(self, at: int, seconds: float):  # type: ignore[no-untyped-def]
        """Computing at a place."""
        return self.network.compute(self.rank(at), seconds)


Program = Callable[[Direction, int], Process]
