"""Runs the generated Triton kernels of a spec.

Contract: kernels are emitted from the same rewritten graphs that the torch executor runs; none is written for
a variant. The plan is `unfused` (see `flexla_dist.compiler.schedule`). Values between kernels and states are
stored in the inputs' dtype, gates and vectors in float32; running states are float32 in registers. Sums over
column tiles, head groups, batch and chunks have a fixed order: the same call gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, fx

from flexla_dist.compiler.build import load_module, module_text
from flexla_dist.compiler.emit.kernel import Emitted, emit_kernel
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.element import SpanMap
from flexla_dist.compiler.executor.results import ForwardResult, Gradients
from flexla_dist.compiler.executor.torch_executor import TorchExecutor
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.pipeline import GRAD_OUTPUT, Graphs
from flexla_dist.compiler.schedule import (
    HEAVY,
    Kernel,
    Schedule,
    schedule_backward,
    schedule_forward,
)
from flexla_dist.errors import ExecutorError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims

States = tuple[Tensor, ...]
MIN_TILE = 16
MAX_TILE = 256
_GATES = {ops.decay_matrix: (0, 1), ops.decay_scan: (0,), ops.decay_scan_reverse: (0,)}
_VECTOR_GATES = (2, 3)


def interpreting() -> bool:
    """True when Triton runs its interpreter instead of a device."""
    return bool(triton.knobs.runtime.interpret)


def power_of_two(size: int) -> int:
    """The smallest tile that holds `size`."""
    return max(MIN_TILE, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Built:
    """A kernel of a schedule, compiled lazily by Triton."""

    kernel: Kernel
    emitted: Emitted
    function: Any


@dataclass(frozen=True)
class Launch:
    """How a kernel runs: column tile, warps, pipeline stages."""

    column_tile: int
    num_warps: int
    num_stages: int


def feeds_gates(cell_nodes: list[fx.Node]) -> set[fx.Node]:
    """Values that reach an exponential without passing a product: kept in float32."""
    gates: set[fx.Node] = set()
    for node in reversed(cell_nodes):
        if node.op != "call_function":
            continue
        positions = _GATES.get(node.target, ())  # type: ignore[arg-type, call-overload]
        if node.target in HEAVY and node.target is not ops.unit_tril_inverse:
            positions = _VECTOR_GATES
        if node.target in (ops.exp, ops.expm1):
            positions = (0,)
        stops = node.target is ops.matmul or node.target in HEAVY
        for at, x in enumerate(node.args):
            if isinstance(x, fx.Node) and (at in positions or (node in gates and not stops)):
                gates.add(x)
    return gates


class TritonExecutor:
    """The executor called `triton`."""

    name = "triton"

    def __init__(self, graphs: Graphs):
        self.graphs = graphs
        self.spec = graphs.spec
        if self.spec.log_scaled is not None:
            raise ExecutorError(
                f"{self.spec.name}: log-scaled states run on executor='torch'; the triton executor "
                "carries plain states only"
            )
        self.state_names = tuple(self.spec.state_dims)
        self._batched = TorchExecutor(graphs)

    # -- kernels ------------------------------------------------------------------------------

    @functools.cached_property
    def forward_schedule(self) -> Schedule:
        """Kernels of the forward pass."""
        return schedule_forward(self.spec, self.graphs.kernel_forward)

    @functools.cached_property
    def backward_schedule(self) -> Schedule:
        """Kernels of the backward pass."""
        return schedule_backward(self.spec, self.graphs.kernel_backward, self.graphs.kernel_forward)

    @functools.cache  # noqa: B019
    def source(self, direction: str, uneven: frozenset[str]) -> tuple[str, tuple[Emitted, ...]]:
        """Generated module of a direction, and its kernels in order."""
        schedule = self.forward_schedule if direction == "forward" else self.backward_schedule
        emitted = tuple(
            emit_kernel(self.spec, schedule, kernel, uneven) for kernel in schedule.kernels
        )
        helpers = frozenset().union(*(e.helpers for e in emitted))
        title = f"{self.spec.name}: {direction} kernels, plan unfused"
        return module_text(title, helpers, [e.source for e in emitted]), emitted

    @functools.cache  # noqa: B019
    def built(self, direction: str, uneven: frozenset[str]) -> tuple[Built, ...]:
        """Imported kernels of a direction."""
        schedule = self.forward_schedule if direction == "forward" else self.backward_schedule
        text, emitted = self.source(direction, uneven)
        module = load_module(f"{self.spec.name}_{direction}", text)
        return tuple(
            Built(kernel, e, getattr(module, e.name))
            for kernel, e in zip(schedule.kernels, emitted, strict=True)
        )

    # -- phases -------------------------------------------------------------------------------

    def forward(self, problem: Problem, entry: States) -> ForwardResult:
        """Outputs and exit states from the states that enter each document."""
        run = _Run(self, problem, "forward", entry)
        output = torch.empty(
            problem.output_shape(), dtype=problem.output_dtype, device=problem.device
        )
        run.memory["output_ptr"] = output
        run.launch_all()
        return ForwardResult(output, run.leaving("state"), ())

    def backward(
        self,
        problem: Problem,
        saved: States,
        entry: States,
        grad_output: Tensor,
        grad_exit: States,
    ) -> Gradients:
        """Gradients of inputs, parameters and entry states."""
        run = _Run(self, problem, "backward", entry, grad_exit)
        run.memory[f"{GRAD_OUTPUT}_ptr"] = grad_output.contiguous()
        run.launch_all()
        inputs = {name: run.input_gradient(name) for name in problem.inputs}
        params = {name: run.param_gradient(name) for name in problem.params}
        return Gradients(inputs, params, run.leaving("grad_next"))

    def summary(self, problem: Problem, sequence: int) -> SpanMap:
        """M and S_hat of one document, by batched operations on the device."""
        return self._batched.summary(problem, sequence)

    def adjoint_summary(
        self, problem: Problem, saved: States, entry: States, grad_output: Tensor, sequence: int
    ) -> SpanMap:
        """M transposed and G_hat of one document, by batched operations on the device."""
        starts = saved or self._batched.forward(problem, entry).saved
        return self._batched.adjoint_summary(problem, starts, entry, grad_output, sequence)


class _Run:
    """Memory and launches of one direction of one call."""

    def __init__(
        self,
        executor: TritonExecutor,
        problem: Problem,
        direction: str,
        entry: States,
        grad_exit: States | None = None,
    ):
        self.executor, self.problem, self.direction = executor, problem, direction
        self.schedule = (
            executor.forward_schedule if direction == "forward" else executor.backward_schedule
        )
        self._check_sizes()
        layout = problem.layout
        self.tile_c = max(MIN_TILE, layout.chunk_size)
        self.lanes = 1 if layout.packed else problem.batch
        self.chunks_per_lane = len(layout.chunks)
        self.num_chunks = self.lanes * self.chunks_per_lane
        self.uneven = frozenset(
            dim
            for dim, size in problem.sizes.items()
            if size != power_of_two(size) or self._may_overhang(dim)
        )
        self.memory: dict[str, Tensor] = {}
        self._add_arguments(entry, grad_exit)
        cell = (
            executor.graphs.kernel_forward
            if direction == "forward"
            else executor.graphs.kernel_backward
        )
        self.gates = feeds_gates(list(cell.graph.nodes))

    def _may_overhang(self, dim: str) -> bool:
        return False

    def _check_sizes(self) -> None:
        for dim, size in self.problem.sizes.items():
            if size > MAX_TILE and dim != self.schedule.column:
                raise ExecutorError(
                    f"{self.problem.spec.name}: dim {dim} is {size}; the triton executor holds whole dims "
                    f"of at most {MAX_TILE} in a tile. Use executor='torch'"
                )
        if self.problem.compute_dtype == torch.float64:
            raise ExecutorError(
                f"{self.problem.spec.name}: the triton executor computes in float32; "
                "float64 inputs need executor='torch'"
            )

    def _add_arguments(self, entry: States, grad_exit: States | None) -> None:
        problem = self.problem
        for name, x in problem.inputs.items():
            self.memory[f"{name}_ptr"] = x.contiguous()
        for name, x in problem.params.items():
            self.memory[f"{name}_ptr"] = x.contiguous()
        for name, state in zip(self.executor.state_names, entry, strict=True):
            self.memory[f"enter_state_{name}_ptr"] = state.contiguous()
            self.memory[f"leave_state_{name}_ptr"] = torch.empty_like(state)
        if grad_exit is not None:
            for name, g in zip(self.executor.state_names, grad_exit, strict=True):
                self.memory[f"enter_grad_next_{name}_ptr"] = g.contiguous()
                self.memory[f"leave_grad_next_{name}_ptr"] = torch.empty_like(g)
        self._add_chunk_table()

    def _add_chunk_table(self) -> None:
        """Chunks of packed documents; an unpacked call passes one unread number for each."""
        layout = self.problem.layout
        names = ("chunk_start", "chunk_length", "document_chunk", "document_start")
        if not layout.packed:
            unread = torch.zeros(1, dtype=torch.int32, device=self.problem.device)
            self.memory.update(dict.fromkeys(names, unread))
            return
        firsts, at = [0], 0
        for document in range(layout.documents):
            at += sum(chunk.document == document for chunk in layout.chunks)
            firsts.append(at)
        tables = {
            "chunk_start": [chunk.start for chunk in layout.chunks],
            "chunk_length": [chunk.length for chunk in layout.chunks],
            "document_chunk": firsts,
            "document_start": list(layout.offsets),
        }
        for name, values in tables.items():
            host = torch.tensor(values or [0], dtype=torch.int32)
            self.memory[name] = host.to(self.problem.device, non_blocking=True)

    # -- launches -----------------------------------------------------------------------------

    def launch_all(self) -> None:
        """Run every kernel in order."""
        if self.num_chunks == 0:
            self._nothing_to_do()
            return
        for built in self.executor.built(self.direction, self.uneven):
            self.launch(built)

    def _nothing_to_do(self) -> None:
        """A call without tokens: states pass through."""
        for name in self.executor.state_names:
            for kind in ("state", "grad_next"):
                if f"enter_{kind}_{name}_ptr" in self.memory:
                    entering = self.memory[f"enter_{kind}_{name}_ptr"]
                    self.memory[f"leave_{kind}_{name}_ptr"] = entering.clone()

    def launch(self, built: Built) -> None:
        """Run one kernel."""
        kernel = built.kernel
        launch = self.configuration(kernel)
        column = self.schedule.column
        tiles = 1
        if self._has_column(kernel):
            tiles = -(-self.problem.size(column) // launch.column_tile)
        self._allocate(built, tiles)
        units = self.num_chunks if kernel.kind == "chunk" else self.problem.num_sequences
        pointers = [self.memory[name] for name in built.emitted.pointers]
        numbers = [self.number(name) for name in built.emitted.numbers]
        constants = {n: self.constant(n, launch, tiles) for n in built.emitted.constants}
        grid = (units * tiles, self.problem.heads)
        built.function[grid](
            *pointers,
            *numbers,
            **constants,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )

    def _has_column(self, kernel: Kernel) -> bool:
        nodes = (*kernel.loads, *kernel.body, *kernel.carried)
        return any(self.schedule.column in node.meta["dims"] for node in nodes)

    def configuration(self, kernel: Kernel) -> Launch:
        """Tile, warps and stages by kind and sizes."""
        width = power_of_two(self.problem.size(self.schedule.column))
        widest = max((power_of_two(s) for s in self._whole_sizes()), default=MIN_TILE)
        if self.schedule.contracts_column:
            return Launch(width, 8 if width > 64 else 4, 1)
        if kernel.kind == "chunk":
            tile = min(width, 128 if widest <= 128 else 64)
            large = kernel.products > 4 or widest * tile >= 128 * 128
            return Launch(tile, 8 if large else 4, 2 if widest <= 64 else 1)
        tile = min(width, 32 if widest > 128 else 64)
        return Launch(tile, 8 if widest > 128 else 4, 2)

    def _whole_sizes(self) -> list[int]:
        return [s for d, s in self.problem.sizes.items() if d != self.schedule.column]

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

    def constant(self, name: str, launch: Launch, tiles: int) -> Any:
        """A constexpr of a launch."""
        problem = self.problem
        if name.startswith("size_"):
            return problem.size(name.removeprefix("size_"))
        if name == "tile_C":
            return self.tile_c
        if name.startswith("tile_"):
            dim = name.removeprefix("tile_")
            size = power_of_two(problem.size(dim))
            return min(size, launch.column_tile) if dim == self.schedule.column else size
        if name.startswith("heads_"):
            return self._group_heads(name.removeprefix("heads_"))
        if name.startswith("KEEP_"):
            return True
        return {
            "HV": problem.heads,
            "MODE": self.mode(),
            "PACKED": problem.layout.packed,
            "num_tiles": tiles,
        }[name]

    def _group_heads(self, group: str) -> int:
        for name, item in self.problem.spec.input_specs.items():
            if item.group == group:
                return int(self.problem.inputs[name].shape[2])
        raise AssertionError(f"no input has head group {group}")

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of states and of products between kernels."""
        return torch.float32 if interpreting() else self.problem.output_dtype

    def mode(self) -> str:
        """Dot policy of the call."""
        if interpreting():
            return "ieee"
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32x3"}
        return names[self.problem.output_dtype]

    # -- memory -------------------------------------------------------------------------------

    def _allocate(self, built: Built, tiles: int) -> None:
        for node in built.kernel.carried:
            self._new(f"{node.meta['key']}_ptr", self._block_shape(node), self.storage_dtype)
        for name, node in built.kernel.stores.items():
            if f"{name}_ptr" in self.memory:
                continue
            sliced = tiles if name in built.emitted.sliced else 1
            target = name.removeprefix("grad_")
            if target in self.problem.inputs and name.startswith("grad_"):
                self._new_gradient(name, target, sliced)
            else:
                shape = (sliced, *self._block_shape(node))
                self._new(f"{name}_ptr", shape, self._value_dtype(name, node))

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

    def _value_dtype(self, name: str, node: fx.Node) -> torch.dtype:
        rank = sum(dim != UNIT_DIM for dim in node.meta["dims"])
        if name.startswith("grad_") or rank < 2 or node in self.gates:
            return torch.float32
        return self.storage_dtype

    # -- results ------------------------------------------------------------------------------

    def leaving(self, kind: str) -> States:
        """States (or their gradients) that leave the documents."""
        out = []
        for name in self.executor.state_names:
            out.append(self.memory[f"leave_{kind}_{name}_ptr"])
        return tuple(out)

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


def kernel_table(executor: TritonExecutor, uneven: frozenset[str]) -> Mapping[str, list[Emitted]]:
    """Emitted kernels by direction, for printing tools."""
    return {d: list(executor.source(d, uneven)[1]) for d in ("forward", "backward")}
