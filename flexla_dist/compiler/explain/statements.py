"""Graphs as short statements in the user's own names.

Contract: reading only. `Names` gives every node of a cell a name: the user's variable or the key of
the dict that `chunk_mode` returned, the name of the result, or the operator with its source line.
`listing` folds operators that are used once into the expression that uses them, so that a statement
stands for about one line of the user's code, and keeps that line with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from flexla_dist.compiler.explain.formulas import ATOM, Formula, formula
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.passes.padding import is_valid_mask
from flexla_dist.errors import SourceLine
from flexla_dist.shapes import Dims

BROADCASTS = frozenset({ops.unsqueeze, ops.squeeze, ops.expand, ops.widen, ops.narrow})
ELEMENTWISE_DOMAIN = frozenset(
    {ops.decay_matrix, ops.wide_decay_matrix, ops.decay_scan, ops.decay_scan_reverse}
)
INLINE = BROADCASTS | {ops.permute, ops.select, ops.full, ops.eye, ops.iota, ops.size, ops.tri_mask}
_FORWARD = ("token_mode", "padding", "chunk_mode", "decay_mode", "merge_mode")
STAGES = ("", *_FORWARD, *(f"d {stage}" for stage in reversed(_FORWARD)))
LONGEST_PRODUCT = 64
LONGEST = 44  # an operand of more characters is a statement of its own
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z_]\w*)\s*=[^=]")


@dataclass(frozen=True)
class Statement:
    """`name [dims] = text`, with the names that it reads.

    `kind` is "product" for matrix products and domain operators, "result", or "value".
    """

    name: str
    dims: Dims
    text: str
    kind: str
    stage: str
    origin: SourceLine | None
    reads: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(self.dims)}] = {self.text}"


@dataclass(frozen=True)
class Argument:
    """What a graph is given: name, dims, role (input, log_decay, param, scalar, state, ...)."""

    name: str
    dims: Dims
    role: str


@dataclass(frozen=True)
class Listing:
    """Statements in order, arguments, shown values of the results, the number of operators, and
    the text of every matrix product and domain operator."""

    statements: tuple[Statement, ...]
    arguments: tuple[Argument, ...]
    results: Mapping[str, str]
    operators: int
    products: Mapping[fx.Node, str]


def is_product(node: fx.Node) -> bool:
    """A matrix product, or a domain operator made of products."""
    if node.op != "call_function" or node.target in ELEMENTWISE_DOMAIN:
        return False
    return OPERATORS[node.target].kind in ("contract", "domain")  # type: ignore[index]


def padded_argument(node: fx.Node) -> fx.Node | None:
    """The argument of which this node is the padded form, if it is one."""
    if node.op != "call_function" or node.target is not ops.where:
        return None
    mask, inner = node.args[0], node.args[1]
    if not is_valid_mask(mask) or not isinstance(inner, fx.Node):  # type: ignore[arg-type]
        return None
    return inner if inner.op == "placeholder" else None


class Names:
    """A name for every node of a cell."""

    def __init__(self, cell: Cell):
        self.of: dict[fx.Node, str] = {}
        self.chosen: set[fx.Node] = set()  # named by the user or by a result
        self._taken: set[str] = set()
        for node in cell.placeholders.values():
            self._give(node, _argument_name(node), "")
        calls = cell.calls
        for node in calls:
            inner = padded_argument(node)
            if inner is not None:
                self.of[node] = self.of[inner]
        for name, node in _user_names(calls).items():
            if node not in self.of:
                self._give(node, name, _line(node))
                self.chosen.add(node)
        for name, node in cell.outputs.items():
            if node not in self.of and node.op == "call_function":
                self._give(node, result_name(name), _line(node))
                self.chosen.add(node)
        for node in calls:
            if node not in self.of:
                self._give(node, f"{OPERATORS[node.target].name}{_line(node)}", "")  # type: ignore[index]

    def _give(self, node: fx.Node, wanted: str, line: str) -> None:
        name, letter = wanted, 1
        if name in self._taken:
            name = base = f"{wanted}{line}"
            while name in self._taken:
                letter += 1
                name = f"{base}{'' if line or base[-1:].isdigit() else '_'}{_letters(letter)}"
        self._taken.add(name)
        self.of[node] = name

    def shown(self, node: fx.Node) -> str:
        """The name of a node; of a view, the expression of what it looks at."""
        return self.brief(node) if node.target in INLINE else self.of[node]

    def brief(self, node: fx.Node) -> str:
        """The operator of a node on named operands, `k_out.T @ v`."""
        return self._brief(node).text

    def _brief(self, node: fx.Node) -> Formula:
        operands: list[Formula | float] = []
        for x in node.args:
            if not isinstance(x, fx.Node):
                operands.append(float(x))  # type: ignore[arg-type]
            elif x.op == "call_function" and x.target in INLINE:
                operands.append(self._brief(x))
            elif not _is_sizes(x):
                operands.append(Formula(self.of[x], ATOM))
        return formula(node, operands)

    def listing(
        self,
        nodes: Iterable[fx.Node],
        results: Mapping[str, fx.Node],
        given: Iterable[fx.Node] = (),
    ) -> Listing:
        """Statements for `nodes`; `given` are known by name, such as values that a kernel loads."""
        return _Folder(self, list(nodes), results, frozenset(given)).run()


def cell_listing(cell: Cell, names: Names | None = None) -> Listing:
    """Statements of a whole cell."""
    names = names or Names(cell)
    return names.listing(cell.calls, cell.outputs)


def result_name(name: str) -> str:
    """`prev_S` is the gradient of the entering state, `next_S` the state after the chunk."""
    return f"grad_{name.removeprefix('prev_')}" if name.startswith("prev_") else name


def argument_name(key: str) -> str:
    """Shown name of an argument: `S` for the entering state `state_S`."""
    return key.removeprefix("state_") if key.startswith("state_") else key


def _argument_name(node: fx.Node) -> str:
    return argument_name(node.meta["key"])


def _letters(count: int) -> str:
    return chr(ord("a") + count - 1) if count <= 26 else f"z{count}"


def _line(node: fx.Node) -> str:
    origin = node.meta.get("origin")
    return f"_{origin.line}" if origin is not None else ""


def _user_names(calls: list[fx.Node]) -> dict[str, fx.Node]:
    """Labels of local values, and targets of plain assignments for the last node of their line."""
    by_label: dict[str, fx.Node] = {}
    by_line: dict[tuple[str, int, str], fx.Node] = {}
    for node in calls:
        if padded_argument(node) is not None or node.meta["stage"].startswith("d "):
            continue
        if node.meta.get("label") and node.target not in BROADCASTS:
            by_label[node.meta["label"]] = node
        origin = node.meta.get("origin")
        if origin is not None and node.target not in BROADCASTS:
            by_line[origin.file, origin.line, origin.function] = node
    labelled = set(by_label.values())
    for node in by_line.values():
        found = _ASSIGNMENT.match(node.meta["origin"].text)
        if found and node not in labelled and node.target is not ops.permute:
            by_label.setdefault(found[1], node)
    return by_label


class _Folder:
    def __init__(
        self,
        names: Names,
        nodes: list[fx.Node],
        results: Mapping[str, fx.Node],
        given: frozenset[fx.Node],
    ):
        self.names, self.nodes, self.results, self.given = names, nodes, results, given
        self.inside = {node for node in nodes if node not in given}
        self.uses: dict[fx.Node, int] = {}
        for node in nodes:
            if node.target not in INLINE:
                for x in node.args:
                    self._count(x)
        self.roots = {node for node in results.values() if isinstance(node, fx.Node)}
        self.done: dict[fx.Node, None] = {}
        self.out: list[Statement] = []
        self.arguments: dict[str, Argument] = {}

    def _count(self, x: Any) -> None:
        while isinstance(x, fx.Node) and x.op == "call_function" and x.target in INLINE:
            x = next((a for a in x.args if isinstance(a, fx.Node) and not _is_sizes(a)), None)
        if isinstance(x, fx.Node):
            self.uses[x] = self.uses.get(x, 0) + 1

    def run(self) -> Listing:
        for node in self.nodes:
            if node in self.inside and self._stands_alone(node):
                self._state(node)
        results = {result_name(name): self._shown(node) for name, node in self.results.items()}
        return Listing(
            _by_stage(self.out),
            tuple(self.arguments.values()),
            results,
            sum(padded_argument(node) is None for node in self.inside),
            {node: self._product(node) for node in self.nodes if self._is_own_product(node)},
        )

    def _stands_alone(self, node: fx.Node) -> bool:
        if padded_argument(node) is not None:
            return False
        if node.target in INLINE:
            return node in self.roots and node.target not in BROADCASTS
        chosen = node in self.names.chosen
        return node in self.roots or chosen or self.uses.get(node, 0) > 1

    def _shown(self, node: fx.Node) -> str:
        return self._operand(node, {}).text

    def _state(self, node: fx.Node) -> None:
        if node in self.done:
            return
        reads: dict[str, None] = {}
        text = self._formula(node, reads).text
        kind = "value"
        if node in self.roots:
            kind = "result"
        if self._has_product(node):
            kind = "product"
        self.done[node] = None
        meta = node.meta
        self.out.append(
            Statement(
                self.names.of[node], meta["dims"], text, kind, meta["stage"], meta["origin"],
                tuple(reads),
            )
        )  # fmt: skip

    def _is_own_product(self, node: fx.Node) -> bool:
        return node in self.inside and is_product(node)

    def _product(self, node: fx.Node) -> str:
        text = self._formula(node, {}).text
        return text if len(text) <= LONGEST_PRODUCT else self.names.brief(node)

    def _has_product(self, node: fx.Node) -> bool:
        if is_product(node):
            return True
        return any(
            isinstance(x, fx.Node)
            and x in self.inside
            and x not in self.done
            and padded_argument(x) is None
            and self._has_product(x)
            for x in node.args
        )

    def _formula(self, node: fx.Node, reads: dict[str, None]) -> Formula:
        operands = [
            None if _is_sizes(x) else self._operand(x, reads) if isinstance(x, fx.Node) else x
            for x in node.args
        ]
        return formula(node, [x for x in operands if x is not None])

    def _operand(self, node: fx.Node, reads: dict[str, None]) -> Formula:
        inner = padded_argument(node)
        node = inner if inner is not None and node in self.inside else node
        if node.op == "placeholder" or node not in self.inside:
            return self._named(node, reads)
        if node not in self.done and self._stands_alone(node):
            self._state(node)
        if node in self.done:
            return self._named(node, reads)
        nested: dict[str, None] = {}
        text = self._formula(node, nested)
        if len(text.text) > LONGEST and node.target not in INLINE:
            self._state(node)
            return self._named(node, reads)
        reads.update(nested)
        return text

    def _named(self, node: fx.Node, reads: dict[str, None]) -> Formula:
        name = self.names.of[node]
        if name not in self.arguments and node not in self.done:
            self.arguments[name] = Argument(name, node.meta["dims"], node.meta["role"])
        reads[name] = None
        return Formula(name, ATOM)


def _by_stage(statements: list[Statement]) -> tuple[Statement, ...]:
    """Stages in the order in which they run, unless a statement would be read before it is made."""
    order = {stage: at for at, stage in enumerate(STAGES)}
    ranked = sorted(statements, key=lambda s: order.get(s.stage, len(order)))
    made: set[str] = set()
    local = {s.name for s in statements}
    for statement in ranked:
        if any(name in local and name not in made for name in statement.reads):
            return tuple(statements)
        made.add(statement.name)
    return tuple(ranked)


def _is_sizes(x: Any) -> bool:
    return isinstance(x, fx.Node) and x.meta.get("role") == "sizes"
