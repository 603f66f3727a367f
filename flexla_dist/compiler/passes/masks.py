"""Triangles: every spelling of a triangular mask becomes `tri_mask`, every masked value `tril` or
`triu`.

Requires: canonical spelling. Guarantees: comparisons of positions, boolean ones cut by `tril`,
comparisons of a triangle of ones, and their negations, transposes and conjunctions are one
`tri_mask` or its negation; a selection against zero is `tril` or `triu`; a product with a triangle
of ones is a selection. Here because the patterns of decays look for `tril` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from flexla_dist.compiler.forms import View, form, operands
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand, dims_of, is_mask
from flexla_dist.compiler.passes.engine import Match, Replacement, Rule, any_, call, either
from flexla_dist.compiler.passes.simplify import constant_of
from flexla_dist.shapes import Dims

SWAP = (-1, -2)
NEVER = -1e6  # added to a logit, this removes it: exp of it is zero in every type
X, Y, M = any_("x"), any_("y"), any_("m")

_COMPARE: dict[Callable[..., Any], Callable[[float, float], bool]] = {
    ops.greater_equal: lambda a, b: a >= b,
    ops.greater: lambda a, b: a > b,
    ops.equal: lambda a, b: a == b,
}


# -- constant masks -------------------------------------------------------------------------------


def truth_of(x: Operand) -> bool | None:
    """What a mask is everywhere, if that is known."""
    if not isinstance(x, fx.Node):
        return None
    if x.target in _COMPARE:
        a, b = (constant_of(y) for y in x.args)
        return None if a is None or b is None else _COMPARE[x.target](a, b)
    if x.target is ops.logical_not:
        inner = truth_of(x.args[0])
        return None if inner is None else not inner
    if x.target in (ops.unsqueeze, ops.squeeze, ops.permute):
        return truth_of(x.args[0])
    return truth_of(x.args[1]) if x.target is ops.expand else None


def _truth(b: Builder, dims: Dims, value: bool) -> fx.Node:
    return b.emit(ops.greater, b.expand(1.0 if value else 0.0, dims), 0.5)


def _connect(decisive: bool) -> Replacement:
    """`and` with False, `or` with True is decided; the other truth leaves the other operand."""

    def replacement(b: Builder, m: Match) -> Operand | None:
        for one, other in ((m["x"], m["y"]), (m["y"], m["x"])):
            truth = truth_of(one)
            if truth is not None:
                dims = dims_of(m["outer"])
                return _truth(b, dims, decisive) if truth is decisive else b.expand(other, dims)
        return _connect_triangles(b, m, decisive)

    return replacement


def _connect_triangles(b: Builder, m: Match, union: bool) -> Operand | None:
    x, y = m["x"], m["y"]
    pick = max if union else min
    if x.target is ops.tri_mask and y.target is ops.tri_mask:
        return _tri(b, x.kwargs["dim"], pick(x.kwargs["diagonal"], y.kwargs["diagonal"]))
    if x.target is ops.logical_not and y.target is ops.logical_not:
        swapped = ops.logical_and if union else ops.logical_or
        return b.emit(ops.logical_not, b.emit(swapped, x.args[0], y.args[0]))
    return None


def _tri(b: Builder, dim: str, diagonal: int) -> fx.Node:
    return b.emit(ops.tri_mask, b.sizes, dim=dim, diagonal=diagonal)


# -- comparisons ----------------------------------------------------------------------------------


def _positions(b: Builder, m: Match) -> Operand | None:
    """A comparison of two positions along one dim, in any frame."""
    node: fx.Node = m["outer"]
    at = tuple(range(len(dims_of(node))))
    a, c = (form(x) for x in operands(View(node, at)))
    difference = dict(a)
    for monomial, value in c.items():
        difference[monomial] = difference.get(monomial, 0.0) - value
    constant = difference.pop((), 0.0)
    places: dict[int, float] = {}
    dim = None
    for monomial, value in difference.items():
        if not value:
            continue
        if len(monomial) != 1 or monomial[0].node.target is not ops.iota:
            return None
        (axis,) = monomial[0].at
        dim = dim or monomial[0].node.kwargs["dim"]
        if monomial[0].node.kwargs["dim"] != dim or not isinstance(axis, int):
            return None
        places[axis] = value
    if len(places) != 2:
        return None
    early, late = sorted(places)
    slope = places[early]
    if places[late] != -slope:
        return None
    shift = constant / abs(slope)
    mask = _compared(b, str(dim), node.target, shift if slope > 0 else -shift, slope > 0)
    for axis in range(len(at)):
        if axis not in (early, late):
            mask = b.emit(ops.unsqueeze, mask, dim=axis - len(dims_of(mask)) - 1)
    return b.expand(mask, dims_of(node))


def _compared(b: Builder, dim: str, fn: Any, shift: float, lower: bool) -> fx.Node:
    """Mask of `row - col + shift` compared with zero from above (lower) or from below."""
    if fn is ops.equal:
        if shift != math.floor(shift):
            return _truth(b, (dim, dim), False)
        at = int(shift)
        off = b.emit(ops.logical_not, _tri(b, dim, at - 1))
        return b.emit(ops.logical_and, _tri(b, dim, at), off)
    strict = fn is ops.greater
    if lower:
        return _tri(b, dim, math.ceil(shift) - 1 if strict else math.floor(shift))
    return b.emit(
        ops.logical_not, _tri(b, dim, math.floor(shift) if strict else math.ceil(shift) - 1)
    )


def _constant_choice(x: Operand) -> tuple[fx.Node, float, float] | None:
    """`where(mask, a, b)` of two constants."""
    if isinstance(x, fx.Node) and x.target is ops.where:
        a, b = constant_of(x.args[1]), constant_of(x.args[2])
        if a is not None and b is not None:
            return x.args[0], a, b
    return None


def _compare_choice(b: Builder, m: Match) -> Operand | None:
    """A comparison of a choice between two constants with a third is the mask itself."""
    node: fx.Node = m["outer"]
    holds = _COMPARE[node.target]
    for at in (0, 1):
        choice, other = _constant_choice(node.args[at]), constant_of(node.args[1 - at])
        if choice is None or other is None:
            continue
        mask, inside, outside = choice
        truths = [holds(*((v, other) if at == 0 else (other, v))) for v in (inside, outside)]
        if truths[0] == truths[1]:
            return _truth(b, dims_of(node), truths[0])
        mask = mask if truths[0] else b.emit(ops.logical_not, mask)
        return b.expand(mask, dims_of(node))
    return None


# -- selections -----------------------------------------------------------------------------------


def _selected(b: Builder, m: Match) -> Operand | None:
    """`where`: known masks, equal branches, negated masks, repeated masks."""
    mask, x, y = m["m"], m["x"], m["y"]
    truth = truth_of(mask)
    if truth is not None:
        return x if truth else y
    if x is y:
        return x
    if mask.target is ops.logical_not:
        return b.emit(ops.where, mask.args[0], y, x)
    if isinstance(x, fx.Node) and x.target is ops.where and x.args[0] is mask:
        return b.emit(ops.where, mask, x.args[1], y)
    if isinstance(y, fx.Node) and y.target is ops.where and y.args[0] is mask:
        return b.emit(ops.where, mask, x, y.args[2])
    return _triangular(b, mask, x, y)


def _triangular(b: Builder, mask: fx.Node, x: Operand, y: Operand) -> Operand | None:
    if mask.target is not ops.tri_mask:
        return None
    diagonal = mask.kwargs["diagonal"]
    inside, outside = constant_of(x), constant_of(y)
    if outside == 0.0 and inside is None:
        return b.emit(ops.tril, b.expand(x, dims_of(mask)), diagonal=diagonal)
    if inside == 0.0 and outside is None:
        return b.emit(ops.triu, b.expand(y, dims_of(mask)), diagonal=diagonal + 1)
    return None


def _triangle(lower: bool) -> Replacement:
    """`tril` and `triu` of constants, of the identity, of other triangles and selections."""

    def replacement(b: Builder, m: Match) -> Operand | None:
        x, k = m["x"], m["outer"].kwargs["diagonal"]
        dim = dims_of(m["outer"])[0]
        value = constant_of(x)
        if value is not None:
            inside, outside = (value, 0.0) if lower else (0.0, value)
            mask = _tri(b, dim, k if lower else k - 1)
            return b.emit(ops.where, mask, b.expand(inside, dims_of(mask)), outside)
        if x.target is ops.eye:
            return x if (k >= 0) is lower or k == 0 else 0.0
        if x.target is (ops.tril if lower else ops.triu):
            pick = min if lower else max
            return b.emit(x.target, x.args[0], diagonal=pick(k, x.kwargs["diagonal"]))
        if x.target is ops.where and x.args[0].target is ops.tri_mask:
            return _cut_selection(b, m["outer"], x, lower)
        return None

    return replacement


def _cut_selection(b: Builder, outer: fx.Node, x: fx.Node, lower: bool) -> Operand | None:
    """The branch of a selection that a triangle cuts off."""
    mask, inside, outside = x.args
    at, k = mask.kwargs["diagonal"], outer.kwargs["diagonal"]
    branch = inside if lower and k <= at else outside if not lower and k > at else None
    if branch is None:
        return None
    return b.emit(outer.target, b.expand(branch, dims_of(outer)), diagonal=k)


def _times_choice(b: Builder, m: Match) -> Operand | None:
    """x * where(mask, a, 0): a selection, which lets no NaN through."""
    for x, choice in ((m["x"], m["y"]), (m["y"], m["x"])):
        found = _constant_choice(choice)
        if found is None or 0.0 not in found[1:] or constant_of(x) is not None:
            continue
        mask, inside, outside = found
        values = [
            0.0 if v == 0.0 else x if v == 1.0 else b.emit(ops.mul, x, v) for v in (inside, outside)
        ]
        return b.emit(ops.where, mask, *values)
    return None


def _fold_choice(compute: Callable[..., float]) -> Replacement:
    """Arithmetic with constants moves into a choice between constants."""

    def replacement(b: Builder, m: Match) -> Operand | None:
        node: fx.Node = m["outer"]
        values = [(_constant_choice(x), constant_of(x)) for x in node.args]
        choices = [c for c, _ in values if c is not None]
        if len(choices) != 1 or any(c is None and v is None for c, v in values):
            return None
        branches = [
            compute(*(c[side] if c is not None else v for c, v in values)) for side in (1, 2)
        ]
        mask = choices[0][0]
        if dims_of(mask) != dims_of(node):
            mask = b.expand(mask, dims_of(node))
        return b.emit(ops.where, mask, b.expand(branches[0], dims_of(mask)), branches[1])

    return replacement


def _log(x: float) -> float:
    return math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700.0 else math.inf


def _less_identity(b: Builder, m: Match) -> Operand | None:
    """A triangle of ones less the identity is the strict triangle."""
    found = _constant_choice(m["x"])
    if found is None or found[1:] != (1.0, 0.0) or found[0].target is not ops.tri_mask:
        return None
    mask = found[0]
    if mask.kwargs["diagonal"] != 0:
        return None
    below = _tri(b, mask.kwargs["dim"], -1)
    return b.emit(ops.where, below, b.expand(1.0, dims_of(below)), 0.0)


def _masked_logit(b: Builder, m: Match) -> Operand | None:
    """exp(x + where(mask, 0, -inf)): the usual additive mask."""
    found = _constant_choice(m["y"])
    if found is None:
        return None
    mask, inside, outside = found
    if inside == 0.0 and outside <= NEVER:
        return b.emit(ops.exp, b.emit(ops.where, mask, m["x"], outside))
    if outside == 0.0 and inside <= NEVER:
        return b.emit(ops.exp, b.emit(ops.where, mask, inside, m["x"]))
    return None


# -- transposes, numbers as masks -----------------------------------------------------------------


def _transposed(b: Builder, m: Match) -> Operand | None:
    x: fx.Node = m["x"]
    if x.target is ops.tri_mask:
        return b.emit(ops.logical_not, _tri(b, x.kwargs["dim"], -x.kwargs["diagonal"] - 1))
    if x.target is ops.logical_not:
        return b.emit(ops.logical_not, b.transpose(x.args[0]))
    if x.target in (ops.tril, ops.triu):
        other = ops.triu if x.target is ops.tril else ops.tril
        return b.emit(other, b.transpose(x.args[0]), diagonal=-x.kwargs["diagonal"])
    choice = _constant_choice(x)
    if choice is not None:
        mask, inside, outside = choice
        dims = dims_of(m["outer"])
        return b.emit(ops.where, b.transpose(mask), b.expand(inside, dims), outside)
    return x if x.target is ops.eye else None


def _moved_mask(b: Builder, m: Match) -> Operand | None:
    """Negation outside of inserted dims, so that selections see it."""
    x: fx.Node = m["x"]
    if is_mask(x) and x.target is ops.logical_not:
        node: fx.Node = m["outer"]
        args = [x.args[0] if a is x else a for a in node.args]
        return b.emit(ops.logical_not, b.emit(node.target, *args, **node.kwargs))
    return None


_BINARY: dict[Callable[..., Any], Callable[[float, float], float]] = {
    ops.add: lambda a, b: a + b,
    ops.sub: lambda a, b: a - b,
    ops.mul: lambda a, b: a * b,
}

RULES: tuple[Rule, ...] = (
    *(Rule("positions to tri_mask", call(f, X, Y, name="outer"), _positions) for f in _COMPARE),
    *(Rule("mask from ones", call(f, X, Y, name="outer"), _compare_choice) for f in _COMPARE),
    Rule("not not", call(ops.logical_not, call(ops.logical_not, X)), lambda b, m: m["x"]),
    Rule("and", call(ops.logical_and, X, Y, name="outer"), _connect(False)),
    Rule("or", call(ops.logical_or, X, Y, name="outer"), _connect(True)),
    Rule("select", call(ops.where, M, X, Y), _selected),
    Rule("tril", call(ops.tril, X, name="outer"), _triangle(True)),
    Rule("triu", call(ops.triu, X, name="outer"), _triangle(False)),
    Rule("times ones of a mask", either(ops.mul, X, Y), _times_choice),
    Rule("triangle less identity", call(ops.sub, X, call(ops.eye, Y)), _less_identity),
    *(
        Rule("constants into a mask", call(f, X, Y, name="outer"), _fold_choice(compute))
        for f, compute in _BINARY.items()
    ),
    Rule(
        "constants into a mask",
        call(ops.neg, X, name="outer"),
        _fold_choice(lambda a: -a),
    ),
    Rule("constants into a mask", call(ops.log, X, name="outer"), _fold_choice(_log)),
    Rule("constants into a mask", call(ops.exp, X, name="outer"), _fold_choice(_exp)),
    Rule("additive mask", call(ops.exp, either(ops.add, X, Y)), _masked_logit),
    Rule("transposed triangle", call(ops.permute, X, name="outer", order=SWAP), _transposed),
    Rule("negation outside", call(ops.unsqueeze, X, name="outer"), _moved_mask),
    Rule("negation outside", call(ops.expand, Y, X, name="outer"), _moved_mask),
)
