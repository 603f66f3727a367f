"""Sums read as signed terms, and triangles of pairs of tokens: what patterns of gradients look for.

Contract: `terms` and `highest_diagonal` only read; `replaced` re-emits a sum with other terms. A
value may be a term several times, with either sign: a term is one occurrence, not the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand, dims_of
from flexla_dist.shapes import TOKEN_DIM

PAIR = (TOKEN_DIM, TOKEN_DIM)
_DECAYS = (ops.decay_matrix, ops.decay_scores)

Signed = tuple[fx.Node, int]
Substitution = Mapping[Signed, Operand]


def terms(node: Operand, sign: int = 1) -> Iterator[Signed]:
    """The values that sums, differences and negations add up to a node, with their signs."""
    if not isinstance(node, fx.Node):
        return
    if node.target in (ops.add, ops.sub):
        yield from terms(node.args[0], sign)  # type: ignore[arg-type]
        yield from terms(node.args[1], sign if node.target is ops.add else -sign)  # type: ignore[arg-type]
    elif node.target is ops.neg:
        yield from terms(node.args[0], -sign)  # type: ignore[arg-type]
    else:
        yield node, sign


def replaced(b: Builder, node: Operand, by: Substitution) -> Operand:
    """The same sum with some of its terms replaced: of each term given, one occurrence with that
    sign, whose place and sign the new value takes."""
    return _replaced(b, node, 1, dict(by))


def _replaced(b: Builder, node: Operand, sign: int, left: dict[Signed, Operand]) -> Operand:
    if not isinstance(node, fx.Node):
        return node
    if node.target not in (ops.add, ops.sub, ops.neg):
        return left.pop((node, sign), node)
    last = sign if node.target is ops.add else -sign
    signs = (last,) if node.target is ops.neg else (sign, last)
    new = [_replaced(b, x, s, left) for x, s in zip(node.args, signs, strict=True)]  # type: ignore[arg-type]
    if any(x is not y for x, y in zip(new, node.args, strict=True)):
        return b.emit(node.target, *new)
    return node


def highest_diagonal(x: Any) -> int | None:
    """The diagonal above which a value over pairs of tokens is zero, if that is known: 0 for a
    lower triangle with its diagonal, -1 for one without."""
    if not isinstance(x, fx.Node) or dims_of(x) != PAIR:
        return None
    if x.target is ops.tril:
        return min([x.kwargs["diagonal"], *_known(x.args[0])])  # type: ignore[type-var]
    if x.target in _DECAYS:
        return -1 if x.kwargs["strict"] else 0
    if x.target is ops.neg:
        return highest_diagonal(x.args[0])
    if x.target is ops.mul:
        return min([*_known(x.args[0]), *_known(x.args[1])], default=None)
    if x.target in (ops.add, ops.sub):
        both = [*_known(x.args[0]), *_known(x.args[1])]
        return max(both) if len(both) == 2 else None
    return None


def _known(x: Any) -> list[int]:
    found = highest_diagonal(x)
    return [] if found is None else [found]


@dataclass(frozen=True)
class RowsLessColumns:
    """Row sums of a lower triangular value and, with the opposite sign, its column sums."""

    rows: fx.Node
    columns: fx.Node
    sign: int

    @property
    def value(self) -> fx.Node:
        """What is summed."""
        return self.rows.args[0]  # type: ignore[return-value]


def rows_less_columns(found: Iterable[Signed]) -> Iterator[RowsLessColumns]:
    """All such pairs among the terms of a sum; `sign` is that of the rows."""
    known = [(x, sign) for x, sign in found if x.target is ops.total]
    for x, sign in known:
        lower = highest_diagonal(x.args[0])
        if x.kwargs["dim"] != -1 or lower is None or lower > 0:
            continue
        for y, other in known:
            if other == -sign and y.kwargs["dim"] == -2 and y.args[0] is x.args[0]:
                yield RowsLessColumns(x, y, sign)
