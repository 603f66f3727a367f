"""Common factors of the terms of a sum are multiplied once: `x a + x b` is `x (a + b)`.

The gradient of a gate is a sum of `q dq` less `k dk` over the ways in which q and k were used; with
q and k taken out, the sums that remain are those that the gradients of q and k need anyway, so a
kernel holds two values where it held one for each way.

Requires: canonical spelling. Guarantees: no two terms of a sum share a factor of the sum's own dims
unless one of them is that factor alone. Runs where what cancels has been taken out before.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand, dims_of
from flexla_dist.compiler.passes.engine import Match, Rule, any_, call
from flexla_dist.compiler.passes.sums import replaced, terms


def factors(node: Operand) -> list[Operand]:
    """The values that products multiply to a node, in order."""
    if isinstance(node, fx.Node) and node.target is ops.mul:
        return [x for operand in node.args for x in factors(operand)]  # type: ignore[arg-type]
    return [node]


def _without(all_of: list[Operand], taken: Iterable[Operand]) -> list[Operand]:
    rest = list(all_of)
    for x in taken:
        rest.remove(x)
    return rest


def _shared(a: list[Operand], b: list[Operand]) -> list[Operand]:
    """Factors of both, in the order of the first."""
    rest, found = list(b), []
    for x in a:
        if x in rest:
            rest.remove(x)
            found.append(x)
    return found


def _product(b: Builder, of: list[Operand]) -> Operand:
    first, *others = of
    for x in others:
        first = b.emit(ops.mul, first, x)
    return first


def _factored(b: Builder, m: Match) -> Operand | None:
    outer: fx.Node = m["outer"]
    whole = [t for t in terms(outer) if dims_of(t[0]) == dims_of(outer)]
    for at, (first, sign) in enumerate(whole):
        for second, other in whole[at + 1 :]:
            if first is second:
                continue
            mine, theirs = factors(first), factors(second)
            both = _shared(mine, theirs)
            rests = _without(mine, both), _without(theirs, both)
            if not all(rests) or not any(dims_of(x) == dims_of(outer) for x in both):
                continue
            x, y = (_product(b, rest) for rest in rests)
            inner = b.emit(ops.add if sign == other else ops.sub, x, y)
            joined = b.emit(ops.mul, _product(b, both), inner)
            zero = b.expand(0.0, dims_of(outer))
            return replaced(b, outer, {(first, sign): joined, (second, other): zero})
    return None


X, Y = any_("x"), any_("y")
RULES: tuple[Rule, ...] = tuple(
    Rule("common factor", call(fn, X, Y, name="outer"), _factored) for fn in (ops.add, ops.sub)
)
