"""Kernels and memory of a launch plan: arguments, tiles, constants, rooms.

Contract: what `planning` builds on; see there. `memory` maps the pointer names of the generated
kernels to rooms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from flexla_dist.compiler.executor import launch as launching
from flexla_dist.compiler.executor import triton_run as running
from flexla_dist.compiler.executor.choosing import Choice, buckets_of
from flexla_dist.compiler.executor.launch import Launch, power_of_two
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.rooms import Event, Room, Rooms, place_of
from flexla_dist.compiler.executor.segments import Segments, cut
from flexla_dist.compiler.executor.triton_run import Step
from flexla_dist.compiler.kernels import LOOPS, Kernel, buffer_name
from flexla_dist.compiler.pipeline import GRAD_OUTPUT
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims

if TYPE_CHECKING:
    from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor

States = tuple[Tensor, ...]
Heads = tuple[int, int]  # the first one of a group of heads, and how many
TABLES = ("chunk_start", "chunk_length", "document_chunk", "document_start")


@dataclass(frozen=True)
class Arguments:
    """Tensors of a call beside those of its problem; backward has the last three."""

    entry: States
    grad_output: tuple[Tensor, ...] = ()
    grad_exit: States = ()
    saved: States = ()

    @property
    def tensors(self) -> States:
        """All of them, in the order of a plan's arguments."""
        return (*self.entry, *self.grad_output, *self.grad_exit, *self.saved)


@dataclass
class Entering:
    """States entering the segments and M of each segment, by the name of the state."""

    states: dict[str, Room] = field(default_factory=dict)
    maps: dict[str, Room] = field(default_factory=dict)


@dataclass(frozen=True)
class Configured:
    """How a kernel is launched, whatever B and T are."""

    tiles: int
    rows: int
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    choice: Choice


class LaunchPlanner:
    """Adds kernels, and the memory that they need, to the events of one direction."""

    def __init__(
        self,
        executor: TritonExecutor,
        problem: Problem,
        direction: str,
        arguments: Arguments,
        shrink: int = 0,
        pauses: tuple[Heads, ...] = (),
    ):
        """pauses: the groups of heads between which a plan pauses; none if it does not."""
        self.executor, self.problem, self.direction = executor, problem, direction
        self.shrink, self.pauses = shrink, bool(pauses)
        self.every: Heads = (0, problem.heads)
        self.groups = pauses or (self.every,)
        self.forward = direction == "forward"
        self.schedule = executor.forward_schedule if self.forward else executor.backward_schedule
        self.gates = executor.gates(direction)
        launching.check_sizes(problem, self.schedule.column)
        layout = problem.layout
        self.tile_c = max(launching.MIN_TILE, layout.chunk_size)
        self.lanes = 1 if layout.packed else problem.batch
        self.chunks_per_lane = len(layout.chunks)
        self.num_chunks = self.lanes * self.chunks_per_lane
        self.uneven = executor.uneven_dims(problem)
        self.buckets = buckets_of(problem)
        self.segments = self._choose_segments()
        self.rooms = Rooms(self.pauses)
        self.memory: dict[str, Room] = {}
        self.entering = Entering()
        self.results: dict[str, Room] = {}
        self._add_arguments(arguments)

    def _choose_segments(self) -> Segments | None:
        """Segments of the scans; None where documents alone fill the device. A plan that pauses has
        them always, whole documents if need be: they are what ranks exchange."""
        cutting = self.executor.cutting(self.problem, len(self.groups))
        layout = self.problem.layout
        if cutting is None:
            return cut(layout, max(len(layout.chunks), 1)) if self.pauses else None
        segments = cut(layout, cutting.length(self.num_chunks))
        return segments if self.pauses or segments.count > self.problem.num_sequences else None

    # -- arguments ----------------------------------------------------------------------------

    def _add_arguments(self, arguments: Arguments) -> None:
        """Slots in the order of the arguments, then tables."""
        problem, rooms = self.problem, self.rooms
        for name, x in (*problem.inputs.items(), *problem.params.items()):
            self.memory[f"{name}_ptr"] = rooms.argument(x)
        self._add_states("state", arguments.entry)
        for gradient in arguments.grad_output:
            self.memory[f"{GRAD_OUTPUT}_ptr"] = rooms.argument(gradient)
        self._add_states("grad_next", arguments.grad_exit)
        self._add_saved(arguments.saved)
        unread = rooms.table((0,), problem.device)
        self.memory.update(dict.fromkeys(TABLES, unread))
        layout = problem.layout
        if layout.packed:
            self._add_table("chunk_start", [c.start for c in layout.chunks])
            self._add_table("chunk_length", [c.length for c in layout.chunks])
        if layout.packed or self.segments is not None:
            spans = self.segments or cut(layout, max(len(layout.chunks), 1))
            self._add_table("document_chunk", spans.chunks)
            self._add_table("document_start", spans.starts)

    def _add_states(self, kind: str, states: States) -> None:
        for name, state in zip(self.executor.state_names, states, strict=bool(states)):
            self.memory[f"enter_{kind}_{name}_ptr"] = self.rooms.argument(state)
            leaving = Room(tuple(state.shape), state.dtype, kept=True)
            self.memory[f"leave_{kind}_{name}_ptr"] = leaving

    def _add_saved(self, saved: Sequence[Tensor]) -> None:
        """States entering the segments and M of each, if any, then values of the chunks."""
        kept = self.executor.kept
        if not saved:
            return
        rows = None if self.segments is None else self.segments.count
        first = len(saved) - len(kept)
        found = [self.rooms.argument(x, rows) for x in saved[:first]]
        for x, (_, node) in zip(saved[first:], kept, strict=True):
            self.memory[f"{buffer_name(node)}_ptr"] = self.rooms.argument(x, self.num_chunks)
        if self.segments is None or not found:
            return
        names, mapped = self.executor.state_names, self.executor.mapped_states
        self.entering.states = dict(zip(names, found, strict=False))
        self.entering.maps = dict(zip(mapped, found[len(names) :], strict=True))

    def _add_table(self, name: str, values: Sequence[int]) -> None:
        self.memory[name] = self.rooms.table(values, self.problem.device)

    # -- launches -----------------------------------------------------------------------------

    def launch(
        self,
        built: Built,
        override: Mapping[str, Room] | None = None,
        keep: bool = True,
        columns: int | None = None,
        heads: Heads | None = None,
    ) -> None:
        """Add one kernel; `override` replaces memory, `columns` the size of the last dim of what
        the kernel carries; `heads`: of a loop, those that it is for."""
        kernel, emitted = built.kernel, built.emitted
        how = self._configured(built, keep, columns)
        if kernel.kind != "map":
            self._allocate(built, how.tiles)
        memory = {**self.memory, **(override or {})}
        rooms = tuple(memory[name] for name in emitted.pointers)
        units = self.num_chunks
        if kernel.kind in LOOPS:
            units = self.segments.count if self.segments else self.problem.num_sequences
        first, count = heads or self.every
        grid = (units * how.tiles * how.rows, count)
        numbers = tuple(
            first if name == "first_head" else self.number(name) for name in emitted.numbers
        )
        self._add_launch(built.function, grid, rooms, numbers, how.constants, how.options)

    def _configured(self, built: Built, keep: bool, columns: int | None) -> Configured:
        """Tiles and constants, found once for all B and T."""
        kernel, problem = built.kernel, self.problem
        packed = problem.layout.packed or (kernel.kind in LOOPS and self.segments is not None)
        key: tuple[Any, ...] = (kernel.name, self.direction, problem.family.sizes, self.tile_c)
        key = (*key, packed, keep, columns, self.shrink, self.uneven, self.buckets)
        key = (*key, *self.executor.choice, self.executor.refusal(problem, self.direction))
        found = self.executor.configured.get(key)
        if found is None:
            choice = self.executor.choose(problem, self.direction, built, self.shrink)
            launch = choice.launch
            if columns and kernel.whole:  # then every program holds them all
                width = max(launch.column_tile, power_of_two(columns))
                launch = replace(launch, column_tile=width)
            tiles = launching.column_tiles(problem, self.schedule, kernel, launch, columns)
            constants = {
                name: self.constant(name, kernel, launch, tiles, keep, columns)
                for name in built.emitted.constants
            }
            options = launch.options(problem.device)
            rows = launching.row_tiles(problem, kernel)
            found = Configured(tiles, rows, constants, options, choice)
            self.executor.configured[key] = found
        return found

    def _add_launch(
        self,
        function: Any,
        grid: tuple[int, int],
        rooms: tuple[Room, ...],
        numbers: tuple[int | str, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, int],
    ) -> None:
        wide = [type(n) is int and n.bit_length() > 31 for n in numbers]
        dtypes = [room.dtype for room in rooms]
        values = (*constants.values(), *options.values())
        key = (id(function), self.problem.device, *dtypes, *wide, *values)
        compiled = self.executor.compiled

        def make() -> Step:
            places = tuple(place_of(room) for room in rooms)
            return running.Launch(
                function, grid, places, numbers, constants, options, compiled, key
            )

        self.rooms.events.append(Event(rooms, make))

    def number(self, name: str) -> int | str:
        """A run-time number of a launch: known, or the name of a scalar."""
        known = {
            "T": self.problem.tokens,
            "chunks_per_lane": self.chunks_per_lane,
            "num_chunks": self.num_chunks,
            "num_tokens": self.problem.batch * self.problem.tokens,
        }
        return known.get(name, name)

    def constant(
        self,
        name: str,
        kernel: Kernel,
        launch: Launch,
        tiles: int,
        keep: bool = True,
        columns: int | None = None,
    ) -> Any:
        """A constexpr of a launch."""
        problem = self.problem
        replaced = {x.meta["dims"][-1]: columns for x in kernel.carried if columns}
        if name.startswith("size_"):
            dim = name.removeprefix("size_")
            if dim == TOKEN_DIM:
                return problem.layout.chunk_size
            return replaced.get(dim) or problem.size(dim)
        if name == "tile_C":
            return self.tile_c
        if name.startswith("tile_"):
            dim = name.removeprefix("tile_")
            tile = power_of_two(replaced.get(dim) or problem.size(dim))
            if dim == kernel.row_dim:
                return launching.row_tile(problem, kernel)
            return min(tile, launch.column_tile) if dim == self.schedule.column else tile
        if name.startswith("parts_"):
            return self.memory[f"{name.removeprefix('parts_')}_ptr"].shape[0]
        if name.startswith("heads_"):
            return self._group_heads(name.removeprefix("heads_"))
        packed = problem.layout.packed or (kernel.kind in LOOPS and self.segments is not None)
        return {
            "KEEP": keep,
            "STAGES": launch.num_stages,
            "num_row_tiles": launching.row_parts(self.problem, kernel),
            "HV": problem.heads,
            "MODE": launching.dot_mode(problem.output_dtype),
            "PACKED": packed,
            "num_tiles": tiles,
        }[name]

    def _group_heads(self, group: str) -> int:
        for name, item in self.problem.spec.input_specs.items():
            if item.group == group:
                return int(self.problem.inputs[name].shape[2])
        raise AssertionError(f"no input has head group {group}")

    # -- memory -------------------------------------------------------------------------------

    def _allocate(self, built: Built, tiles: int) -> None:
        dtype = self.problem.output_dtype
        for node in built.kernel.carried:
            name = f"{node.meta['key']}_ptr"
            if name not in self.memory and built.kernel.history:
                self.memory[name] = Room(self._block_shape(node), launching.storage_dtype(dtype))
        for name, node in built.kernel.stores.items():
            if f"{name}_ptr" in self.memory:
                continue
            sliced = tiles if name in built.emitted.sliced else 1
            target = name.removeprefix("grad_")
            if target in self.problem.inputs and name.startswith("grad_"):
                self._new_gradient(name, target, sliced)
            else:
                kind = launching.value_dtype(name, node, self.gates, dtype)
                shape = self._block_shape(node)
                if not self.forward or all(node is not mine for mine, _ in self.executor.kept):
                    shape = (sliced, *shape)
                self.memory[f"{name}_ptr"] = Room(shape, kind)

    def _new_gradient(self, name: str, target: str, sliced: int) -> None:
        x = self.problem.inputs[target]
        whole = sliced == 1 and x.shape[2] == self.problem.heads
        if whole:
            self.memory[f"{name}_ptr"] = Room(tuple(x.shape), x.dtype, kept=True)
            return
        shape = (sliced, *x.shape[:2], self.problem.heads, *x.shape[3:])
        self.memory[f"{name}_ptr"] = Room(shape, torch.float32)

    def _block_shape(self, node: fx.Node) -> tuple[int, ...]:
        return (self.num_chunks, self.problem.heads, *self._sizes(node.meta["dims"]))

    def _sizes(self, dims: Dims) -> tuple[int, ...]:
        return tuple(
            self.tile_c if d == TOKEN_DIM else self.problem.size(d) for d in dims if d != UNIT_DIM
        )

    def _add_helper(
        self,
        name: str,
        subject: str,
        programs: int,
        rooms: tuple[Room, ...],
        constants: dict[str, Any],
        heads: Heads | None = None,
    ) -> None:
        """Add a kernel of `fold_kernel` for the state of the argument `subject`; `heads`: those
        that it is for, if it takes a range of them."""
        function = self.executor.helper(self.direction, name, subject)
        numbers = () if heads is None else heads[:1]
        grid = (programs, self.problem.heads if heads is None else heads[1])
        options = {"num_warps": 4, "num_stages": 1}
        self._add_launch(function, grid, rooms, numbers, constants, options)
