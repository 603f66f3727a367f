"""Least and greatest value of every node, by interval arithmetic.

Contract: `interval(node, have)` gives (low, high) from the intervals of the operands; values are
real numbers that a valid call can have, so zero times anything is zero. What an operator allows is
all that is used: that b[-1] - b is not positive takes more than intervals and is proved in
`exponents`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.trace.names import FRESH

Interval = tuple[float, float]
ALL: Interval = (-math.inf, math.inf)
MAX_EXP = 700.0


def interval(node: fx.Node, have: Mapping[fx.Node, Interval]) -> Interval:
    """Range of a node from the ranges of its operands."""
    if node.op == "placeholder":
        if node.meta["role"] == "log_decay":
            return (-math.inf, 0.0)
        return (0.0, 1.0) if node.meta["key"] == FRESH else ALL
    if node.op != "call_function" or node.meta.get("mask"):
        return ALL
    x = [have.get(a, ALL) if isinstance(a, fx.Node) else (float(a), float(a)) for a in node.args]
    if node.target in _RULES:
        return _RULES[node.target](node, x)
    if OPERATORS[node.target].kind == "shape":
        return x[-1]
    return ALL


def times(a: Interval, b: Interval) -> Interval:
    """Product of two ranges."""
    ends = [0.0 if 0.0 in (p, q) else p * q for p in a for q in b]
    return (min(ends), max(ends))


def union(a: Interval, b: Interval) -> Interval:
    """Smallest range that holds both."""
    return (min(a[0], b[0]), max(a[1], b[1]))


def _add(node: fx.Node, x: list[Interval]) -> Interval:
    return (x[0][0] + x[1][0], x[0][1] + x[1][1])


def _sub(node: fx.Node, x: list[Interval]) -> Interval:
    return (x[0][0] - x[1][1], x[0][1] - x[1][0])


def _neg(node: fx.Node, x: list[Interval]) -> Interval:
    return (-x[0][1], -x[0][0])


def _mul(node: fx.Node, x: list[Interval]) -> Interval:
    low, high = times(x[0], x[1])
    return (max(low, 0.0), high) if node.args[0] is node.args[1] else (low, high)


def _div(node: fx.Node, x: list[Interval]) -> Interval:
    low, high = x[1]
    if low < 0.0 < high or (low, high) == (0.0, 0.0):
        return ALL
    ends = sorted(_inverse(v, low >= 0.0) for v in (low, high))
    return times(x[0], (ends[0], ends[1]))


def _inverse(v: float, positive: bool) -> float:
    if v == 0.0:
        return math.inf if positive else -math.inf
    return 1.0 / v


def _power(node: fx.Node, x: list[Interval]) -> Interval:
    exponent = node.kwargs["exponent"]
    return (0.0, math.inf) if x[0][0] >= 0.0 or exponent % 2 == 0 else ALL


def _increasing(fn: Callable[[float], float], floor: float, ceiling: float) -> Any:
    """Rule of a function that grows from `floor` to `ceiling`."""

    def at(v: float) -> float:
        if v == -math.inf:
            return floor
        return ceiling if v == math.inf else fn(v)

    return lambda node, x: (at(x[0][0]), at(x[0][1]))


def exp(v: float) -> float:
    """e to the v, infinite where a float ends."""
    return math.inf if v > MAX_EXP else math.exp(v)


def _softplus(v: float) -> float:
    return v if v > MAX_EXP else math.log1p(math.exp(v))


def _log(v: float) -> float:
    return math.log(v) if v > 0.0 else -math.inf


def _logarithm(shift: float) -> Any:
    def rule(node: fx.Node, x: list[Interval]) -> Interval:
        low, high = x[0][0] + shift, x[0][1] + shift
        return (_log(low), math.inf if high == math.inf else _log(high))

    return rule


def _absolute(node: fx.Node, x: list[Interval]) -> Interval:
    low, high = x[0]
    return (max(low, -high, 0.0), max(-low, high))


def _with_zero(at: int) -> Any:
    return lambda node, x: union(x[at], (0.0, 0.0))


def _accumulated(node: fx.Node, x: list[Interval]) -> Interval:
    low, high = x[0]
    return (low if low >= 0.0 else -math.inf, high if high <= 0.0 else math.inf)


def _matmul(node: fx.Node, x: list[Interval]) -> Interval:
    low, high = times(x[0], x[1])
    return (0.0 if low >= 0.0 else -math.inf, 0.0 if high <= 0.0 else math.inf)


def _constant(node: fx.Node, x: list[Interval]) -> Interval:
    value = float(node.kwargs["value"])
    return (value, value)


_RULES: dict[Any, Callable[[fx.Node, list[Interval]], Interval]] = {
    ops.add: _add,
    ops.sub: _sub,
    ops.neg: _neg,
    ops.mul: _mul,
    ops.div: _div,
    ops.power: _power,
    ops.maximum: lambda node, x: (max(x[0][0], x[1][0]), max(x[0][1], x[1][1])),
    ops.minimum: lambda node, x: (min(x[0][0], x[1][0]), min(x[0][1], x[1][1])),
    ops.where: lambda node, x: union(x[1], x[2]),
    ops.exp: _increasing(exp, 0.0, math.inf),
    ops.expm1: _increasing(lambda v: exp(v) - 1.0, -1.0, math.inf),
    ops.log: _logarithm(0.0),
    ops.log1p: _logarithm(1.0),
    ops.sigmoid: _increasing(lambda v: 1.0 / (1.0 + exp(-v)), 0.0, 1.0),
    ops.logsigmoid: _increasing(lambda v: -_softplus(-v), -math.inf, 0.0),
    ops.softplus: _increasing(_softplus, 0.0, math.inf),
    ops.tanh: _increasing(math.tanh, -1.0, 1.0),
    ops.sqrt: lambda node, x: (0.0, math.inf if x[0][1] == math.inf else max(x[0][1], 0.0) ** 0.5),
    ops.rsqrt: lambda node, x: (0.0, math.inf),
    ops.absolute: _absolute,
    ops.sign: lambda node, x: (-1.0, 1.0),
    ops.sin: lambda node, x: (-1.0, 1.0),
    ops.cos: lambda node, x: (-1.0, 1.0),
    ops.stop_gradient: lambda node, x: x[0],
    ops.place: _with_zero(1),
    ops.shift: _with_zero(0),
    ops.tril: _with_zero(0),
    ops.triu: _with_zero(0),
    ops.total: _accumulated,
    ops.cumsum: _accumulated,
    ops.amax: lambda node, x: x[0],
    ops.matmul: _matmul,
    ops.decay_matrix: lambda node, x: (0.0, math.inf),
    ops.full: _constant,
    ops.eye: lambda node, x: (0.0, 1.0),
    ops.iota: lambda node, x: (0.0, math.inf),
    ops.size: lambda node, x: (1.0, math.inf),
}
