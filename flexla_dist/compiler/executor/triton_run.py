"""Memory and launches of one direction of one call on the triton executor.

Contract: made, used and dropped within a call. `memory` maps the pointer names of the generated
kernels to tensors; scans run once, or, cut into segments, from zero, folded, and again (see
`segments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from flexla_dist.compiler.executor import launch as launching
from flexla_dist.compiler.executor.launch import Launch, interpreting, power_of_two
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.segments import (
    Segments,
    cut,
    fold,
    fold_reverse,
    segment_decays,
    select_rows,
)
from flexla_dist.compiler.executor.tables import device_table
from flexla_dist.compiler.schedule import LOOPS, Kernel
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims

if TYPE_CHECKING:
    from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor

States = tuple[Tensor, ...]
__all__ = ["TritonRun", "interpreting"]


def _packed_like(x: Tensor) -> Tensor:
    """Memory for a kernel's result of the shape of x, whatever the strides of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class TritonRun:
    """One direction of one call."""

    def __init__(
        self,
        executor: TritonExecutor,
        problem: Problem,
        direction: str,
        entry: States,
        grad_exit: States | None = None,
        saved: States = (),
        shrink: int = 0,
    ):
        self.executor, self.problem, self.direction = executor, problem, direction
        self.shrink = shrink
        forward = direction == "forward"
        self.schedule = executor.forward_schedule if forward else executor.backward_schedule
        self.gates = executor.gates(direction)
        launching.check_sizes(problem, self.schedule.column)
        layout = problem.layout
        self.tile_c = max(launching.MIN_TILE, layout.chunk_size)
        self.lanes = 1 if layout.packed else problem.batch
        self.chunks_per_lane = len(layout.chunks)
        self.num_chunks = self.lanes * self.chunks_per_lane
        self.uneven = self._uneven_dims()
        self.segments = self._choose_segments()
        self.memory: dict[str, Tensor] = {}
        self.maps: dict[str, Tensor] = {}
        self.entering: dict[str, Tensor] = {}
        self._take_saved(saved)
        self._add_arguments(entry, grad_exit)

    def _uneven_dims(self) -> frozenset[str]:
        sizes = self.problem.sizes
        uneven = {dim for dim, size in sizes.items() if size != power_of_two(size)}
        if any(t.has_matrix for t in self.executor.graphs.transitions.values()) and uneven:
            uneven.add(self.schedule.column)  # M is scanned with as many columns as rows
        return frozenset(uneven)

    # -- segments -----------------------------------------------------------------------------

    def _choose_segments(self) -> Segments | None:
        """Segments of the scans; None where documents alone fill the device."""
        cutting = self.executor.cutting(self.problem)
        if cutting is None:
            return None
        segments = cut(self.problem.layout, cutting.length(self.num_chunks))
        return segments if segments.count > self.problem.num_sequences else None

    def saved(self) -> States:
        """States entering the segments and M of each segment, for backward."""
        names = self.executor.state_names
        return (
            *(self.entering[n] for n in names if n in self.entering),
            *(self.maps[n] for n in names if n in self.maps),
        )

    def _take_saved(self, saved: States) -> None:
        if self.segments is None or not saved:
            return
        names = self.executor.state_names
        rows = [x[: self.segments.count] for x in saved]
        self.entering = dict(zip(names, rows, strict=False))
        self.maps = dict(zip(self.executor.mapped_states, rows[len(names) :], strict=True))

    # -- arguments ----------------------------------------------------------------------------

    def _add_arguments(self, entry: States, grad_exit: States | None) -> None:
        problem = self.problem
        for name, x in (*problem.inputs.items(), *problem.params.items()):
            self.memory[f"{name}_ptr"] = x.contiguous()
        for name, state in zip(self.executor.state_names, entry, strict=True):
            self.memory[f"enter_state_{name}_ptr"] = state.contiguous()
            self.memory[f"leave_state_{name}_ptr"] = _packed_like(state)
        for name, g in zip(self.executor.state_names, grad_exit or (), strict=False):
            self.memory[f"enter_grad_next_{name}_ptr"] = g.contiguous()
            self.memory[f"leave_grad_next_{name}_ptr"] = _packed_like(g)
        unread = torch.zeros(1, dtype=torch.int32, device=problem.device)
        names = ("chunk_start", "chunk_length", "document_chunk", "document_start")
        self.memory.update(dict.fromkeys(names, unread))
        layout = problem.layout
        if layout.packed:
            self.memory["chunk_start"] = self._table([c.start for c in layout.chunks])
            self.memory["chunk_length"] = self._table([c.length for c in layout.chunks])
        if layout.packed or self.segments is not None:
            spans = self.segments or cut(layout, max(len(layout.chunks), 1))
            self.memory["document_chunk"] = self._table(spans.chunks)
            self.memory["document_start"] = self._table(spans.starts)

    def _table(self, values: tuple[int, ...] | list[int]) -> Tensor:
        return device_table(values, self.problem.device)

    # -- launches -----------------------------------------------------------------------------

    def launch_all(self) -> None:
        """Run every kernel in order."""
        if self.num_chunks == 0:
            self._nothing_to_do()
            return
        for built in self.executor.built(self.direction, self.uneven):
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
                if f"enter_{kind}_{name}_ptr" in self.memory:
                    entering = self.memory[f"enter_{kind}_{name}_ptr"]
                    self.memory[f"leave_{kind}_{name}_ptr"] = entering.clone()

    def _decays(self, built: Built) -> None:
        if self.segments is None:
            return
        self.launch(built)
        for name in built.kernel.stores:
            chunks = self.memory[f"{name}_ptr"][0]
            dims = built.kernel.stores[name].meta["dims"]
            shape = (1 if d == UNIT_DIM else self.problem.size(d) for d in dims)
            chunks = chunks.reshape(self.num_chunks, self.problem.heads, *shape)
            self.maps[name.removeprefix("decay_")] = segment_decays(chunks, self.segments)

    def _map(self, built: Built) -> None:
        """M of every segment: the scan of M alone, from the identity."""
        if self.segments is None:
            return
        override: dict[str, Tensor] = {}
        for node in built.kernel.carried:
            key = node.meta["key"]
            rows = self.problem.size(node.meta["dims"][0])
            eye = torch.eye(rows, device=self.problem.device)
            shape = (self.segments.count, self.problem.heads, rows, rows)
            override[f"enter_{key}_ptr"] = eye.expand(shape).contiguous()
            override[f"leave_{key}_ptr"] = torch.empty(shape, device=self.problem.device)
            override[f"{key}_ptr"] = override[f"leave_{key}_ptr"]
            columns = rows
        self.launch(built, override, keep=False, columns=columns)
        for node in built.kernel.carried:
            key = node.meta["key"]
            self.maps[key.removeprefix("state_")] = override[f"leave_{key}_ptr"]

    def _loop(self, built: Built, kind: str) -> None:
        """A scan over all chunks, whole or in segments."""
        if self.segments is None:
            self.launch(built)
            return
        keys = [node.meta["key"] for node in built.kernel.carried]
        enter = {key: self.memory[f"enter_{key}_ptr"] for key in keys}
        known = kind == "state" and bool(self.entering)
        entering = dict(self.entering) if known else self._fold_segments(built, kind, keys, enter)
        if kind == "state":
            self.entering = entering
        leave = {key: self._segment_states(enter[key]) for key in keys}
        override = {f"enter_{key}_ptr": entering[key.removeprefix(f"{kind}_")] for key in keys}
        override |= {f"leave_{key}_ptr": leave[key] for key in keys}
        self.launch(built, override)
        for key in keys:
            self._take_exit(key, leave[key], kind)

    def _summarise(self, built: Built) -> None:
        """States entering the segments, by a scan of its own."""
        if self.segments is None:
            return
        keys = [node.meta["key"] for node in built.kernel.carried]
        enter = {key: self.memory[f"enter_{key}_ptr"] for key in keys}
        self.entering = self._fold_segments(built, "state", keys, enter)

    def _segment_states(self, like: Tensor) -> Tensor:
        assert self.segments is not None
        return torch.empty(
            (self.segments.count, *like.shape[1:]), dtype=like.dtype, device=like.device
        )

    def _fold_segments(
        self, built: Built, kind: str, keys: list[str], enter: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        assert self.segments is not None
        override: dict[str, Tensor] = {}
        for key in keys:
            local = self._segment_states(enter[key])
            override[f"enter_{key}_ptr"] = torch.zeros_like(local)
            override[f"leave_{key}_ptr"] = local
            override[f"{key}_ptr"] = local
        self.launch(built, override, keep=False)
        out = {}
        for key in keys:
            name = key.removeprefix(f"{kind}_")
            dense = self.executor.graphs.transitions[name].has_matrix
            found = self.maps.get(name)
            folded = fold if kind == "state" else fold_reverse
            out[name] = folded(
                override[f"leave_{key}_ptr"],
                None if dense else found,
                found if dense else None,
                enter[key],
                self.segments,
            )
        return out

    def _take_exit(self, key: str, leave: Tensor, kind: str) -> None:
        """States that leave documents: of their last segment, or first for gradients."""
        assert self.segments is not None
        documents = self.segments.documents
        order = range(len(documents)) if kind == "state" else range(len(documents) - 1, -1, -1)
        last = {documents[i]: i for i in order}
        rows = [last[d] for d in range(self.problem.num_sequences)]
        self.memory[f"leave_{key}_ptr"] = leave[select_rows(rows, leave.device)].contiguous()

    def launch(
        self,
        built: Built,
        override: Mapping[str, Tensor] | None = None,
        keep: bool = True,
        columns: int | None = None,
    ) -> None:
        """Run one kernel; `override` replaces memory, `columns` the size of the column dim."""
        kernel = built.kernel
        launch = self.configuration(kernel)
        tiles = self.tiles(kernel, launch, columns)
        looping = kernel.kind in LOOPS
        rows = launching.row_tiles(self.problem, kernel)
        if kernel.kind != "map":
            self._allocate(built, tiles)
        memory = {**self.memory, **(override or {})}
        pointers = [memory[name] for name in built.emitted.pointers]
        numbers = [self.number(name) for name in built.emitted.numbers]
        constants = {
            name: self.constant(name, kernel, launch, tiles, keep, columns)
            for name in built.emitted.constants
        }
        units = self.num_chunks
        if looping:
            units = self.segments.count if self.segments else self.problem.num_sequences
        built.function[(units * tiles * rows, self.problem.heads)](
            *pointers,
            *numbers,
            **constants,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )

    # -- launch arguments ---------------------------------------------------------------------

    def configuration(self, kernel: Kernel) -> Launch:
        """Tile, warps and stages of a kernel."""
        return launching.configuration(self.problem, self.schedule, kernel, self.shrink)

    def tiles(self, kernel: Kernel, launch: Launch, columns: int | None = None) -> int:
        """Number of column tiles of a kernel; one where it has no columns."""
        return launching.column_tiles(self.problem, self.schedule, kernel, launch, columns)

    def number(self, name: str) -> float | int:
        """A run-time number of a launch."""
        problem = self.problem
        known = {
            "T": problem.tokens,
            "chunks_per_lane": self.chunks_per_lane,
            "num_chunks": self.num_chunks,
            "num_tokens": problem.batch * problem.tokens,
        }
        return known[name] if name in known else problem.scalars[name]

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
                self._new(name, self._block_shape(node), launching.storage_dtype(dtype))
        for name, node in built.kernel.stores.items():
            if f"{name}_ptr" in self.memory:
                continue
            sliced = tiles if name in built.emitted.sliced else 1
            target = name.removeprefix("grad_")
            if target in self.problem.inputs and name.startswith("grad_"):
                self._new_gradient(name, target, sliced)
            else:
                kind = launching.value_dtype(name, node, self.gates, dtype)
                self._new(f"{name}_ptr", (sliced, *self._block_shape(node)), kind)

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.memory[name] = torch.empty(shape, dtype=dtype, device=self.problem.device)

    def _new_gradient(self, name: str, target: str, sliced: int) -> None:
        x = self.problem.inputs[target]
        whole = sliced == 1 and x.shape[2] == self.problem.heads
        shape = (sliced, *x.shape[:2], self.problem.heads, *x.shape[3:])
        self._new(f"{name}_ptr", shape, x.dtype if whole else torch.float32)

    def _block_shape(self, node: fx.Node) -> tuple[int, ...]:
        return (self.num_chunks, self.problem.heads, *self._sizes(node.meta["dims"]))

    def _sizes(self, dims: Dims) -> tuple[int, ...]:
        return tuple(
            self.tile_c if d == TOKEN_DIM else self.problem.size(d) for d in dims if d != UNIT_DIM
        )

    # -- results ------------------------------------------------------------------------------

    def leaving(self, kind: str) -> States:
        """States (or their gradients) that leave the documents."""
        return tuple(self.memory[f"leave_{kind}_{name}_ptr"] for name in self.executor.state_names)

    def input_gradient(self, name: str) -> Tensor:
        """Gradient of an input, summed over column tiles and heads of a group."""
        x = self.problem.inputs[name]
        found = self.memory.get(f"grad_{name}_ptr")
        if found is None:
            return torch.zeros_like(x)
        heads = x.shape[2]
        if heads != self.problem.heads:
            found = found.unflatten(3, (heads, self.problem.heads // heads)).sum(4)
        return found.sum(0).to(x.dtype) if found.shape[0] != 1 else found[0].to(x.dtype)

    def param_gradient(self, name: str) -> Tensor:
        """Gradient of a per-head parameter, summed over tiles and chunks."""
        x = self.problem.params[name]
        found = self.memory.get(f"grad_{name}_ptr")
        if found is None:
            return torch.zeros_like(x)
        return found.sum((0, 1)).to(x.dtype)
