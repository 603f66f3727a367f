"""Compiles the kernels of a call without running it, on a machine with or without a GPU.

Contract: `record_launches` runs the triton executor on tensors without memory and notes every
launch that a real call of those shapes makes: function, argument types, constants, options.
Compiling them through Triton's own argument binder gives the cache entries that the call itself
looks up, so kernels made ahead with the same Triton (`triton_key`), ptxas and `TRITON_CACHE_DIR`
are found there. Nothing is launched. As in a call, kernels that need more shared memory than the
target has are made again with smaller column tiles.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from flexla_dist.assembler import assembling
from flexla_dist.compiler.executor.bind import bind
from flexla_dist.compiler.executor.choosing import Tuned
from flexla_dist.compiler.executor.launch import interpreting
from flexla_dist.compiler.executor.planned_launches import Heads
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.results import ForwardResult
from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.errors import ExecutorError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM

DIRECTIONS = ("forward", "backward")
Target = tuple[str, int | str] | tuple[str, int | str, int]
SHARED_LIMITS: Mapping[str | int, int] = {  # bytes of shared memory that one block may have
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    "gfx942": 65536,
}


@dataclass(frozen=True)
class CompiledInfo:
    """One compiled kernel: registers and stack (spilled) bytes a thread, shared bytes a block.

    `regs` and `stack_bytes` are None where the target's tools do not tell.
    """

    kernel: str
    direction: str
    warps: int
    stages: int
    regs: int | None
    stack_bytes: int | None
    shared_bytes: int
    tiles: Mapping[str, int]
    limit: int | None = None  # registers a thread may have at most

    def __str__(self) -> str:
        tiles = " ".join(
            f"{name.removeprefix('tile_')}={size}" for name, size in self.tiles.items()
        )
        return (
            f"{self.kernel:44s} {tiles:20s} warps {self.warps} stages {self.stages} "
            f"regs {self.regs} stack {self.stack_bytes} shared {self.shared_bytes}"
            + (f" limit {self.limit}" if self.limit else "")
        )


class HasGraphs(Protocol):
    """An operator or executor: anything with the graphs of a compiled spec."""

    @property
    def graphs(self) -> Graphs:
        """The compiled spec."""


@dataclass(frozen=True, eq=False)
class LaunchRecord:
    """One launch to compile; equal keys compile to the same binary. sound: it is launched
    inside of `assembling`."""

    direction: str
    kernel: str
    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    key: str
    sound: bool = True


@dataclass(frozen=True, eq=False)
class CompileTask:
    """A call whose kernels are wanted: its tensors may have no memory.

    groups: of heads of a call that stops where states cross ranks (see `open_forward`), whose
    kernels come beside those of the call that does not; () for the latter alone. tuned: where
    configurations are from, one after the other; kernels of all of them are wanted.
    """

    graphs: Graphs
    problem: Problem
    directions: tuple[str, ...] = DIRECTIONS
    _: KW_ONLY
    groups: tuple[Heads, ...] = ()
    tuned: tuple[Tuned, ...] = field(default_factory=lambda: (Tuned(),))


class _Noted:
    """Stands for a kernel's function: notes launches instead of running them."""

    def __init__(self, owner: _RecordingExecutor, direction: str, name: str, function: Any):
        self.owner, self.direction = owner, direction
        self.name, self.function = name, function

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return self._note

    def _note(self, *arguments: Any, **keywords: Any) -> None:
        function = self.function
        kinds = [str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in arguments]
        key = f"{function.module}:{self.name} {kinds} {sorted(keywords.items())}"
        self.owner.records[key] = LaunchRecord(
            self.direction, self.name, function, arguments, keywords, key
        )


class _RecordingExecutor(TritonExecutor):
    def __init__(self, graphs: Graphs):
        super().__init__(graphs)
        self.records: dict[str, LaunchRecord] = {}
        self.shrink = 0

    def built(self, direction: str, uneven: frozenset[str]) -> tuple[Built, ...]:  # type: ignore[override]
        return tuple(
            Built(b.kernel, b.emitted, _Noted(self, direction, b.emitted.name, b.function))
            for b in TritonExecutor.built(self, direction, uneven)
        )

    def helper(self, direction: str, name: str, subject: str) -> Any:
        return _Noted(self, direction, name, TritonExecutor.helper(self, direction, name, subject))

    def _fitting(self, problem: Problem, direction: str, once: Callable[[int], Any]) -> Any:
        return once(self.shrink)


def describe_call(
    graphs: Graphs,
    *,
    batch: int = 1,
    tokens: int = 4096,
    heads: int = 1,
    value_heads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cu_seqlens: Sequence[int] | None = None,
    chunk_size: int | None = None,
) -> Problem:
    """A call described by tensors without memory (device "meta").

    Args:
        graphs: a compiled spec.
        batch, tokens, heads, value_heads: B, T, H of head groups, HV of all else (default H).
        sizes: sizes of the named dims; 64 for those left out.
        dtype: dtype of the inputs; parameters are float32.
        cu_seqlens: document bounds of a packed call.
        chunk_size: as for `flexla_dist.compile`.
    """
    spec = graphs.spec
    value_heads = heads if value_heads is None else value_heads

    def size(dim: str) -> int:
        return 1 if dim == UNIT_DIM else (sizes or {}).get(dim, 64)

    def tensor(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    inputs = {
        name: tensor(
            dtype,
            batch,
            tokens,
            value_heads if item.group is None else heads,
            *(size(dim) for dim in item.dims if dim != TOKEN_DIM),
        )
        for name, item in spec.input_specs.items()
    }
    params = {
        name: tensor(torch.float32, value_heads, *(size(dim) for dim in item.dims))
        for name, item in spec.param_specs.items()
    }
    scalars = {name: 1.0 if value is None else value for name, value in spec.scalars.items()}
    return bind(spec, inputs, params, scalars, cu_seqlens, chunk_size)


def record_launches(task: CompileTask, direction: str, shrink: int = 0) -> list[LaunchRecord]:
    """The distinct launches of one direction of a call, in order.

    `shrink` halves the column tiles that many times, as a call does on a device where the kernels
    do not fit.

    Raises:
        ExecutorError: the executor refuses the spec or its sizes, or Triton interprets here.
    """
    if interpreting():
        raise ExecutorError(
            "kernels cannot be compiled while Triton interprets them; unset TRITON_INTERPRET "
            "before Python starts"
        )
    if direction not in DIRECTIONS:
        raise ExecutorError(f"direction is {direction!r}; expected forward or backward")
    executor = _RecordingExecutor(task.graphs)
    groups = ((), task.groups) if task.groups else ((),)
    found: dict[str, LaunchRecord] = {}
    for executor.tuned in task.tuned:
        executor.shrink, executor.records = shrink if direction == "forward" else 0, {}
        results = [_forward(executor, task.problem, heads) for heads in groups]
        if direction == "backward":
            executor.shrink, executor.records = shrink, {}
            for heads, result in zip(groups, results, strict=True):
                _backward(executor, task.problem, heads, result)
        found |= executor.records
    return list(found.values())


def _forward(
    executor: TritonExecutor, problem: Problem, groups: tuple[Heads, ...]
) -> ForwardResult:
    """A call that stops where states cross ranks, if there are groups."""
    entry = problem.zero_state()
    opened = executor.open_forward(problem, entry, groups) if groups else None
    return executor.forward(problem, entry, opened)


def _backward(
    executor: TritonExecutor, problem: Problem, groups: tuple[Heads, ...], ran: ForwardResult
) -> None:
    entry, gradient = problem.zero_state(), torch.empty_like(ran.output)
    opened = None
    if groups:
        opened = executor.open_backward(problem, ran.saved, entry, gradient, groups)
    executor.backward(problem, ran.saved, entry, gradient, entry, opened)


def compile_launch(launch: LaunchRecord, target: Target = ("cuda", 90)) -> CompiledInfo:
    """Compile one recorded launch for a target such as `("cuda", 90)` or `("hip", "gfx942")`.

    On targets without TF32 the dot policy becomes "ieee". Raises what Triton raises.
    """
    kind, arch = target[0], target[1]
    warp = target[2] if len(target) == 3 else (64 if kind == "hip" else 32)  # type: ignore[misc]
    backend = make_backend(GPUTarget(kind, arch, warp))
    function = launch.function
    keywords = dict(launch.keywords)
    if kind != "cuda":
        keywords.pop("maxnreg", None)
        if "MODE" in keywords:
            keywords["MODE"] = "ieee"
    keywords |= {"debug": function.debug or False, "instrumentation_mode": ""}
    binder = create_function_from_signature(function.signature, function.params, backend)
    with assembling(int(arch) if kind == "cuda" and launch.sound else 0) as sound:
        keywords |= sound
        bound, specialization, options = binder(*launch.arguments, **keywords)
        options, signature, constants, attributes = function._pack_args(
            backend, keywords, bound, specialization, options
        )
        source = ASTSource(function, signature, constants, attributes)
        place = GPUTarget(kind, arch, warp)
        compiled = triton.compile(source, target=place, options=options.__dict__)
    regs, stack = _resources(compiled.asm["cubin"]) if kind == "cuda" else (None, None)
    return CompiledInfo(
        launch.kernel,
        launch.direction,
        options.num_warps,
        options.num_stages,
        regs,
        stack,
        compiled.metadata.shared,
        {name: size for name, size in keywords.items() if name.startswith("tile_")},
        keywords.get("maxnreg"),
    )


def compile_ahead(
    op: HasGraphs,
    *,
    batch: int = 1,
    tokens: int = 16384,
    heads: int = 1,
    value_heads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cu_seqlens: Sequence[int] | None = None,
    chunk_size: int | None = None,
    directions: Sequence[str] = DIRECTIONS,
    target: Target = ("cuda", 90),
    jobs: int = 1,
) -> list[CompiledInfo]:
    """Compile every kernel that a call of these shapes launches, for itself or for Triton's cache.

    Args:
        op: a compiled operator.
        batch, tokens, heads, value_heads, sizes, dtype, cu_seqlens, chunk_size: see
            `describe_call`; of T it matters whether a chunk is full and scans are cut in segments.
        directions: of `forward` and `backward`.
        target: `("cuda", 90)`, `("hip", "gfx942")`, with the warp size as an optional third.
        jobs: forked processes that compile side by side.

    Returns:
        One entry for each distinct kernel, in launch order.

    Raises:
        ExecutorError: what the executor cannot run, a kernel that does not compile (its name,
            Triton's message) or that does not fit the target even with the smallest tiles.
    """
    from flexla_dist.compiler.aot_pool import CompilePool

    problem = describe_call(
        op.graphs,
        batch=batch,
        tokens=tokens,
        heads=heads,
        value_heads=value_heads,
        sizes=sizes,
        dtype=dtype,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )
    given = getattr(op, "tuned", None)  # of an operator a file, of an executor what it looks into
    tuned = given if isinstance(given, Tuned) else Tuned(given)
    task = CompileTask(op.graphs, problem, tuple(directions), tuned=(tuned,))
    with CompilePool([task], target, jobs) as pool:
        return pool.kernels(0)


def shared_limit(target: Target) -> int | None:
    """Bytes of shared memory that a block of the target may have, where it is known."""
    return SHARED_LIMITS.get(target[1])


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and stack bytes a thread, read from the binary by Triton's own cuobjdump."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [tool, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)
