"""Discrete events: processes that compute on resources, wait for events, and meet.

Contract: a process is a generator. It yields `Use` to hold a resource for some time, `Delay` to
let time pass, or an `Event` to wait for. Resources serve in the order of asking. The same program
gives the same times.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

Process = Generator["Use | Delay | Event", None, None]


class Event:
    """Something that happens once; processes wait for it."""

    def __init__(self) -> None:
        self.time: float | None = None
        self.waiting: list[Callable[[], None]] = []


class Resource:
    """Something that `capacity` processes can hold at a time."""

    def __init__(self, capacity: int = 1) -> None:
        self.free = capacity
        self.queue: deque[Callable[[], None]] = deque()


@dataclass(frozen=True)
class Use:
    """Hold all of some resources, taken in their order, for some seconds; in turns of `turn`
    seconds where others wait for them too."""

    resources: tuple[Resource, ...]
    seconds: float
    turn: float = math.inf


@dataclass(frozen=True)
class Delay:
    """Let seconds pass."""

    seconds: float


@dataclass
class Simulation:
    """The clock and what is to happen."""

    now: float = 0.0
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time; what was asked first happens first at the same time."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def spawn(self, process: Process) -> Event:
        """Start a process now; the event is its end."""
        end = Event()
        self.at(self.now, lambda: self._step(process, end))
        return end

    def trigger(self, event: Event) -> None:
        """Let an event happen now; a second time changes nothing."""
        if event.time is not None:
            return
        event.time = self.now
        for action in event.waiting:
            self.at(self.now, action)
        event.waiting.clear()

    def run(self) -> float:
        """Until nothing is left to happen; the last time."""
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        return self.now

    def _step(self, process: Process, end: Event) -> None:
        try:
            wish = next(process)
        except StopIteration:
            self.trigger(end)
            return
        if isinstance(wish, Delay):
            self.at(self.now + wish.seconds, lambda: self._step(process, end))
        elif isinstance(wish, Use):
            self._take(wish, 0, lambda: self._step(process, end))
        elif wish.time is None:
            wish.waiting.append(lambda: self._step(process, end))
        else:
            self._step(process, end)

    def _take(self, use: Use, taken: int, then: Callable[[], None]) -> None:
        """Take the resources one after the other, hold them, give them back, go on."""
        if taken == len(use.resources):
            held = min(use.seconds, use.turn)
            left = Use(use.resources, use.seconds - held, use.turn)
            again = then if held == use.seconds else lambda: self._take(left, 0, then)
            self.at(self.now + held, lambda: self._give_back(use, again))
            return
        resource = use.resources[taken]

        def go_on() -> None:
            self._take(use, taken + 1, then)

        if resource.free:
            resource.free -= 1
            go_on()
        else:
            resource.queue.append(go_on)

    def _give_back(self, use: Use, then: Callable[[], None]) -> None:
        for resource in use.resources:
            if resource.queue:
                self.at(self.now, resource.queue.popleft())
            else:
                resource.free += 1
        then()


class Meeting:
    """A collective: it begins when all ranks are there and the wire is free, and ends some seconds
    later for all."""

    def __init__(self, simulation: Simulation, ranks: int, seconds: float, wire: Resource) -> None:
        self._simulation, self._missing, self._seconds = simulation, ranks, seconds
        self._wire = wire
        self.end = Event()

    def arrive(self) -> Event:
        """Take part; the event is the end."""
        self._missing -= 1
        if self._missing == 0:
            self._simulation.spawn(self._run())
        return self.end

    def _run(self) -> Process:
        yield Use((self._wire,), self._seconds)
        self._simulation.trigger(self.end)
