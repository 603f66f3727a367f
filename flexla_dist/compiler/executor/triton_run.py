"""Runs a launch plan: memory and launches of one direction of one call on the triton executor.

Contract: a plan (made by `planning`) is a list of steps over numbered slots, the same for all calls
of equal shapes, dtypes and documents. A slot holds a tensor: an argument, a table, a result, or a
block of memory for values between kernels with equal lives. A block is made before the first kernel
that writes into it and dropped after the last one that reads it. Nothing of a call stays in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexla_dist.assembler import assembling
from flexla_dist.compiler.executor.direct import Direct, current_stream, direct, watched
from flexla_dist.compiler.executor.segments import Segments
from flexla_dist.compiler.executor.tables import Table, device_zeros, use_tables

if TYPE_CHECKING:
    from flexla_dist.compiler.executor.straight import Straight

BLOCK_ITEM = 4  # bytes of a number of a block: float32, so that poisoned memory is seen
ALIGNMENT = 16  # what Triton specialises pointers on


class Place(NamedTuple):
    """Where a tensor lies: a whole slot, or with `shape` a part of a block at a byte offset."""

    slot: int
    offset: int = 0
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


class Frame:
    """The slots of one run. `plain` launches go through Triton's binder."""

    __slots__ = ("addresses", "device", "plain", "scalars", "slots", "stream")

    def __init__(self, size: int, device: torch.device, scalars: Mapping[str, float]):
        self.slots: list[Any] = [None] * size
        self.addresses = [0] * size
        self.device, self.scalars = device, scalars
        self.stream, self.plain = 0, False

    def put(self, slot: int, x: Tensor) -> None:
        """Fill a slot."""
        self.slots[slot] = x
        address = self.addresses[slot] = x.data_ptr()
        if address % ALIGNMENT:
            self.plain = True

    def tensor(self, place: Place) -> Tensor:
        """The tensor of a place."""
        x = self.slots[place.slot]
        return x if place.shape is None else part(x, place)


def part(block: Tensor, place: Place) -> Tensor:
    """The tensor of a place in its block."""
    assert place.shape is not None and place.dtype is not None
    count = 1
    for size in place.shape:
        count *= size
    first = place.offset // BLOCK_ITEM
    length = -(-count * place.dtype.itemsize // BLOCK_ITEM)
    return block[first : first + length].view(place.dtype)[:count].view(place.shape)


class Step(Protocol):
    """One step of a plan."""

    def __call__(self, frame: Frame) -> None:
        """Do it."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory whose contents are to be written."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, frame: Frame) -> None:
        frame.put(self.slot, torch.empty(self.shape, dtype=self.dtype, device=frame.device))


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zeros that are only read."""

    slot: int
    shape: tuple[int, ...]

    def __call__(self, frame: Frame) -> None:
        frame.put(self.slot, device_zeros(self.shape, torch.float32, frame.device))


@dataclass(frozen=True, slots=True)
class Release:
    """Slots that no later step reads."""

    slots: tuple[int, ...]

    def __call__(self, frame: Frame) -> None:
        for slot in self.slots:
            frame.slots[slot] = None


@dataclass(frozen=True, slots=True)
class Compute:
    """PyTorch operations on tensors."""

    function: Callable[..., Tensor]
    sources: tuple[Place, ...]
    slot: int

    def __call__(self, frame: Frame) -> None:
        frame.put(self.slot, self.function(*[frame.tensor(place) for place in self.sources]))


@dataclass(frozen=True, slots=True)
class Change:
    """PyTorch operations that write into tensors that are there."""

    function: Callable[..., None]
    places: tuple[Place, ...]

    def __call__(self, frame: Frame) -> None:
        self.function(*[frame.tensor(place) for place in self.places])


@dataclass(frozen=True, slots=True)
class Pause:
    """Where a run may stop: at "summary" what the segments do to a group of heads is known, at
    "entry" the rest needs the states (or gradients) of those heads that enter. `places` are S_hat,
    then M, of every state that has it; of all heads, those of later groups are still to come."""

    at: str
    places: tuple[Place, ...] = ()
    group: int = 0

    def __call__(self, frame: Frame) -> None:
        pass


@dataclass(slots=True)
class Launch:
    """One kernel: `numbers` are run-time numbers or names of scalars of the call.

    `compiled` holds kernels that were launched before, `key` is what tells this one from others:
    equal keys compile to the same binary for pointers that 16 divides.
    """

    function: Any
    grid: tuple[int, int]
    places: tuple[Place, ...]
    numbers: tuple[int | str, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    compiled: dict[Any, Any]
    key: tuple[Any, ...]
    again: Direct | None = field(default=None, init=False)
    parts: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = tuple((place.slot, place.offset) for place in self.places)

    def __call__(self, frame: Frame) -> None:
        scalars = frame.scalars
        numbers = [scalars[n] if type(n) is str else n for n in self.numbers]
        if self.again is None and not frame.plain:
            self._find(self.compiled.get(self.key))
        again = self.again
        if again is None or frame.plain:
            pointers = [frame.tensor(place) for place in self.places]
            with assembling(frame.device) as sound:
                options = {**self.constants, **self.options, **sound}
                kernel = self.function[self.grid](*pointers, *numbers, **options)
            if not frame.plain:
                self._find(kernel)
            return
        addresses = frame.addresses
        again(frame.stream, [*[addresses[i] + at for i, at in self.parts], *numbers])

    def _find(self, kernel: Any) -> None:
        """Launch this kernel directly from now on, if that can be done."""
        self.again = direct(self.function, kernel, self.grid, self.constants)
        if self.again is not None:
            self.compiled[self.key] = kernel


@dataclass(eq=False)
class Plan:
    """Steps of one direction.

    `given` has for each argument the number of rows that count (None: all), arguments fill the
    first slots. `results` are the slots of the results, in the planner's order; `segments` those of
    its scans; `code` the same steps as a function, once there is one after `runs` without.
    """

    size: int
    given: tuple[int | None, ...]
    tables: tuple[tuple[int, Table], ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    segments: Segments | None = None
    code: Straight | None = None
    runs: int = 0

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernels in order."""
        return tuple(step for step in self.steps if isinstance(step, Launch))


def run(
    plan: Plan, arguments: Sequence[Tensor], scalars: Mapping[str, float], device: torch.device
) -> list[Any]:
    """The slots after all steps."""
    run = Run(plan, arguments, scalars, device)
    run.proceed()
    return run.frame.slots


class Run:
    """A plan under way, which may stop at its pauses."""

    def __init__(
        self,
        plan: Plan,
        arguments: Sequence[Tensor],
        scalars: Mapping[str, float],
        device: torch.device,
    ):
        self.plan, self.device, self.at = plan, device, 0
        self.frame = frame = Frame(plan.size, device, scalars)
        frame.stream = current_stream(device)
        frame.plain = watched()
        for slot, x in enumerate(arguments):
            self.give(slot, x)
        if plan.tables:
            use_tables([table for _, table in plan.tables], device, frame.stream)
            for slot, table in plan.tables:
                frame.put(slot, table.values)

    def give(self, slot: int, x: Tensor) -> None:
        """Fill the slot of an argument."""
        rows = self.plan.given[slot]
        if rows is not None and x.shape[0] != rows:
            x = x[:rows]
        self.frame.put(slot, x if x.is_contiguous() else x.contiguous())

    def proceed(self, until: str = "", group: int = 0) -> Pause | None:
        """Run to the pause of that name and group, which is returned, or to the end."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self._proceed(until, group)
        return self._proceed(until, group)

    def _proceed(self, until: str, group: int) -> Pause | None:
        frame, steps = self.frame, self.plan.steps
        frame.stream = current_stream(self.device)
        while self.at < len(steps):
            step = steps[self.at]
            self.at += 1
            step(frame)
            if until and type(step) is Pause and (step.at, step.group) == (until, group):
                return step
        return None
