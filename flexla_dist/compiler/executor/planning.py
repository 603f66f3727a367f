"""Makes the launch plan of one direction for calls of equal shapes, dtypes and documents.

Contract: pure host work on numbers; no tensor of a call is kept. `memory` maps the pointer names of
the generated kernels to rooms; scans run once, or, cut into segments, from zero, folded, and again
(see `segments`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from flexla_dist.compiler.executor import between
from flexla_dist.compiler.executor import fold_kernel as hand
from flexla_dist.compiler.executor import launch as launching
from flexla_dist.compiler.executor import triton_run as running
from flexla_dist.compiler.executor.launch import Launch, power_of_two
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.rooms import Event, Room, Rooms, place_of
from flexla_dist.compiler.executor.segments import Segments, cut
from flexla_dist.compiler.executor.triton_run import Plan, Step
from flexla_dist.compiler.pipeline import GRAD_OUTPUT
from flexla_dist.compiler.schedule import LOOPS, Kernel
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims

if TYPE_CHECKING:
    from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor

States = tuple[Tensor, ...]
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


class Planner:
    """Plans one direction."""

    def __init__(
        self,
        executor: TritonExecutor,
        problem: Problem,
        direction: str,
        arguments: Arguments,
        shrink: int = 0,
    ):
        self.executor, self.problem, self.direction = executor, problem, direction
        self.shrink = shrink
        self.forward = direction == "forward"
        self.schedule = executor.forward_schedule if self.forward else executor.backward_schedule
        self.gates = executor.gates(direction)
        launching.check_sizes(problem, self.schedule.column)
        layout = problem.layout
        self.tile_c = max(launching.MIN_TILE, layout.chunk_size)
        self.lanes = 1 if layout.packed else problem.batch
        self.chunks_per_lane = len(layout.chunks)
        self.num_chunks = self.lanes * self.chunks_per_lane
        self.uneven = self._uneven_dims()
        self.segments = self._choose_segments()
        self.rooms = Rooms()
        self.memory: dict[str, Room] = {}
        self.entering = Entering()
        self.results: dict[str, Room] = {}
        self._add_arguments(arguments)

    def _uneven_dims(self) -> frozenset[str]:
        sizes = self.problem.sizes
        uneven = {dim for dim, size in sizes.items() if size != power_of_two(size)}
        if any(t.has_matrix for t in self.executor.graphs.transitions.values()) and uneven:
            uneven.add(self.schedule.column)  # M is scanned with as many columns as rows
        return frozenset(uneven)

    def _choose_segments(self) -> Segments | None:
        """Segments of the scans; None where documents alone fill the device."""
        cutting = self.executor.cutting(self.problem)
        if cutting is None:
            return None
        segments = cut(self.problem.layout, cutting.length(self.num_chunks))
        return segments if segments.count > self.problem.num_sequences else None

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
        rows = None if self.segments is None else self.segments.count
        found = [self.rooms.argument(x, rows) for x in saved]
        if self.segments is None or not found:
            return
        names, mapped = self.executor.state_names, self.executor.mapped_states
        self.entering.states = dict(zip(names, found, strict=False))
        self.entering.maps = dict(zip(mapped, found[len(names) :], strict=True))

    def _add_table(self, name: str, values: Sequence[int]) -> None:
        self.memory[name] = self.rooms.table(values, self.problem.device)

    # -- the plan -----------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Every kernel in order, then the results."""
        if self.forward:
            problem = self.problem
            output = Room(problem.output_shape(), problem.output_dtype, kept=True)
            self.memory["output_ptr"] = self.results["output"] = output
        if self.num_chunks == 0:
            self._nothing_to_do()
        else:
            for built in self.executor.built(self.direction, self.uneven):
                self._add_kernel(built)
        self._add_results()
        for room in self.results.values():
            room.kept = True
        rooms, steps = self.rooms, self.rooms.steps()
        results = tuple(place_of(room).slot for room in self.results.values())
        return Plan(rooms.slots, tuple(rooms.given), tuple(rooms.tables), steps, results)

    def _add_kernel(self, built: Built) -> None:
        kind = built.kernel.kind
        if kind == "chunk":
            self.launch(built)
        elif kind == "decays":
            self._decays(built)
        elif kind == "map":
            self._map(built)
        elif kind == "summary":
            self._summarise(built)
        else:
            self._loop(built, "state" if kind == "scan" else "grad_next")

    def _nothing_to_do(self) -> None:
        """A call without tokens: states pass through."""
        for name in self.executor.state_names:
            for kind in ("state", "grad_next"):
                entering = self.memory.get(f"enter_{kind}_{name}_ptr")
                if entering is not None:
                    copy = self.rooms.compute(torch.clone, entering)
                    self.memory[f"leave_{kind}_{name}_ptr"] = copy
        if self.forward:
            self._touch(self.results["output"])

    def _touch(self, room: Room) -> None:
        """Memory for a result that no kernel writes, of no tokens."""
        self.rooms.events.append(Event((room,), lambda: running.Release(())))

    def _add_results(self) -> None:
        """Results by name: states and what backward needs, or gradients."""
        names = self.executor.state_names
        if self.forward:
            found = self.entering
            self.results |= {f"leave_{n}": self.memory[f"leave_state_{n}_ptr"] for n in names}
            self.results |= {f"enter_{n}": found.states[n] for n in names if n in found.states}
            self.results |= {f"map_{n}": found.maps[n] for n in names if n in found.maps}
            return
        self.results |= {f"grad_enter_{n}": self.memory[f"leave_grad_next_{n}_ptr"] for n in names}
        for name, x in self.problem.inputs.items():
            self.results[f"grad_{name}"] = self._input_gradient(name, x)
        for name, x in self.problem.params.items():
            self.results[f"grad_{name}"] = self._param_gradient(name, x)

    # -- segments -----------------------------------------------------------------------------

    def _decays(self, built: Built) -> None:
        if self.segments is None:
            return
        self.launch(built)
        for name, node in built.kernel.stores.items():
            dims = tuple(1 if d == UNIT_DIM else self.problem.size(d) for d in node.meta["dims"])
            found = Room((self.segments.count, self.problem.heads, *dims), torch.float32)
            state = name.removeprefix("decay_")
            self._multiply(f"state_{state}", self.memory[f"{name}_ptr"], found)
            self.entering.maps[state] = found

    def _multiply(self, subject: str, decays: Room, found: Room) -> None:
        """M of each segment from those of the chunks."""
        size = math.prod(found.shape[2:])
        blocks = -(-size // hand.PRODUCT_BLOCK)
        constants = {
            "HV": self.problem.heads,
            "SIZE": size,
            "BLOCK": hand.PRODUCT_BLOCK,
            "ROWS": hand.PRODUCT_ROWS,
            "num_blocks": blocks,
        }
        rooms = (decays, self.memory["document_chunk"], found)
        self._add_helper("segment_products", subject, found.shape[0] * blocks, rooms, constants)

    def _add_helper(
        self,
        name: str,
        subject: str,
        programs: int,
        rooms: tuple[Room, ...],
        constants: dict[str, Any],
    ) -> None:
        """Add a kernel of `fold_kernel` for the state of the argument `subject`."""
        function = self.executor.helper(self.direction, name, subject)
        grid = (programs, self.problem.heads)
        options = {"num_warps": 4, "num_stages": 1}
        self._add_launch(function, grid, rooms, (), constants, options)

    def _map(self, built: Built) -> None:
        """M of every segment: the scan of M alone, from the identity."""
        if self.segments is None:
            return
        override: dict[str, Room] = {}
        columns = None
        for node in built.kernel.carried:
            key = node.meta["key"]
            columns = rows = self.problem.size(node.meta["dims"][0])
            shape = (self.segments.count, self.problem.heads, rows, rows)
            identity = partial(between.identities, shape=shape, device=self.problem.device)
            override[f"enter_{key}_ptr"] = self.rooms.compute(identity)
            override[f"leave_{key}_ptr"] = Room(shape, torch.float32)
            override[f"{key}_ptr"] = override[f"leave_{key}_ptr"]
        self.launch(built, override, keep=False, columns=columns)
        for node in built.kernel.carried:
            key = node.meta["key"]
            self.entering.maps[key.removeprefix("state_")] = override[f"leave_{key}_ptr"]

    def _loop(self, built: Built, kind: str) -> None:
        """A scan over all chunks, whole or in segments."""
        if self.segments is None:
            self.launch(built)
            return
        keys = [node.meta["key"] for node in built.kernel.carried]
        known = kind == "state" and bool(self.entering.states)
        entering = self.entering.states if known else self._fold_segments(built, kind, keys)
        if kind == "state":
            self.entering.states = entering
        leave = {key: self._segment_states(key) for key in keys}
        override = {f"enter_{key}_ptr": entering[key.removeprefix(f"{kind}_")] for key in keys}
        override |= {f"leave_{key}_ptr": leave[key] for key in keys}
        self.launch(built, override)
        for key in keys:
            dense = self.executor.graphs.transitions[key.removeprefix(f"{kind}_")].has_matrix
            if dense and not (known and not self.forward):
                self._take_exit(key, leave[key], kind)

    def _summarise(self, built: Built) -> None:
        """States entering the segments, by a scan of its own."""
        if self.segments is None:
            return
        keys = [node.meta["key"] for node in built.kernel.carried]
        self.entering.states = self._fold_segments(built, "state", keys)

    def _segment_states(self, key: str) -> Room:
        assert self.segments is not None
        like = self.memory[f"enter_{key}_ptr"]
        return Room((self.segments.count, *like.shape[1:]), like.dtype)

    def _fold_segments(self, built: Built, kind: str, keys: list[str]) -> dict[str, Room]:
        assert self.segments is not None
        override: dict[str, Room] = {}
        for key in keys:
            local = self._segment_states(key)
            override[f"enter_{key}_ptr"] = self.rooms.zeros(local.shape)
            override[f"leave_{key}_ptr"] = local
            override[f"{key}_ptr"] = local
        self.launch(built, override, keep=False)
        return {
            key.removeprefix(f"{kind}_"): self._fold(key, kind, override[f"leave_{key}_ptr"])
            for key in keys
        }

    def _fold(self, key: str, kind: str, local: Room) -> Room:
        """States entering the segments; where M is elementwise also those leaving documents."""
        assert self.segments is not None
        name, entry = key.removeprefix(f"{kind}_"), self.memory[f"enter_{key}_ptr"]
        found = self.entering.maps.get(name)
        if self.executor.graphs.transitions[name].has_matrix:
            assert found is not None
            reverse = kind != "state"
            function = partial(between.folded, reverse=reverse, segments=self.segments)
            return self.rooms.compute(function, local, entry, found, like=local)
        sizes = (*local.shape[2:], 1, 1)
        mapped = (1, 1) if found is None else (*found.shape[2:], 1, 1)
        size = math.prod(local.shape[2:])
        blocks = -(-size // hand.FOLD_BLOCK)
        constants = {
            "HV": self.problem.heads,
            "ROWS": sizes[0],
            "COLUMNS": sizes[1],
            "MAP_ROWS": mapped[0],
            "MAP_COLUMNS": mapped[1],
            "DECAY": found is not None,
            "REVERSE": kind != "state",
            "BLOCK": hand.FOLD_BLOCK,
            "num_blocks": blocks,
        }
        entering = Room(local.shape, torch.float32)
        leave = self.memory[f"leave_{key}_ptr"]
        rooms = (local, found or local, entry, self._owners(), entering, leave)
        self._add_helper("fold_segments", key, entry.shape[0] * blocks, rooms, constants)
        return entering

    def _owners(self) -> Room:
        """First segment of each document."""
        if "owners" not in self.memory:
            assert self.segments is not None
            documents = self.segments.documents
            counts = Counter(documents)
            starts = accumulate((counts[d] for d in range(self.problem.num_sequences)), initial=0)
            self._add_table("owners", list(starts))
        return self.memory["owners"]

    def _take_exit(self, key: str, leave: Room, kind: str) -> None:
        """States that leave documents: of their last segment, or first for gradients."""
        assert self.segments is not None
        documents = self.segments.documents
        order = range(len(documents)) if kind == "state" else range(len(documents) - 1, -1, -1)
        last = {documents[i]: i for i in order}
        rows = [last[d] for d in range(self.problem.num_sequences)]
        self.memory[f"leave_{key}_ptr"] = self.rooms.compute(
            partial(between.exit_rows, rows=rows), leave
        )

    # -- launches -----------------------------------------------------------------------------

    def launch(
        self,
        built: Built,
        override: Mapping[str, Room] | None = None,
        keep: bool = True,
        columns: int | None = None,
    ) -> None:
        """Add one kernel; `override` replaces memory, `columns` the size of the column dim."""
        kernel, emitted = built.kernel, built.emitted
        how = self._configured(built, keep, columns)
        if kernel.kind != "map":
            self._allocate(built, how.tiles)
        memory = {**self.memory, **(override or {})}
        rooms = tuple(memory[name] for name in emitted.pointers)
        units = self.num_chunks
        if kernel.kind in LOOPS:
            units = self.segments.count if self.segments else self.problem.num_sequences
        grid = (units * how.tiles * how.rows, self.problem.heads)
        numbers = tuple(self.number(name) for name in emitted.numbers)
        self._add_launch(built.function, grid, rooms, numbers, how.constants, how.options)

    def _configured(self, built: Built, keep: bool, columns: int | None) -> Configured:
        """Tiles and constants, found once for all B and T."""
        kernel, problem = built.kernel, self.problem
        packed = problem.layout.packed or (kernel.kind in LOOPS and self.segments is not None)
        key: tuple[Any, ...] = (kernel.name, self.direction, problem.family.sizes, self.tile_c)
        key = (*key, packed, keep, columns, self.shrink, self.executor.plan, self.uneven)
        found = self.executor.configured.get(key)
        if found is None:
            launch = launching.configuration(problem, self.schedule, kernel, self.shrink)
            tiles = launching.column_tiles(problem, self.schedule, kernel, launch, columns)
            constants = {
                name: self.constant(name, kernel, launch, tiles, keep, columns)
                for name in built.emitted.constants
            }
            options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
            rows = launching.row_tiles(problem, kernel)
            found = Configured(tiles, rows, constants, options)
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
        column = self.schedule.column
        if name.startswith("size_"):
            dim = name.removeprefix("size_")
            return columns if columns and dim == column else problem.size(dim)
        if name == "tile_C":
            return self.tile_c
        if name.startswith("tile_"):
            dim = name.removeprefix("tile_")
            size = columns if columns and dim == column else problem.size(dim)
            tile = power_of_two(size)
            if dim == kernel.row_dim:
                return launching.row_tile(problem, kernel)
            return min(tile, launch.column_tile) if dim == column else tile
        if name.startswith("heads_"):
            return self._group_heads(name.removeprefix("heads_"))
        packed = problem.layout.packed or (kernel.kind in LOOPS and self.segments is not None)
        return {
            "KEEP": keep,
            "num_row_tiles": launching.row_tiles(self.problem, kernel),
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
                self.memory[f"{name}_ptr"] = Room((sliced, *self._block_shape(node)), kind)

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

    # -- results ------------------------------------------------------------------------------

    def _input_gradient(self, name: str, x: Tensor) -> Room:
        """Gradient of an input, summed over column tiles and heads of a group."""
        found = self.memory.get(f"grad_{name}_ptr")
        if found is None:
            return self.rooms.compute(torch.zeros_like, self.memory[f"{name}_ptr"])
        if found.kept:
            return found
        group = self.problem.heads // int(x.shape[2])
        return self.rooms.compute(partial(between.input_sum, group=group, dtype=x.dtype), found)

    def _param_gradient(self, name: str, x: Tensor) -> Room:
        """Gradient of a per-head parameter, summed over tiles and chunks."""
        found = self.memory.get(f"grad_{name}_ptr")
        if found is None:
            return self.rooms.compute(torch.zeros_like, self.memory[f"{name}_ptr"])
        return self.rooms.compute(partial(between.param_sum, dtype=x.dtype), found)
