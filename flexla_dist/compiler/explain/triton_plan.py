"""The kernels of a call on the triton executor, in launch order, and what each moves and computes.

Contract: runs the executor on tensors without memory and notes launches instead of making them, so
that segments, tiles, warps and buffers are those of a real call; no GPU is needed, nothing is
compiled. PyTorch operations between launches are noted as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from flexla_dist.compiler.emit.kernel import Emitted
from flexla_dist.compiler.executor.choosing import Choice, Tuned
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor, interpreting
from flexla_dist.compiler.explain.costs import Move, Product, Step, policy_of, product_flops
from flexla_dist.compiler.explain.plans import (
    DirectionPlan,
    TritonPlan,
    floor_of,
    segment_map,
    segment_sum,
)
from flexla_dist.compiler.explain.statements import (
    Listing,
    Names,
    argument_name,
    result_name,
)
from flexla_dist.compiler.kernels import LOOPS, Kernel, buffer_name
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.errors import ExecutorError

TABLES = ("chunk_start", "chunk_length", "document_chunk", "document_start")
_FREE = ("empty", "lift_fresh", "detach", "view", "alias", "resolve")
_PURPOSES = {
    "chunk": "every chunk by itself",
    "decays": "M of every chunk",
    "map": "M of every segment",
}


def triton_plan(graphs: Graphs, problem: Problem, tuned: Tuned | None = None) -> TritonPlan:
    """Launches of forward and backward; `problem` may have tensors without memory.

    tuned: where measured configurations are; None is the user's and the package's databases.

    Raises:
        ExecutorError: the executor refuses the spec, its sizes or its dtype.
    """
    if interpreting():
        raise ExecutorError(
            "TRITON_INTERPRET is set, and the interpreter has no launch plan; unset it before "
            "Python starts"
        )
    executor = _Watched(graphs, problem, tuned)
    entry = problem.zero_state()
    with _Operations(executor):
        result = executor.forward(problem, entry)
    forward = executor.finish("forward")
    gradient = torch.empty(
        problem.output_shape(), dtype=problem.output_dtype, device=problem.device
    )
    with _Operations(executor):
        executor.backward(problem, result.saved, entry, gradient, entry)
    backward = executor.finish("backward")
    return TritonPlan((forward, backward))


class _Watched(TritonExecutor):
    """The executor with kernels that note their launch."""

    def __init__(self, graphs: Graphs, problem: Problem, tuned: Tuned | None):
        super().__init__(graphs, tuned)
        self.problem = problem
        self.steps: list[Step] = []
        self.names = {
            "forward": Names(graphs.kernel_forward),
            "backward": Names(graphs.kernel_backward),
        }
        self.uneven: frozenset[str] = frozenset()
        self.segments = 0

    def built(self, direction: str, uneven: frozenset[str]) -> tuple[Built, ...]:  # type: ignore[override]
        """Kernels whose functions note launches."""
        self.uneven = uneven
        forward = direction == "forward"
        schedule = self.forward_schedule if forward else self.backward_schedule
        _, emitted = self.source(direction, uneven)
        return tuple(
            Built(kernel, e, _Noted(self, direction, kernel, e, schedule.column))
            for kernel, e in zip(schedule.kernels, emitted, strict=True)
        )

    def helper(self, direction: str, name: str, subject: str) -> Any:
        """Notes launches of a kernel between scans of segments."""
        return _NotedHelper(self, name, subject)

    def finish(self, direction: str) -> DirectionPlan:
        """The plan of a direction that was just run."""
        steps, self.steps = tuple(_joined(self.steps)), []
        source, _ = self.source(direction, self.uneven)
        forward = direction == "forward"
        kept = () if forward else [theirs for _, theirs in self.kept]
        floor = floor_of(self.graphs, self.problem, direction, kept)
        plan = self.plan if forward else self.backward_plan
        return DirectionPlan(direction, plan, steps, self.segments, source, floor)


class _Noted:
    def __init__(
        self, owner: _Watched, direction: str, kernel: Kernel, emitted: Emitted, column: str
    ):
        self.owner, self.direction = owner, direction
        self.kernel, self.emitted, self.column = kernel, emitted, column

    def __getitem__(self, grid: Sequence[int]) -> Any:
        def note(*arguments: Any, **keywords: Any) -> None:
            memory = dict(zip(self.emitted.pointers, arguments, strict=False))
            self.owner.steps.append(self._step(tuple(grid), memory, keywords))

        return note

    def _step(
        self, grid: tuple[int, ...], memory: dict[str, Tensor], keywords: dict[str, Any]
    ) -> Step:
        kernel, names = self.kernel, self.owner.names[self.direction]
        reads, writes = self._moves(memory, keywords)
        results = {**kernel.stores, **{_after(n): x for n, x in kernel.carried.items()}}
        listing = names.listing(kernel.body, results, (*kernel.loads, *kernel.carried))
        tiles = {
            name.removeprefix("tile_"): size
            for name, size in keywords.items()
            if name.startswith("tile_")
        }
        return Step(
            name=kernel.name,
            kind=kernel.kind,
            purpose=self._purpose(memory, keywords),
            reads=reads,
            writes=writes,
            products=self._products(listing, self._runs(grid, memory, keywords), keywords, tiles),
            grid=grid,
            tiles=tiles,
            warps=keywords["num_warps"],
            stages=keywords["num_stages"],
            registers=keywords.get("maxnreg"),
            configuration=str(self._choice()),
            statements=listing.statements,
            arguments=tuple(a.name for a in listing.arguments),
        )

    def _choice(self) -> Choice:
        return self.owner.configurations(self.owner.problem, self.direction)[self.kernel.name]

    def _purpose(self, memory: dict[str, Tensor], keywords: dict[str, Any]) -> str:
        kind = self.kernel.kind
        if kind not in ("scan", "reverse", "summary"):
            return _PURPOSES.get(kind, kind)
        spans = next(x.shape[0] for name, x in memory.items() if name.startswith("enter_"))
        cut = spans > self.owner.problem.num_sequences
        self.owner.segments = spans if cut else 0
        keeps = self._keeps(keywords)
        way = "backwards over" if kind == "reverse" else "over"
        if not cut:
            return f"{way} every document, chunk after chunk"
        what = "G_hat" if kind == "reverse" else "S_hat"
        start = "from what truly enters it" if keeps and kind != "summary" else f"from zero: {what}"
        return f"{way} every segment, {start}"

    # -- memory -------------------------------------------------------------------------------

    def _moves(
        self, memory: dict[str, Tensor], keywords: dict[str, Any]
    ) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        keeps = self._keeps(keywords)
        stored = {f"{name}_ptr" for name in self.kernel.stores}
        carried = {f"{node.meta['key']}_ptr" for node in self.kernel.carried}
        reads, writes, offsets = [], [], 0
        for pointer, x in memory.items():
            if pointer in TABLES:
                offsets += x.nbytes if keywords["PACKED"] else 0
            elif pointer in carried:
                if keeps:
                    writes.append(Move(self._name(pointer), x.nbytes))
            elif pointer in stored or pointer.startswith("leave_"):
                if keeps or pointer not in stored:
                    writes.append(Move(self._name(pointer, keeps), x.nbytes))
            else:
                name = self._name(pointer, keeps)
                reads.append(Move(name, x.nbytes, self._times(pointer, x, keywords)))
        if offsets:
            reads.append(Move("offsets", offsets))
        return tuple(reads), tuple(writes)

    def _keeps(self, keywords: dict[str, Any]) -> bool:
        """Whether a loop keeps its states; a first pass over segments does not."""
        return all(value for name, value in keywords.items() if name.startswith("KEEP"))

    def _name(self, pointer: str, keeps: bool = True) -> str:
        key = pointer.removesuffix("_ptr")
        if key.startswith(("enter_", "leave_")):
            word, _, rest = key.partition("_")
            return self._edge(word, argument_name(rest), keeps)
        names = self.owner.names[self.direction]
        for node in (*self.kernel.loads, *self.kernel.stores.values()):
            if node.op == "call_function" and buffer_name(node) == key:
                return names.of[node]
        state = key.startswith(("state_", "grad_next_"))
        return f"{argument_name(key)} of chunks" if state else result_name(key)

    def _edge(self, word: str, state: str, keeps: bool) -> str:
        """What enters or leaves a loop."""
        if self.kernel.kind == "map":
            return "identity" if word == "enter" else segment_map(state)
        if not keeps:
            return "zeros" if word == "enter" else segment_sum(state)
        return f"{state} {'entering' if word == 'enter' else 'leaving'}"

    def _times(self, pointer: str, x: Tensor, keywords: dict[str, Any]) -> int:
        """How often a tensor is asked for: by tiles of other dims, and by the heads of a group."""
        key = pointer.removesuffix("_ptr").removeprefix("enter_")
        node, times = self._load(key), 1
        rows = None if self.kernel.summed else self.kernel.row_dim
        for dim, count in ((self.column, "num_tiles"), (rows, "num_row_tiles")):
            if node is not None and dim not in node.meta["dims"]:
                times *= int(keywords.get(count, 1))
        spec = self.owner.spec
        if key in spec.inputs:
            times *= keywords["HV"] // x.shape[2]
        return times

    def _load(self, key: str) -> fx.Node | None:
        for node in (*self.kernel.loads, *self.kernel.carried):
            found = node.meta["key"] if node.op == "placeholder" else buffer_name(node)
            if found == key:
                return node
        return None

    def _runs(
        self, grid: tuple[int, ...], memory: dict[str, Tensor], keywords: dict[str, Any]
    ) -> int:
        """Chunks that all programs compute together; a loop's program has those of its span, one
        that adds up tiles computes each of them."""
        if self.kernel.kind not in LOOPS:
            return grid[0] * grid[1] * (keywords["num_row_tiles"] if self.kernel.summed else 1)
        problem = self.owner.problem
        lanes = 1 if problem.layout.packed else problem.batch
        spans = next(x.shape[0] for name, x in memory.items() if name.startswith("enter_"))
        return len(problem.layout.chunks) * lanes * (grid[0] // spans) * grid[1]

    # -- products -----------------------------------------------------------------------------

    def _products(
        self,
        listing: Listing,
        runs: int,
        keywords: dict[str, Any],
        tiles: dict[str, int],
    ) -> tuple[Product, ...]:
        out = []
        for node, text in listing.products.items():
            flops = product_flops(node, tiles.__getitem__) * runs
            if flops:
                policy = policy_of(node, keywords["MODE"])
                out.append(Product(text, flops, policy, node.meta["origin"]))
        return tuple(out)


class _NotedHelper:
    """A kernel of `fold_kernel`; `subject` is the argument that holds the state."""

    def __init__(self, owner: _Watched, name: str, subject: str):
        self.owner, self.name, self.subject = owner, name, subject

    def __getitem__(self, grid: Sequence[int]) -> Any:
        def note(*arguments: Any, **keywords: Any) -> None:
            self.owner.steps.append(self._step(tuple(grid), arguments, keywords))

        return note

    def _step(
        self, grid: tuple[int, ...], memory: Sequence[Tensor], keywords: dict[str, Any]
    ) -> Step:
        subject = argument_name(self.subject)
        state = subject.removeprefix("grad_next_")
        if self.name == "segment_products":
            purpose = "M of every segment, from those of its chunks"
            reads: tuple[Move, ...] = (
                Move(f"decay_{state}", memory[0].nbytes),
                Move("offsets", memory[1].nbytes),
            )
            writes: tuple[Move, ...] = (Move(segment_map(state), memory[2].nbytes),)
        else:
            purpose = f"{subject} entering every segment: M of one after the other"
            moves = [Move(segment_sum(subject), memory[0].nbytes)]
            if keywords["DECAY"]:
                moves.append(Move(segment_map(state), memory[1].nbytes))
            moves.append(Move(f"{subject} entering documents", memory[2].nbytes))
            reads = (*moves, Move("offsets", memory[3].nbytes))
            writes = (
                Move(f"{subject} entering", memory[4].nbytes),
                Move(f"{subject} leaving documents", memory[5].nbytes),
            )
        return Step(
            name=self.name,
            kind="fold",
            purpose=purpose,
            reads=reads,
            writes=writes,
            grid=grid,
            warps=keywords["num_warps"],
            stages=keywords["num_stages"],
        )


def _after(node: fx.Node) -> str:
    """The result that replaces what a loop carries."""
    key = node.meta["key"]
    if key.startswith("state_"):
        return f"next_{key.removeprefix('state_')}"
    return f"prev_{key.removeprefix('grad_next_')}"


# -- PyTorch between the launches -----------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Notes PyTorch operations that move data."""

    def __init__(self, executor: _Watched):
        super().__init__()
        self.steps = executor.steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.lstrip("_").startswith(_FREE) and name != "_unsafe_view":
            self._note(name, func, args, kwargs or {}, out)
        return out

    def _note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        written = {
            id(args[i] if i < len(args) else kwargs.get(a.name))
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        }
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        reads = [x for x in tensors if id(x) not in written and not name.endswith("_like")]
        results = [x for x in tensors if id(x) in written]
        results = results or [x for x in _flat(out) if isinstance(x, Tensor)]
        flops = 0.0
        if name in ("mm", "bmm"):
            flops = 2.0 * out.numel() * args[0].shape[-1]
        self.steps.append(
            Step(
                name="torch",
                kind="torch",
                purpose=name,
                reads=tuple(Move("", _nbytes(x)) for x in reads),
                writes=tuple(Move("", _nbytes(x)) for x in results),
                products=(Product(name, flops, "float32"),) if flops else (),
            )
        )


def _flat(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _nbytes(x: Tensor) -> int:
    """Bytes of a tensor, broadcast dims once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride != 0 or size == 0 else 1
    return count * x.element_size()


def _joined(steps: list[Step]) -> list[Step]:
    """Neighbouring PyTorch operations as one step."""
    out: list[Step] = []
    for step in steps:
        last = out[-1] if out else None
        if step.kind != "torch" or last is None or last.kind != "torch":
            out.append(step)
            continue
        names = dict.fromkeys((*last.purpose.split(", "), step.purpose))
        out[-1] = Step(
            name="torch",
            kind="torch",
            purpose=", ".join(names),
            reads=(Move("", last.bytes_read + step.bytes_read),),
            writes=(Move("", last.bytes_written + step.bytes_written),),
            products=last.products + step.products,
            calls=last.calls + 1,
        )
    return out
