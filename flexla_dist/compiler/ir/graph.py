"""Graphs of operators: a `torch.fx.Graph` with dims, types and source lines on its nodes.

Contract: a `Builder` is the only way to add a node. It infers the dims of the result, aligns the
ranks of elementwise operands, and shares equal nodes (same operator, operands and attributes give
the same node), so common subexpressions never exist twice. A finished graph has one output node
whose argument is a dict of named results. Node metadata: `dims`, `mask` (is it boolean), `role` (of
placeholders), `stage`, `origin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.operators import OPERATORS, ShapeRuleError
from flexla_dist.errors import SourceLine
from flexla_dist.shapes import UNIT_DIM, Dims, format_dims

Operand: TypeAlias = fx.Node | int | float
MASK_OPERATORS = frozenset({ops.tri_mask})
SIZED_OPERATORS = frozenset({ops.expand, ops.place})


def is_mask(node: Operand) -> bool:
    """True for a boolean node."""
    return isinstance(node, fx.Node) and bool(node.meta["mask"])


def dims_of(node: Operand) -> Dims:
    """Dims of a node; a number has none."""
    return node.meta["dims"] if isinstance(node, fx.Node) else ()


def add_argument(graph: fx.Graph, name: str) -> fx.Node:
    """A placeholder whose parameter in generated code is its own variable.

    torch.fx calls the parameter by `name` and the variable by a spelling of its own (`A` becomes
    `a`), which may be the parameter of another argument.
    """
    node = graph.placeholder(name)
    node.target = node.name
    return node


@dataclass(frozen=True)
class Mark:
    """Where a node comes from: the stage, the user's line and the user's name for it, if known."""

    stage: str = ""
    origin: SourceLine | None = None
    label: str = ""


class Builder:
    """Appends nodes to a graph; equal nodes are shared."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mark = Mark()
        self._shared: dict[Any, fx.Node] = {}
        self._placeholders: dict[str, fx.Node] = {}
        self.sizes = self.placeholder("sizes", (), "sizes")

    # -- sources ------------------------------------------------------------------------------

    def placeholder(self, name: str, dims: Dims, role: str, mask: bool = False) -> fx.Node:
        """The argument called `name`; asking twice gives the same node."""
        if name not in self._placeholders:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), self.graph._root)
            with self.graph.inserting_before(first):
                node = add_argument(self.graph, name)
            node.meta.update(dims=dims, role=role, mask=mask, stage="", origin=None, key=name)
            self._placeholders[name] = node
        return self._placeholders[name]

    @property
    def placeholders(self) -> Mapping[str, fx.Node]:
        """All arguments by name."""
        return self._placeholders

    # -- nodes --------------------------------------------------------------------------------

    def emit(self, fn: Callable[..., Any], *operands: Operand, **attrs: Any) -> fx.Node:
        """Append `fn(*operands, **attrs)`, or return the equal node that is there already."""
        info = OPERATORS[fn]
        if info.kind in ("elementwise", "mask"):
            operands = self._align(operands)
        key = (fn, tuple(_identity(x) for x in operands), tuple(sorted(attrs.items())))
        if key in self._shared:
            return self._shared[key]
        dims = info.dims(*(dims_of(x) for x in operands if isinstance(x, fx.Node)), **attrs)
        node = self.graph.call_function(fn, tuple(operands), attrs)
        mask = info.kind == "mask" or fn in MASK_OPERATORS or self._carries_mask(fn, operands)
        node.meta.update(
            dims=dims,
            mask=mask,
            stage=self.mark.stage,
            origin=self.mark.origin,
            label=self.mark.label,
            role="value",
        )
        self._shared[key] = node
        return node

    def _carries_mask(self, fn: Callable[..., Any], operands: tuple[Operand, ...]) -> bool:
        moved = operands[1] if fn in SIZED_OPERATORS else (operands[0] if operands else 0.0)
        return OPERATORS[fn].kind == "shape" and is_mask(moved)

    def _align(self, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        rank = max((len(dims_of(x)) for x in operands), default=0)
        return tuple(self.lift(x, rank) if isinstance(x, fx.Node) else x for x in operands)

    def lift(self, node: fx.Node, rank: int) -> fx.Node:
        """Insert leading dims of size one up to `rank`."""
        while len(node.meta["dims"]) < rank:
            node = self.emit(ops.unsqueeze, node, dim=-len(node.meta["dims"]) - 1)
        return node

    def expand(self, node: Operand, dims: Dims) -> fx.Node:
        """Broadcast to exactly `dims`; a number becomes a constant of those dims."""
        if not isinstance(node, fx.Node):
            return self.emit(ops.full, self.sizes, dims=dims, value=float(node))
        node = self.lift(node, len(dims))
        if node.meta["dims"] == dims:
            return node
        return self.emit(ops.expand, self.sizes, node, dims=dims)

    def reduce_to(self, node: fx.Node, dims: Dims) -> fx.Node:
        """Sum over the dims that broadcasting added, the transpose of `expand`."""
        have = node.meta["dims"]
        if len(have) != len(dims):
            raise ShapeRuleError(f"cannot reduce {format_dims(have)} to {format_dims(dims)}")
        for at in range(len(dims)):
            if dims[at] == UNIT_DIM and have[at] != UNIT_DIM:
                summed = self.emit(ops.total, node, dim=at - len(dims))
                node = self.emit(ops.unsqueeze, summed, dim=at - len(dims))
        return node

    def transpose(self, node: fx.Node) -> fx.Node:
        """Swap the two dims of a matrix."""
        return self.emit(ops.permute, node, order=(-1, -2))

    def matmul(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """Matrix product."""
        return self.emit(ops.matmul, a, b)

    def finish(self, outputs: Mapping[str, fx.Node]) -> Cell:
        """Close the graph with named results, dropping what they do not need."""
        self.graph.output(dict(outputs))
        self.graph.eliminate_dead_code()
        return Cell(self.graph)


def _identity(x: Operand) -> Any:
    return x if isinstance(x, fx.Node) else ("number", float(x))


class Cell:
    """A finished graph with named results."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph

    @property
    def outputs(self) -> dict[str, fx.Node]:
        """Results by name."""
        node = next(iter(reversed(self.graph.nodes)))
        return dict(node.args[0])

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        """Arguments by name."""
        return {n.meta["key"]: n for n in self.graph.nodes if n.op == "placeholder"}

    @property
    def calls(self) -> list[fx.Node]:
        """All operator nodes in order."""
        return [n for n in self.graph.nodes if n.op == "call_function"]

    def copy_into(
        self,
        builder: Builder,
        substitute: Mapping[str, Operand] | None = None,
        emit: Callable[..., Operand] | None = None,
    ) -> dict[str, Operand]:
        """Re-emit every node into `builder`; returns results by name.

        `substitute` replaces placeholders by nodes of the new graph or numbers; `emit` replaces
        `builder.emit` (the rewriting engine passes one that tries its rules).
        """
        emit = emit or builder.emit
        env: dict[fx.Node, Operand] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                env[node] = _argument(builder, node, substitute or {})
            elif node.op == "call_function":
                builder.mark = Mark(
                    node.meta["stage"], node.meta["origin"], node.meta.get("label", "")
                )
                operands = [env[x] if isinstance(x, fx.Node) else x for x in node.args]
                env[node] = emit(node.target, *operands, **node.kwargs)
        return {name: env[node] for name, node in self.outputs.items()}

    def __str__(self) -> str:
        return "\n".join(format_cell(self))


def _argument(builder: Builder, node: fx.Node, substitute: Mapping[str, Operand]) -> Operand:
    key = node.meta["key"]
    if key in substitute:
        given = substitute[key]
        return given if isinstance(given, fx.Node) else builder.expand(given, node.meta["dims"])
    if key == "sizes":
        return builder.sizes
    return builder.placeholder(key, node.meta["dims"], node.meta["role"], node.meta["mask"])


def format_cell(cell: Cell) -> Iterable[str]:
    """Lines `name [dims] = operator(operands)   # stage file:line`, for people."""
    for node in cell.graph.nodes:
        if node.op == "placeholder":
            if node.meta["key"] != "sizes":
                yield f"{node.name} {format_dims(node.meta['dims'])} : {node.meta['role']}"
        elif node.op == "call_function":
            shown = [str(x) for x in node.args if not _is_sizes(x)]
            shown += [f"{k}={v}" for k, v in node.kwargs.items()]
            origin = node.meta["origin"]
            where = f" {origin.file.rsplit('/', 1)[-1]}:{origin.line}" if origin else ""
            name = OPERATORS[node.target].name
            text = f"{node.name} {format_dims(node.meta['dims'])} = {name}({', '.join(shown)})"
            yield f"{text:<72}# {node.meta['stage']}{where}"
    results = ", ".join(f"{name}={node}" for name, node in cell.outputs.items())
    yield f"return {results}"


def _is_sizes(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.meta.get("role") == "sizes"
