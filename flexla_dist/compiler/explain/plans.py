"""The plans of a call: what runs, in which order, and the floor under it.

Contract: data that reports read; nothing here needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.explain.costs import (
    H200,
    Move,
    Product,
    Roofline,
    Step,
    policy_of,
    product_flops,
)
from flexla_dist.compiler.explain.statements import Names, is_product
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.pipeline import GRAD_OUTPUT, Graphs
from flexla_dist.shapes import TOKEN_DIM

POLICIES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "tf32x3"}


@dataclass(frozen=True)
class DirectionPlan:
    """Launches of one direction; `plan` is "fused" or "unfused"; `segments` counts those of the
    scans, 0 where there are none.

    `floor` is a step that reads what the results depend on once, writes them once, and computes
    once every product that no plan can do without. Backward need not make again what forward may
    have left in memory: the states entering chunks, and the values that forward keeps for it.
    """

    direction: str
    plan: str
    steps: tuple[Step, ...]
    segments: int
    source: str
    floor: Step

    @property
    def kernels(self) -> tuple[Step, ...]:
        """The steps that are generated kernels."""
        return tuple(step for step in self.steps if step.kind != "torch")

    @property
    def bytes_read(self) -> int:
        """Bytes read by all steps."""
        return sum(step.bytes_read for step in self.steps)

    @property
    def bytes_written(self) -> int:
        """Bytes written by all steps."""
        return sum(step.bytes_written for step in self.steps)

    @property
    def flops(self) -> float:
        """FLOPs of all steps."""
        return sum(step.flops for step in self.steps)

    def seconds(self, device: Roofline = H200) -> float:
        """Least time of all steps, one after the other."""
        return sum(step.seconds(device) for step in self.steps)


@dataclass(frozen=True)
class TritonPlan:
    """Both directions."""

    directions: tuple[DirectionPlan, ...]


@dataclass(frozen=True)
class Missing:
    """Why there is no plan, and what to do."""

    reason: str


def segment_sum(state: str) -> str:
    """Name of what segments add to a state when nothing enters them."""
    return f"{state}_hat of segments"


def segment_map(state: str) -> str:
    """Name of what segments do to a state."""
    return f"M of {state}'s segments"


def entering_from(name: str) -> tuple[str, ...]:
    """What the entering states `name` are folded from; the name itself for other memory."""
    if not name.endswith(" entering"):
        return (name,)
    state = name.removesuffix(" entering")
    return (segment_sum(state), segment_map(state), f"decay_{state}")


def floor_of(
    graphs: Graphs, problem: Problem, direction: str, kept: Iterable[fx.Node] = ()
) -> Step:
    """The fused floor of a direction, see `DirectionPlan`; bytes of states are not counted.

    kept: nodes of the backward graph that forward stores.
    """
    given = {**problem.inputs, **problem.params}
    output = problem.output_dtype.itemsize
    for size in problem.output_shape():
        output *= size
    if direction == "forward":
        cell = graphs.kernel_forward
        roots = [x for n, x in cell.outputs.items() if n == "output" or n.startswith("next_")]
        writes = [Move("output", output)]
    else:
        cell = graphs.kernel_backward
        roots = [x for n, x in cell.outputs.items() if not n.startswith("next_")]
        writes = [Move(f"grad_{name}", x.nbytes) for name, x in given.items()]
    read = {x.meta["key"] for x in ancestors(roots) if x.op == "placeholder"}
    reads = [Move(name, x.nbytes) for name, x in given.items() if name in read]
    reads += [Move(GRAD_OUTPUT, output)] if GRAD_OUTPUT in read else []
    return Step(
        name="floor",
        kind="floor",
        purpose="inputs read once, results written once, every product that is needed once",
        reads=tuple(reads),
        writes=tuple(writes),
        products=_products(cell, roots, problem, frozenset(kept)),
    )


def _products(
    cell: Cell, roots: list[fx.Node], problem: Problem, kept: frozenset[fx.Node]
) -> tuple[Product, ...]:
    layout, names = problem.layout, Names(cell)
    lanes = 1 if layout.packed else problem.batch
    runs = len(layout.chunks) * lanes * problem.heads
    policy = POLICIES.get(str(problem.output_dtype), "float32")

    def size(dim: str) -> int:
        return layout.chunk_size if dim == TOKEN_DIM else problem.size(dim)

    return tuple(
        Product(
            names.brief(node), product_flops(node, size) * runs, policy_of(node, policy),
            node.meta["origin"],
        )
        for node in ancestors(roots, kept)
        if is_product(node)
    )  # fmt: skip


def ancestors(roots: list[fx.Node], kept: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
    """Every node that the roots need, and they; without what is kept and what that alone needs."""
    seen: dict[fx.Node, None] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen and node not in kept:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    return list(seen)
