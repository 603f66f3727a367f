"""Reversed running sums of row sums less column sums, as sums over the pairs across a cut.

The gradient of a gate is the reversed running sum of row sums less column sums of a value over
pairs of tokens. Pairs later than a token are in both and cancel, in mathematics only: every entry
carries the rounding errors of all that follow, and so does the gradient of a parameter, a sum over
all tokens. What does not cancel, at token t, are the pairs of a row at or after t and a column
before it, which this pass adds up by themselves.

Requires: canonical spelling. Guarantees: no reversed running sum along the tokens of row sums less
column sums of a lower triangular value. Columns up to t are added up by a running sum over pairs,
forwards, as reversed scans cost six times as much on a GPU; column t, as large as what it is taken
from at most, is taken off again. That is still more than a sum over tokens, and `needs_cuts` tells
whether a gradient of a parameter makes it worth while.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell, Operand, dims_of
from flexla_dist.compiler.passes.engine import Match, Rule, any_, call
from flexla_dist.compiler.passes.sums import highest_diagonal, replaced, rows_less_columns, terms
from flexla_dist.shapes import TOKEN_DIM

TOKENS = (TOKEN_DIM,)


def needs_cuts(cell: Cell, params: Iterable[str]) -> bool:
    """Does the gradient of a parameter read a reversed running sum of one number a token?"""
    outputs = cell.outputs
    reached = {outputs[f"grad_{name}"] for name in params if f"grad_{name}" in outputs}
    for node in reversed(cell.calls):
        if node in reached:
            if _is_reversed_sum(node):
                return True
            reached.update(x for x in node.args if isinstance(x, fx.Node))
    return False


def _is_reversed_sum(node: fx.Node) -> bool:
    return bool(node.target is ops.cumsum and dims_of(node) == TOKENS and node.kwargs["reverse"])


def _across(b: Builder, m: Match) -> Operand | None:
    node: fx.Node = m["outer"]
    if not _is_reversed_sum(node):
        return None
    for pair in rows_less_columns(terms(m["x"])):
        strict = highest_diagonal(pair.value) == -1
        value = pair.value if strict else b.emit(ops.tril, pair.value, diagonal=-1)
        until = b.emit(ops.cumsum, value, dim=-1, reverse=False)
        reached = b.emit(ops.total, b.emit(ops.tril, until, diagonal=0), dim=-2)
        across = b.emit(ops.sub, reached, b.emit(ops.total, value, dim=-2))
        nothing = b.expand(0.0, TOKENS)
        gone = {(pair.rows, pair.sign): nothing, (pair.columns, -pair.sign): nothing}
        rest = replaced(b, m["x"], gone)
        others = b.emit(ops.cumsum, rest, dim=-1, reverse=True)
        return b.emit(ops.add if pair.sign > 0 else ops.sub, others, across)
    return None


RULES: tuple[Rule, ...] = (
    Rule("pairs across a cut", call(ops.cumsum, any_("x"), name="outer"), _across),
)
