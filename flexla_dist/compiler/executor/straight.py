"""A launch plan as one Python function: what a repeated call runs.

Contract: the steps of a plan, in their order, as straight code. Slots are local variables, pointers
are integers, everything that is the same for all calls of the plan is a constant in the code:
grids, run-time integers, constants, launchers, shapes. `run` gives None, before it has launched
anything, where 16 does not divide a pointer; `start` gives None where a call must take the ordinary
way for another reason: somebody listens to launches, a CUDA graph is captured (it has to keep the
tables that it reads), or another device is current. Plans that pause, and launches that cannot be
made directly, have no such function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexla_dist.compiler.executor import memory
from flexla_dist.compiler.executor.direct import Direct, current_stream, watched
from flexla_dist.compiler.executor.tables import MOST_ZEROS, device_zeros
from flexla_dist.compiler.executor.triton_run import (
    ALIGNMENT,
    Allocate,
    Compute,
    Launch,
    Place,
    Plan,
    Release,
    Zeros,
    part,
)

PATIENCE = 3  # runs of a plan before its code is written, which takes as long as a few runs more
Results = tuple[Any, ...]
Function = Callable[[Sequence[Tensor], Mapping[str, float], int], Results | None]


class Straight:
    """The function of a plan, its source, and the tensors that all its calls read."""

    __slots__ = ("_held", "_streams", "computes", "device", "run", "source")

    def __init__(
        self,
        run: Function,
        source: str,
        device: torch.device,
        held: Sequence[Tensor],
        computes: bool,
    ):
        """computes: whether PyTorch operations are among the steps."""
        self.run, self.source, self.device, self.computes = run, source, device, computes
        self._held = list(held)
        self._streams: set[int] = set()  # those that the memory of `_held` waits for

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that calls read beside those of the plan."""
        fresh = [x for x in tensors if all(x is not y for y in self._held)]
        if fresh:
            self._held += fresh
            self._streams = set()

    def __call__(self, tensors: Sequence[Tensor], scalars: Mapping[str, float]) -> Results | None:
        """The results of a call in the planner's order; None where it takes the ordinary way."""
        stream = self.start()
        return None if stream is None else self.run(tensors, scalars, stream)

    def start(self) -> int | None:
        """The current stream for `run`; None where the call must take the ordinary way."""
        if watched():
            return None
        device = self.device
        if device.type != "cuda":
            return 0
        if device.index != torch.cuda.current_device():
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = current_stream(device)
        if stream not in self._streams:
            here = torch.cuda.current_stream(device)
            for x in self._held:
                x.record_stream(here)
            self._streams.add(stream)
        return stream


def straight(plan: Plan, device: torch.device) -> Straight | None:
    """The function of a plan; None where it has none, or none before its first run."""
    if any(launch.again is None for launch in plan.launches):
        return None
    try:
        return _Writer(plan, device).finish()
    except _NotStraight:
        return None


class _NotStraight(Exception):
    """A plan that cannot be written as straight code."""


class _Writer:
    """Writes the function of a plan."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan, self.device = plan, device
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "__name__": __name__,  # tests know by it whose memory they fill
            "memory": memory,
            "torch": torch,
            "part": part,
            "aligned": _aligned,
            "device": device,
        }
        self.known: dict[int, int] = {}  # addresses of the tensors that all calls read
        self.held: list[Tensor] = []
        self.floats: dict[str, str] = {}  # names of scalars
        self.computes = False

    def finish(self) -> Straight:
        """The function."""
        for slot, table in self.plan.tables:
            self._hold(slot, table.values)
        self._arguments()
        for step in self.plan.steps:
            self._step(step)
        results = ", ".join(f"s{slot}" for slot in self.plan.results)
        self.lines.append(f"return ({results},)")
        source = "def run(arguments, scalars, stream):\n    " + "\n    ".join(self.lines) + "\n"
        exec(compile(source, "<launch plan>", "exec"), self.names)
        run = self.names["run"]
        return Straight(run, source, self.device, self.held, self.computes)

    # -- names --------------------------------------------------------------------------------

    def _constant(self, value: Any) -> str:
        """How the code names something that all calls share."""
        if value is None or type(value) in (int, bool):
            return repr(value)
        for name, known in self.names.items():
            if known is value:
                return name
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _hold(self, slot: int, x: Tensor) -> None:
        """A tensor that all calls read."""
        address = x.data_ptr()
        if address % ALIGNMENT:
            raise _NotStraight
        self.known[slot] = address
        self.names[f"s{slot}"] = x
        self.held.append(x)

    def _address(self, slot: int, offset: int) -> str:
        if slot in self.known:
            return repr(self.known[slot] + offset)
        return f"a{slot} + {offset}" if offset else f"a{slot}"

    # -- steps --------------------------------------------------------------------------------

    def _arguments(self) -> None:
        count = len(self.plan.given)
        self.lines.append(", ".join(f"s{slot}" for slot in range(count)) + ", = arguments")
        for slot, rows in enumerate(self.plan.given):
            s = f"s{slot}"
            if rows is not None:
                self.lines.append(f"if {s}.shape[0] != {rows}: {s} = {s}[:{rows}]")
            self.lines.append(f"if not {s}.is_contiguous(): {s} = {s}.contiguous()")
            self.lines.append(f"a{slot} = {s}.data_ptr()")
        pointers = " | ".join(f"a{slot}" for slot in range(count))
        self.lines.append(f"if ({pointers}) & {ALIGNMENT - 1}: return None")
        numbers = {n for launch in self.plan.launches for n in launch.numbers if type(n) is str}
        for at, number in enumerate(sorted(numbers)):
            self.floats[number] = f"n{at}"
            self.lines.append(f"n{at} = scalars[{number!r}]")

    def _step(self, step: Any) -> None:
        if isinstance(step, Launch):
            self._launch(step)
        elif isinstance(step, Allocate):
            self._allocate(step)
        elif isinstance(step, Release):
            names = [f"s{slot} = " for slot in step.slots if slot not in self.known]
            if names:
                self.lines.append("".join(names) + "None")
        elif isinstance(step, Zeros):
            self._zeros(step)
        elif isinstance(step, Compute):
            self._compute(step)
        else:
            raise _NotStraight

    def _launch(self, step: Launch) -> None:
        again = step.again
        assert isinstance(again, Direct)
        numbers = [self.floats[n] if type(n) is str else repr(n) for n in step.numbers]
        words = [
            *map(self._constant, (*again.grid, 1)),
            "stream",
            *map(self._constant, again.front),
            *[self._address(slot, offset) for slot, offset in step.parts],
            *numbers,
            *map(self._constant, again.tail),
        ]
        self.lines.append(f"{self._constant(again.launch)}({', '.join(words)})")

    def _allocate(self, step: Allocate) -> None:
        kind = self._constant(step.dtype)
        if self.device.type in ("cuda", "cpu"):
            strides = memory.row_major(step.shape)
            made = f"memory.empty_{self.device.type}({step.shape}, {strides}, {kind})"
        else:
            made = f"torch.empty({step.shape}, dtype={kind}, device=device)"
        self._made(step.slot, made)

    def _zeros(self, step: Zeros) -> None:
        if math.prod(step.shape) <= MOST_ZEROS:
            self._hold(step.slot, device_zeros(step.shape, torch.float32, self.device))
        else:
            made = f"torch.zeros({step.shape}, dtype=torch.float32, device=device)"
            self._made(step.slot, made)

    def _compute(self, step: Compute) -> None:
        self.computes = True
        sources = ", ".join(self._tensor(place) for place in step.sources)
        self._made(step.slot, f"aligned({self._constant(step.function)}({sources}))")

    def _tensor(self, place: Place) -> str:
        whole = f"s{place.slot}"
        return whole if place.shape is None else f"part({whole}, {self._constant(place)})"

    def _made(self, slot: int, made: str) -> None:
        self.lines.append(f"s{slot} = {made}")
        self.lines.append(f"a{slot} = s{slot}.data_ptr()")


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy whose pointer 16 divides, as the kernels that follow are compiled for."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x
