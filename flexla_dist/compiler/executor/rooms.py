"""Memory of a launch plan: what lives when, in slots and blocks.

Contract: a planner names rooms and adds events in order; `Rooms.steps` turns them into steps that
make memory just before the first event that touches it and drop it just after the last. Rooms
between kernels share blocks, so that a call asks for memory few times: most of them one block, in
which a room may lie where another one lay before (see `packing`); those that are left over one for
each span of events. A plan that pauses is read from other streams than its own: there no room takes
another's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexla_dist.compiler.executor import triton_run as running
from flexla_dist.compiler.executor.packing import Need, choose, pack
from flexla_dist.compiler.executor.tables import Table, found_table
from flexla_dist.compiler.executor.triton_run import Place, Step

SMALL = 1 << 18  # bytes; smaller rooms of a plan that pauses share one block


@dataclass(eq=False)
class Room:
    """A tensor that a plan will have: given, made by an operation, a result, or between kernels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slot: int | None = None
    kept: bool = False  # a result: memory of its own, never dropped
    filled: bool = False  # whoever fills it brings the memory
    first: int = -1
    last: int = -1
    place: Place | None = None

    @property
    def bytes(self) -> int:
        """Size in memory."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    @property
    def need(self) -> Need:
        """Size, and the events that touch it."""
        return Need(self.bytes, self.first, self.last)


@dataclass
class Event:
    """A step to come, with the rooms that it touches."""

    rooms: tuple[Room, ...]
    make: Callable[[], Step]


class Rooms:
    """Slots, events in order, and from them the steps of a plan."""

    def __init__(self, pauses: bool = False) -> None:
        self.pauses = pauses
        self.slots = 0
        self.given: list[int | None] = []
        self.tables: list[tuple[int, Table]] = []
        self.events: list[Event] = []

    def new_slot(self) -> int:
        """The next slot."""
        self.slots += 1
        return self.slots - 1

    def argument(self, x: Tensor, rows: int | None = None) -> Room:
        """A room for the next argument of the call, of which `rows` rows (None: all) count."""
        shape = tuple(x.shape) if rows is None else (rows, *x.shape[1:])
        self.given.append(rows)
        return Room(shape, x.dtype, self.new_slot(), filled=True)

    def table(self, numbers: Sequence[int], device: torch.device) -> Room:
        """Integers on the device."""
        table = found_table(numbers, device)
        room = Room((max(len(numbers), 1),), torch.int32, self.new_slot(), filled=True)
        assert room.slot is not None
        self.tables.append((room.slot, table))
        return room

    def zeros(self, shape: tuple[int, ...]) -> Room:
        """Zeros that are only read."""
        room = Room(shape, torch.float32, self.new_slot(), filled=True)
        assert room.slot is not None
        self.events.append(Event((room,), partial(running.Zeros, room.slot, shape)))
        return room

    def compute(
        self, function: Callable[..., Tensor], *sources: Room, like: Room | None = None
    ) -> Room:
        """The result of PyTorch operations, in memory of its own; `like` has its shape and dtype
        where they matter."""
        shape, dtype = (like.shape, like.dtype) if like else ((), torch.float32)
        room = Room(shape, dtype, self.new_slot(), filled=True)

        def make() -> Step:
            assert room.slot is not None
            return running.Compute(function, tuple(place_of(x) for x in sources), room.slot)

        self.events.append(Event((*sources, room), make))
        return room

    def steps(self) -> tuple[Step, ...]:
        """All steps: memory is made just before and dropped just after it is needed."""
        for at, event in enumerate(self.events):
            for room in event.rooms:
                room.first = at if room.first < 0 else room.first
                room.last = at
        made, dropped = self._memory()
        dropped.pop(len(self.events) - 1, None)  # the run ends there
        out: list[Step] = []
        for at, event in enumerate(self.events):
            out.extend(made.get(at, ()))
            out.append(event.make())
            if at in dropped:
                out.append(running.Release(tuple(dropped[at])))
        return tuple(out)

    def _memory(self) -> tuple[dict[int, list[Step]], dict[int, list[int]]]:
        """What is made before and what dropped after each event."""
        made: dict[int, list[Step]] = {}
        dropped: dict[int, list[int]] = {}
        every = dict.fromkeys(room for event in self.events for room in event.rooms)
        for room in every:
            if room.filled:
                assert room.slot is not None
                if not room.kept:
                    dropped.setdefault(room.last, []).append(room.slot)
            elif room.kept:
                room.slot = self.new_slot()
                step = running.Allocate(room.slot, room.shape, room.dtype)
                made.setdefault(room.first, []).append(step)
        for rooms in self._blocks([x for x in every if not x.filled]):
            first, last = min(x.first for x in rooms), max(x.last for x in rooms)
            slot, size = self._place(rooms)
            step = running.Allocate(slot, (size // running.BLOCK_ITEM,), torch.float32)
            made.setdefault(first, []).append(step)
            dropped.setdefault(last, []).append(slot)
        return made, dropped

    def _blocks(self, rooms: Sequence[Room]) -> list[list[Room]]:
        """Rooms that share a block."""
        between = [x for x in rooms if not x.kept]
        if self.pauses:
            shared = {at for at, x in enumerate(between) if x.bytes <= SMALL}
        else:
            end = len(self.events)
            results = [Need(x.bytes, x.first, end) for x in rooms if x.kept]
            shared = choose([x.need for x in between], results)
        blocks: dict[tuple[int, int] | None, list[Room]] = {}
        for at, room in enumerate(between):
            lives = None if at in shared else (room.first, room.last)
            blocks.setdefault(lives, []).append(room)
        return list(blocks.values())

    def _place(self, rooms: Sequence[Room]) -> tuple[int, int]:
        """Give rooms their places in a block; returns its slot and size."""
        end, slot = len(self.events), self.new_slot()
        needs = [Need(x.bytes, 0, end) if self.pauses else x.need for x in rooms]
        offsets, size = pack(needs)
        for room, offset in zip(rooms, offsets, strict=True):
            room.place = Place(slot, offset, room.shape, room.dtype)
        return slot, size


def place_of(room: Room) -> Place:
    """Where a room lies, once its plan has steps."""
    if room.place is None:
        assert room.slot is not None
        room.place = Place(room.slot)
    return room.place
