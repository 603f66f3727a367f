"""How kernels are launched: tiles, warps, stages, storage types.

Contract: pure functions of the schedule and the sizes of a call; never of T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import fx

from flexla_dist.compiler.executor.problem import Outline, Problem
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.kernels import LOOPS, Kernel, Schedule
from flexla_dist.compiler.kinds import HEAVY, VECTOR_SUMS
from flexla_dist.errors import ExecutorError
from flexla_dist.shapes import UNIT_DIM

MIN_TILE = 16
MAX_TILE = 256
DEFAULT_PROCESSORS = 132
_GATES = {  # and the triangle whose inverse would make rounding larger
    ops.decay_matrix: (0, 1),
    ops.decay_scan: (0,),
    ops.decay_scan_reverse: (0,),
    ops.unit_tril_inverse: (0,),
}
_VECTOR_GATES = (2, 3)
ROW_TILE = 64
FUSED_TILE = 64
CHUNK_ROW_TILE = 32
SUMMING_TILE = 32
# An inverse is a chain of small products: on an H200 more programs a processor hide more of it than
# the registers that are spilled for them cost.
INVERSE_REGISTERS = 128


@dataclass(frozen=True)
class Launch:
    """How a kernel runs: column tile, warps, pipeline stages, and the registers that a thread may
    take at most (None: as many as the compiler likes)."""

    column_tile: int
    num_warps: int
    num_stages: int
    registers: int | None = None

    def options(self, device: torch.device) -> dict[str, int]:
        """What Triton's launch takes; only NVIDIA's compiler can limit registers."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.registers is not None and torch.version.hip is None and device.type != "cpu":
            found["maxnreg"] = self.registers
        return found


def interpreting() -> bool:
    """True when Triton runs its interpreter instead of a device."""
    return bool(triton.knobs.runtime.interpret)


def power_of_two(size: int) -> int:
    """The smallest tile that holds `size`."""
    return max(MIN_TILE, 1 << (size - 1).bit_length())


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a usual number where it is not there."""
    if device.type != "cuda":
        return DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def dot_mode(dtype: torch.dtype) -> str:
    """Dot policy for inputs of a dtype."""
    if interpreting():
        return "ieee"
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32x3"}[dtype]


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of states and products between kernels."""
    return torch.float32 if interpreting() else dtype


def feeds_gates(nodes: list[fx.Node]) -> set[fx.Node]:
    """Values that reach an exponential or a triangular inverse without passing a product: kept in
    float32."""
    gates: set[fx.Node] = set()
    for node in reversed(nodes):
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


def value_dtype(name: str, node: fx.Node, gates: set[fx.Node], dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a value waits in memory for another kernel."""
    rank = sum(dim != UNIT_DIM for dim in node.meta["dims"])
    exact = name.startswith(("grad_", "decay_")) or rank < 2 or node in gates
    return torch.float32 if exact else storage_dtype(dtype)


def check_sizes(problem: Problem, column: str) -> None:
    """Raise ExecutorError for devices, sizes and types that kernels cannot run."""
    if problem.device.type == "cpu" and not interpreting():
        raise ExecutorError(
            f"{problem.spec.name}: the triton executor needs tensors on a GPU, got "
            f"{problem.device}; move them there, use executor='torch', or set TRITON_INTERPRET=1 "
            "before Python starts"
        )
    for dim, size in problem.sizes.items():
        if size > MAX_TILE and dim != column:
            raise ExecutorError(
                f"{problem.spec.name}: dim {dim} is {size}; the triton executor holds whole dims "
                f"of at most {MAX_TILE} in a tile. Use executor='torch'"
            )
    _check_chunks(problem)
    if problem.compute_dtype == torch.float64:
        raise ExecutorError(
            f"{problem.spec.name}: the triton executor computes in float32; "
            "float64 inputs need executor='torch'"
        )


def _check_chunks(problem: Problem) -> None:
    """A tile holds one chunk: only a document's only chunk may be shorter than the least tile."""
    chunk_size, chunks = problem.layout.chunk_size, problem.layout.chunks
    short = chunk_size < MIN_TILE and not all(chunk.first for chunk in chunks)
    if short or chunk_size > MAX_TILE:
        raise ExecutorError(
            f"{problem.spec.name}: chunk_size is {chunk_size}; the triton executor holds a chunk "
            f"in a tile of {MIN_TILE} to {MAX_TILE} tokens. Use such a chunk_size, or "
            "executor='torch'"
        )


def configuration(problem: Outline, schedule: Schedule, kernel: Kernel, shrink: int) -> Launch:
    """The estimate: column tile, warps and stages by the kind of kernel and the sizes; `choosing`
    knows what was measured.

    `shrink` halves the column tile that many times, for devices with less shared memory; loops that
    look three steps ahead look two ahead first.
    """
    column = problem.size(schedule.column)
    width = power_of_two(column)
    whole = [power_of_two(s) for d, s in problem.sizes.items() if d != schedule.column]
    widest = max(whole, default=MIN_TILE)
    if kernel.whole:
        return Launch(width, 8 if width > 64 else 4, 1)
    wide = problem.output_dtype == torch.float32
    flat = all(len(node.meta["dims"]) < 2 for node in kernel.carried)
    serial = any(other.kind == "map" for other in schedule.kernels)  # M is dense
    if kernel.kind == "scan" and not kernel.history and not serial:
        tile = min(width, 32 if widest > 128 or wide else FUSED_TILE)
        return Launch(max(MIN_TILE, tile >> shrink), 8 if widest > 128 else 4, 3 if flat else 2)
    if kernel.kind in LOOPS:
        whole_rows = kernel.row_dim is None  # a dense M: more programs bring more than wider ones
        narrow = widest > 128 or wide or (whole_rows and not flat)
        tile = min(width, 32 if narrow else 64)
        several = schedule.mixed and (widest > 64 or wide)  # a state beside the tiles of another
        warps = 8 if whole_rows and (widest > 128 or several) else 4
        # One program a processor waits for memory: loads go two steps ahead where there is room.
        if wide or schedule.mixed or widest > 128:
            return Launch(max(MIN_TILE, tile >> shrink), warps, 2)
        stages, halvings = (3, 0) if shrink == 0 else (2, shrink - 1)
        return Launch(max(MIN_TILE, tile >> halvings), warps, stages)
    if _sums_tokens(kernel, schedule.column):
        return Launch(min(width, SUMMING_TILE), 1, 1)
    scans = any(
        node.target is ops.decay_scan_reverse
        for other in sharing_parts(schedule, kernel)
        for node in other.body
    )
    tile = min(width, 64 if widest > 128 or wide or scans else 128)
    large = widest > 128
    if schedule.mixed:  # more values beside each other than where columns do not mix
        tile = min(tile, 32) if wide and widest <= 128 else tile
        large = max(width, widest) > 64
    vector = any(node.target in VECTOR_SUMS for node in kernel.body) and kernel.row_dim is None
    inverts = any(node.target is ops.unit_tril_inverse for node in kernel.body)
    few = INVERSE_REGISTERS if inverts and not large and not wide else None
    return Launch(max(MIN_TILE, tile >> shrink), 8 if vector or large else 4, 1, few)


def _sums_tokens(kernel: Kernel, column: str) -> bool:
    """Does a chunk kernel without products leave one row of columns? Then a warp has all tokens of
    its columns, and sums over tokens stay in it."""
    rows = all(len(node.meta["dims"]) < 2 for node in kernel.stores.values())
    columns = any(column in node.meta["dims"] for node in kernel.loads)
    products = any(node.target is ops.matmul or node.target in HEAVY for node in kernel.body)
    return rows and columns and not products and not kernel.parts


def sharing_parts(schedule: Schedule, kernel: Kernel) -> list[Kernel]:
    """Kernels that must have the column tiles of this one: sums over a tile pass between them."""
    read = {node for other in schedule.kernels for node in other.parts}
    sharing = [
        other
        for other in schedule.kernels
        if other.parts or not read.isdisjoint(other.stores.values())
    ]
    return sharing if any(other is kernel for other in sharing) else [kernel]


def row_tile(problem: Outline, kernel: Kernel) -> int:
    """Rows in one program of a kernel that may be cut into row tiles."""
    assert kernel.row_dim is not None
    most = ROW_TILE if kernel.kind in LOOPS or kernel.summed else CHUNK_ROW_TILE
    return min(power_of_two(problem.size(kernel.row_dim)), most)


def row_parts(problem: Outline, kernel: Kernel) -> int:
    """Number of row tiles of a kernel."""
    if kernel.row_dim is None:
        return 1
    return -(-problem.size(kernel.row_dim) // row_tile(problem, kernel))


def row_tiles(problem: Outline, kernel: Kernel) -> int:
    """Programs for the row tiles of a kernel: one where it adds them up."""
    return 1 if kernel.summed else row_parts(problem, kernel)


def column_tiles(
    problem: Outline,
    schedule: Schedule,
    kernel: Kernel,
    launch: Launch,
    columns: int | None = None,
) -> int:
    """Number of column tiles of a kernel; one where it has neither columns nor sums over a tile."""
    column = schedule.column
    nodes = (*kernel.loads, *kernel.body, *kernel.carried)
    if not kernel.parts and not any(column in node.meta["dims"] for node in nodes):
        return 1
    return -(-(columns or problem.size(column)) // launch.column_tile)
