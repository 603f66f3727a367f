"""Gradients of gates without the diagonal, whose terms cancel.

A token does not decay on its way to itself, whatever the gate. Yet the gradient of the gate is made
of row sums less column sums of one value over pairs of tokens, and the diagonal, often the largest
part of both, cancels in mathematics only: in float32 it leaves its rounding error, which reversed
running sums and sums over all tokens then pile up.

Requires: canonical spelling, a graph with gradients. Guarantees: where a sum holds row sums of a
lower triangular value and, with the opposite sign, its column sums, both are taken below the
diagonal; likewise where it holds `x * decay_rows(p, y)` and `-y * decay_cols(p, x)`. Rows and
columns of different gates whose gradients go different ways are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand
from flexla_dist.compiler.passes.engine import Match, Replacement, Rule, any_, call
from flexla_dist.compiler.passes.sums import (
    Signed,
    Substitution,
    highest_diagonal,
    replaced,
    rows_less_columns,
    terms,
)

X, Y = any_("x"), any_("y")
_DECAYED_SUMS = (ops.decay_rows, ops.decay_cols)


# -- row sums less column sums --------------------------------------------------------------------


def _below(b: Builder, total: fx.Node) -> fx.Node:
    below = b.emit(ops.tril, total.args[0], diagonal=-1)
    return b.emit(ops.total, below, **total.kwargs)


def _totals(b: Builder, found: list[Signed]) -> Substitution | None:
    for pair in rows_less_columns(found):
        if highest_diagonal(pair.value) == 0:
            signed = ((pair.rows, pair.sign), (pair.columns, -pair.sign))
            return {term: _below(b, term[0]) for term in signed}
    return None


# -- sums under a vector decay --------------------------------------------------------------------


def _apart(b: Builder, m: Match) -> Operand | None:
    """A sum over tokens under a decay: what a token adds to itself does not decay."""
    node: fx.Node = m["outer"]
    p, x, b_row, b_col = node.args
    if b_row is not b_col or node.kwargs["strict"] or highest_diagonal(p) == -1:
        return None
    rest = b.emit(node.target, p, x, b_row, b_col, strict=True)
    own = b.emit(ops.total, b.emit(ops.triu, b.emit(ops.tril, p, diagonal=0), diagonal=0), dim=-1)
    return b.emit(ops.add, rest, b.emit(ops.mul, b.emit(ops.unsqueeze, own, dim=-1), x))


def _factors(node: Operand) -> Iterator[tuple[Operand, Operand]]:
    """The two factors of a product, in both orders."""
    if isinstance(node, fx.Node) and node.target is ops.mul:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def _split(node: Operand) -> tuple[fx.Node, tuple[Operand, Operand]] | None:
    """`(s, (d, y))` of a decayed sum with its diagonal apart, `s + d * y`."""
    if not isinstance(node, fx.Node) or node.target is not ops.add:
        return None
    for rest, own in (node.args, node.args[::-1]):
        decayed = isinstance(rest, fx.Node) and rest.target in _DECAYED_SUMS
        if decayed and isinstance(own, fx.Node) and own.target is ops.mul:
            return rest, (own.args[0], own.args[1])
    return None


def _products(found: list[Signed]) -> Iterator[tuple[fx.Node, int, Operand, fx.Node, set[Operand]]]:
    """Terms `x * (s + d * y)` as (term, sign, x, s, {x, d, y})."""
    for term, sign in found:
        for x, factor in _factors(term):
            parts = _split(factor)
            if parts is not None:
                yield term, sign, x, parts[0], {x, *parts[1]}


def _products_apart(b: Builder, found: list[Signed]) -> Substitution | None:
    """`x (s + d y) - y (t + d x)` is `x s - y t`."""
    known = list(_products(found))
    for at, (first, sign, x, s, own) in enumerate(known):
        for second, other, y, t, same in known[at + 1 :]:
            if other == -sign and own == same and s.args[0] is t.args[0]:
                return {
                    (first, sign): b.emit(ops.mul, x, s),
                    (second, other): b.emit(ops.mul, y, t),
                }
    return None


def _in_sum(find: Callable[[Builder, list[Signed]], Substitution | None]) -> Replacement:
    def replacement(b: Builder, m: Match) -> Operand | None:
        by = find(b, list(terms(m["outer"])))
        return None if by is None else replaced(b, m["outer"], by)

    return replacement


RULES: tuple[Rule, ...] = (
    *(
        Rule("diagonal apart", call(fn, *map(any_, "pxrc"), name="outer"), _apart)
        for fn in _DECAYED_SUMS
    ),
    *(
        Rule(name, call(fn, X, Y, name="outer"), _in_sum(find))
        for name, find in (
            ("row sums less column sums", _totals),
            ("decayed rows less decayed columns", _products_apart),
        )
        for fn in (ops.add, ops.sub)
    ),
)
