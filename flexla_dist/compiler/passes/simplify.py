"""Canonical spelling: identities of arithmetic, constants folded, shape changes removed.

Requires: nothing. Guarantees: no `x + 0`, `x * 1`, double negation, constant times constant,
`expand` feeding an elementwise operator, or pair of shape changes that undo each other. Here
because every later pattern relies on one spelling of each thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand, dims_of
from flexla_dist.compiler.passes.engine import Match, Replacement, Rule, any_, call, either


def constant_of(x: Operand) -> float | None:
    """The number that a node is everywhere, if it is a constant."""
    if not isinstance(x, fx.Node):
        return float(x)
    if x.target is ops.full:
        return float(x.kwargs["value"])
    if x.target in (ops.unsqueeze, ops.squeeze, ops.permute):
        return constant_of(x.args[0])
    if x.target is ops.expand:
        return constant_of(x.args[1])
    return None


def is_constant(x: Operand) -> bool:
    """True for a number or a constant node."""
    return constant_of(x) is not None


def _constant_is(value: float) -> Callable[[Operand], bool]:
    return lambda x: constant_of(x) == value


ZERO = any_("zero", _constant_is(0.0))
ONE = any_("one", _constant_is(1.0))
X, Y = any_("x"), any_("y")


def _keep(name: str) -> Replacement:
    return lambda b, m: m[name]


def _zero(b: Builder, m: Match) -> Operand:
    return 0.0


def _negated(b: Builder, m: Match) -> Operand:
    return b.emit(ops.neg, m["x"])


_FOLD: dict[Callable[..., Any], Callable[..., float]] = {
    ops.add: lambda a, b: a + b,
    ops.sub: lambda a, b: a - b,
    ops.mul: lambda a, b: a * b,
    ops.maximum: max,
    ops.minimum: min,
}
_FOLD_UNARY: dict[Callable[..., Any], Callable[[float], float]] = {
    ops.neg: lambda a: -a,
    ops.exp: math.exp,
    ops.absolute: abs,
}


def _fold(fn: Callable[..., Any]) -> Replacement:
    def replacement(b: Builder, m: Match) -> Operand | None:
        x, y = constant_of(m["x"]), constant_of(m["y"])
        return None if x is None or y is None else _FOLD[fn](x, y)

    return replacement


def _fold_unary(fn: Callable[..., Any]) -> Replacement:
    def replacement(b: Builder, m: Match) -> Operand | None:
        x = constant_of(m["x"])
        if x is None or (fn is ops.exp and x > 700.0):
            return None
        return _FOLD_UNARY[fn](x)

    return replacement


def _numbers_last(fn: Callable[..., Any]) -> Replacement:
    """Constant operands of elementwise operators become plain numbers."""

    def replacement(b: Builder, m: Match) -> Operand | None:
        x, y = m["x"], m["y"]
        if isinstance(y, fx.Node) and is_constant(y) and dims_covered(x, y):
            return b.emit(fn, x, constant_of(y))  # type: ignore[arg-type]
        swaps = fn in (ops.add, ops.mul) and is_constant(x) and isinstance(y, fx.Node)
        if swaps and (not isinstance(x, fx.Node) or dims_covered(y, x)):
            return b.emit(fn, y, constant_of(x))  # type: ignore[arg-type]
        return None

    return replacement


def dims_covered(x: Operand, y: Operand) -> bool:
    """True if broadcasting `y` against `x` leaves the dims of `x`."""
    return isinstance(x, fx.Node) and ops.broadcast_dims(dims_of(x), dims_of(y)) == dims_of(x)


def _drop_expand(fn: Callable[..., Any], at: int, arity: int) -> Replacement:
    """An elementwise operator broadcasts by itself."""

    def replacement(b: Builder, m: Match) -> Operand | None:
        operands = [m[f"o{i}"] for i in range(arity)]
        expanded = operands[at]
        if not isinstance(expanded, fx.Node) or expanded.target is not ops.expand:
            return None
        inner = b.lift(expanded.args[1], len(dims_of(expanded)))  # type: ignore[arg-type]
        trial = [*operands[:at], inner, *operands[at + 1 :]]
        dims = [dims_of(x) for x in trial if isinstance(x, fx.Node)]
        if ops.broadcast_dims(*dims) != ops.broadcast_dims(
            *(dims_of(x) for x in operands if isinstance(x, fx.Node))
        ):
            return None
        return b.emit(fn, *trial)

    return replacement


def _expand_rules() -> list[Rule]:
    rules = []
    for fn, arity in (
        *((fn, 2) for fn in (ops.add, ops.sub, ops.mul, ops.div, ops.maximum, ops.minimum)),
        (ops.where, 3),
    ):
        for at in range(arity):
            pattern = call(fn, *(any_(f"o{i}") for i in range(arity)))
            rules.append(Rule("drop expand", pattern, _drop_expand(fn, at, arity)))
    return rules


def _undo(inner: Callable[..., Any]) -> Replacement:
    """`squeeze` of `unsqueeze` (or the reverse) at the same place."""

    def replacement(b: Builder, m: Match) -> Operand | None:
        outer, node = m["outer"], m["inner"]
        return m["x"] if outer.kwargs["dim"] == node.kwargs["dim"] else None

    return replacement


def _permute_twice(b: Builder, m: Match) -> Operand:
    first, second = m["inner"].kwargs["order"], m["outer"].kwargs["order"]
    order = tuple(first[at] for at in second)
    if order == tuple(range(-len(order), 0)):
        return m["x"]
    return b.emit(ops.permute, m["x"], order=order)


def _triangle_of_product(b: Builder, m: Match) -> Operand | None:
    """`tril(c * x)` for a number c: the triangle moves inside, next to what it masks."""
    return b.emit(ops.mul, b.emit(ops.tril, m["x"], **m["outer"].kwargs), m["c"])


RULES: tuple[Rule, ...] = (
    Rule("x + 0", either(ops.add, X, ZERO), _keep("x")),
    Rule("x - 0", call(ops.sub, X, ZERO), _keep("x")),
    Rule("0 - x", call(ops.sub, ZERO, X), _negated),
    Rule("x * 1", either(ops.mul, X, ONE), _keep("x")),
    Rule("x * 0", either(ops.mul, X, ZERO), _zero),
    Rule("x / 1", call(ops.div, X, ONE), _keep("x")),
    Rule("0 / x", call(ops.div, ZERO, X), _zero),
    Rule("-(-x)", call(ops.neg, call(ops.neg, X)), _keep("x")),
    Rule("0 @ x", call(ops.matmul, ZERO, X), _zero),
    Rule("x @ 0", call(ops.matmul, X, ZERO), _zero),
    *(Rule("fold", call(fn, X, Y), _fold(fn)) for fn in _FOLD),
    *(Rule("fold", call(fn, X), _fold_unary(fn)) for fn in _FOLD_UNARY),
    *(
        Rule("numbers last", call(fn, X, Y), _numbers_last(fn))
        for fn in (ops.add, ops.sub, ops.mul, ops.div)
    ),
    *_expand_rules(),
    Rule(
        "squeeze of unsqueeze",
        call(ops.squeeze, call(ops.unsqueeze, X, name="inner"), name="outer"),
        _undo(ops.unsqueeze),
    ),
    Rule(
        "unsqueeze of squeeze",
        call(ops.unsqueeze, call(ops.squeeze, X, name="inner"), name="outer"),
        _undo(ops.squeeze),
    ),
    Rule(
        "permute twice",
        call(ops.permute, call(ops.permute, X, name="inner"), name="outer"),
        _permute_twice,
    ),
    Rule(
        "triangle of scaled",
        call(
            ops.tril,
            either(ops.mul, X, any_("c", lambda x: not isinstance(x, fx.Node))),
            name="outer",
        ),
        _triangle_of_product,
    ),
    Rule("triangle of zero", call(ops.tril, ZERO), _zero),
    Rule("sum of zero", call(ops.total, ZERO), _zero),
    Rule("cumsum of zero", call(ops.cumsum, ZERO), _zero),
)
