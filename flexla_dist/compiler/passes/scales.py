"""Scales out of matrix products, so that operands stay as they lie in memory.

A product of an argument times one factor a row makes every program load the argument, scale it in
registers and write it back for the tensor cores; the same factor times the result costs no such
way, and the argument is shared with other products that want it as it is.

Requires: canonical spelling. Guarantees: where the core of an operand is an argument of the cell,
numbers and factors a row (of the result) times that operand come after the product; factors along
the summed dim go to the other operand if that one is computed anyway, and from the left to the
right if neither is: the right one is the narrower, it has columns. Sums and exponents are not
touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand, dims_of
from flexla_dist.compiler.passes.engine import Match, Rule, any_, call
from flexla_dist.compiler.passes.simplify import is_constant
from flexla_dist.shapes import UNIT_DIM

SWAP = (-1, -2)
ROW, COLUMN = -2, -1
_STORED = ("input", "grad_output", "state", "grad_next")


@dataclass
class Operand_:
    """`core` times numbers and scalars, times factors a row, times factors a column."""

    core: fx.Node
    scalars: list[Operand] = field(default_factory=list)
    rows: list[fx.Node] = field(default_factory=list)
    columns: list[fx.Node] = field(default_factory=list)

    @property
    def stored(self) -> bool:
        """Is the core an argument as it lies in memory, transposed or with padding selected?"""
        node: Operand = self.core
        if self.core.target is ops.permute and self.core.kwargs["order"] == SWAP:
            node = self.core.args[0]  # type: ignore[assignment]
        if isinstance(node, fx.Node) and node.target is ops.where:
            node = node.args[1] if is_constant(node.args[2]) else node  # type: ignore[assignment, arg-type]
        placeholder = isinstance(node, fx.Node) and node.op == "placeholder"
        return placeholder and node.meta["role"] in _STORED  # type: ignore[union-attr]


def taken_apart(b: Builder, node: fx.Node) -> Operand_:
    """An operand of a product and its factors."""
    found = Operand_(node)
    while True:
        node = found.core
        if node.target is ops.permute and node.kwargs["order"] == SWAP:
            inner = node.args[0]
            parts = _factor(inner)
            if parts is None:
                return found
            core, factor = parts
            found.core = b.transpose(core)
            factor = b.transpose(factor) if isinstance(factor, fx.Node) else factor
        else:
            parts = _factor(node)
            if parts is None:
                return found
            found.core, factor = parts
        _kind(found, factor).append(factor)


def _factor(node: Operand) -> tuple[fx.Node, Operand] | None:
    """(x, s) of a product of a matrix with a number or with one factor a row or column."""
    if not isinstance(node, fx.Node) or node.target is not ops.mul:
        return None
    for x, s in (node.args, node.args[::-1]):
        if not isinstance(x, fx.Node) or dims_of(x) != dims_of(node):
            continue
        if not isinstance(s, fx.Node) or UNIT_DIM in dims_of(s):
            return x, s  # type: ignore[return-value]
    return None


def _kind(found: Operand_, factor: Operand) -> list:
    if not isinstance(factor, fx.Node) or dims_of(factor) == (UNIT_DIM, UNIT_DIM):
        return found.scalars
    return found.rows if dims_of(factor)[COLUMN] == UNIT_DIM else found.columns


def _times(b: Builder, node: fx.Node, factors: Iterable[Operand]) -> fx.Node:
    """The node times all factors, which are multiplied with one another first."""
    together: Operand | None = None
    number = 1.0
    for factor in factors:
        if not isinstance(factor, fx.Node):
            number *= factor
        else:
            together = factor if together is None else b.emit(ops.mul, together, factor)
    if number != 1.0:
        together = number if together is None else b.emit(ops.mul, together, number)
    return node if together is None else b.emit(ops.mul, node, together)


def _product(b: Builder, m: Match) -> Operand | None:
    left, right = taken_apart(b, m["a"]), taken_apart(b, m["b"])
    scalars: list[Operand] = []
    rows: list[fx.Node] = []
    columns: list[fx.Node] = []
    if left.stored:
        scalars, left.scalars = [*scalars, *left.scalars], []
        rows, left.rows = left.rows, []
    if right.stored:
        scalars, right.scalars = [*scalars, *right.scalars], []
        columns, right.columns = right.columns, []
    moved = False
    if left.stored and left.columns:  # along the summed dim
        right.rows += [b.transpose(x) for x in left.columns]
        left.columns, moved = [], True
    elif right.stored and not left.stored and right.rows:
        left.columns += [b.transpose(x) for x in right.rows]
        right.rows, moved = [], True
    if not (scalars or rows or columns or moved):
        return None
    out = b.matmul(_whole(b, left), _whole(b, right))
    if rows:
        return _times(b, _times(b, out, columns), [*scalars, *rows])
    return _times(b, out, [*scalars, *columns])


def _negated(b: Builder, m: Match) -> Operand:
    """A value and its negative need not both be kept for later kernels."""
    return b.emit(ops.neg, b.matmul(m["a"], m["b"]))


def _whole(b: Builder, operand: Operand_) -> fx.Node:
    """An operand put together again."""
    out = operand.core
    if operand.columns:
        out = _times(b, out, [*operand.scalars, *operand.columns])
        return _times(b, out, operand.rows)
    return _times(b, out, [*operand.scalars, *operand.rows])


RULES: tuple[Rule, ...] = (
    Rule("sign of the left", call(ops.matmul, call(ops.neg, any_("a")), any_("b")), _negated),
    Rule("sign of the right", call(ops.matmul, any_("a"), call(ops.neg, any_("b"))), _negated),
    Rule("scale of an operand", call(ops.matmul, any_("a"), any_("b")), _product),
)
