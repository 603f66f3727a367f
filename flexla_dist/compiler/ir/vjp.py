"""The derivative of every operator, written with the same operators.

Contract: a rule gets the builder, the node and the gradient of its result (of the node's dims) and
returns gradients by operand position. Elementwise rules may return broadcast gradients; the caller
reduces them. Masks, sources and `CONSTANT` operators pass no gradient. The rules of domain
operators are those of `flexla_dist.spec.functional`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand

Gradients = dict[int, Operand]
Rule = Callable[[Builder, fx.Node, fx.Node], Gradients]

RULES: dict[Callable[..., Any], Rule] = {}
CONSTANT: frozenset[Callable[..., Any]] = frozenset({ops.sign, ops.stop_gradient})


def _rule(fn: Callable[..., Any]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[fn] = rule
        return rule

    return register


def _unary(fn: Callable[..., Any], slope: Callable[[Builder, fx.Node, Any], Operand]) -> None:
    """Rule g * slope(x) of an elementwise operator of one operand; slope sees (b, out, x)."""

    def rule(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
        return {0: b.emit(ops.mul, g, slope(b, node, node.args[0]))}

    RULES[fn] = rule


def _one_minus(b: Builder, x: Operand) -> fx.Node:
    return b.emit(ops.sub, 1.0, x)


_unary(ops.exp, lambda b, out, x: out)
_unary(ops.expm1, lambda b, out, x: b.emit(ops.add, out, 1.0))
_unary(ops.log, lambda b, out, x: b.emit(ops.div, 1.0, x))
_unary(ops.log1p, lambda b, out, x: b.emit(ops.div, 1.0, b.emit(ops.add, x, 1.0)))
_unary(ops.sigmoid, lambda b, out, x: b.emit(ops.mul, out, _one_minus(b, out)))
_unary(ops.logsigmoid, lambda b, out, x: b.emit(ops.sigmoid, b.emit(ops.neg, x)))
_unary(ops.softplus, lambda b, out, x: b.emit(ops.sigmoid, x))
_unary(ops.tanh, lambda b, out, x: _one_minus(b, b.emit(ops.mul, out, out)))
_unary(ops.sqrt, lambda b, out, x: b.emit(ops.div, 0.5, out))
_unary(ops.rsqrt, lambda b, out, x: b.emit(ops.mul, b.emit(ops.power, out, exponent=3.0), -0.5))
_unary(ops.absolute, lambda b, out, x: b.emit(ops.sign, x))
_unary(ops.sin, lambda b, out, x: b.emit(ops.cos, x))
_unary(ops.cos, lambda b, out, x: b.emit(ops.neg, b.emit(ops.sin, x)))


@_rule(ops.power)
def _power(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    exponent = node.kwargs["exponent"]
    if exponent == 0:
        return {}
    lowered = b.emit(ops.power, node.args[0], exponent=exponent - 1.0)
    return {0: b.emit(ops.mul, g, b.emit(ops.mul, lowered, exponent))}


@_rule(ops.add)
def _add(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: g, 1: g}


@_rule(ops.sub)
def _sub(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: g, 1: b.emit(ops.neg, g)}


@_rule(ops.neg)
def _neg(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.neg, g)}


@_rule(ops.mul)
def _mul(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    x, y = node.args
    return {0: b.emit(ops.mul, g, y), 1: b.emit(ops.mul, g, x)}


@_rule(ops.div)
def _div(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    y = node.args[1]
    scaled = b.emit(ops.div, g, y)
    return {0: scaled, 1: b.emit(ops.neg, b.emit(ops.mul, scaled, node))}


def _chosen(b: Builder, node: fx.Node, g: fx.Node, first: Callable[..., Any]) -> Gradients:
    x, y = node.args
    mask = b.emit(ops.greater_equal, x, y) if first is ops.maximum else _at_most(b, x, y)
    return {0: b.emit(ops.where, mask, g, 0.0), 1: b.emit(ops.where, mask, 0.0, g)}


def _at_most(b: Builder, x: Operand, y: Operand) -> fx.Node:
    if isinstance(y, fx.Node):
        return b.emit(ops.greater_equal, y, x)
    return b.emit(ops.logical_not, b.emit(ops.greater, x, y))


@_rule(ops.maximum)
def _maximum(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return _chosen(b, node, g, ops.maximum)


@_rule(ops.minimum)
def _minimum(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return _chosen(b, node, g, ops.minimum)


@_rule(ops.where)
def _where(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    mask = node.args[0]
    return {1: b.emit(ops.where, mask, g, 0.0), 2: b.emit(ops.where, mask, 0.0, g)}


# -- shape ----------------------------------------------------------------------------------------


@_rule(ops.unsqueeze)
def _unsqueeze(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.squeeze, g, dim=node.kwargs["dim"])}


@_rule(ops.squeeze)
def _squeeze(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.unsqueeze, g, dim=node.kwargs["dim"])}


@_rule(ops.permute)
def _permute(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    order = node.kwargs["order"]
    rank = len(order)
    back = [0] * rank
    for at, source in enumerate(order):
        back[source + rank] = at - rank
    return {0: b.emit(ops.permute, g, order=tuple(back))}


@_rule(ops.expand)
def _expand(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {1: b.reduce_to(g, node.args[1].meta["dims"])}


@_rule(ops.select)
def _select(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    dims = node.args[0].meta["dims"]
    return {0: b.emit(ops.place, b.sizes, g, dims=dims, **node.kwargs)}


@_rule(ops.place)
def _place(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {1: b.emit(ops.select, g, dim=node.kwargs["dim"], index=node.kwargs["index"])}


@_rule(ops.shift)
def _shift(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.shift, g, dim=node.kwargs["dim"], by=-node.kwargs["by"])}


@_rule(ops.tril)
def _tril(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.tril, g, **node.kwargs)}


@_rule(ops.triu)
def _triu(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.triu, g, **node.kwargs)}


# -- reductions, contractions ---------------------------------------------------------------------


@_rule(ops.total)
def _total(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.unsqueeze, g, dim=node.kwargs["dim"])}


@_rule(ops.amax)
def _amax(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    x, dim = node.args[0], node.kwargs["dim"]
    ties = b.emit(ops.equal, x, b.emit(ops.unsqueeze, node, dim=dim))
    ones = b.emit(ops.where, ties, b.expand(1.0, x.meta["dims"]), 0.0)
    share = b.emit(ops.div, g, b.emit(ops.total, ones, dim=dim))
    return {0: b.emit(ops.where, ties, b.emit(ops.unsqueeze, share, dim=dim), 0.0)}


@_rule(ops.cumsum)
def _cumsum(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    reverse = not node.kwargs["reverse"]
    return {0: b.emit(ops.cumsum, g, dim=node.kwargs["dim"], reverse=reverse)}


@_rule(ops.matmul)
def _matmul(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    x, y = node.args
    return {0: b.matmul(g, b.transpose(y)), 1: b.matmul(b.transpose(x), g)}


# -- domain operators -----------------------------------------------------------------------------


@_rule(ops.decay_matrix)
def _decay_matrix(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    product = b.emit(ops.mul, g, node)
    rows = b.emit(ops.total, product, dim=-1)
    return {0: rows, 1: b.emit(ops.neg, b.emit(ops.total, product, dim=-2))}


@_rule(ops.decay_scores)
def _decay_scores(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    q, k, b_row, b_col = node.args
    strict = node.kwargs["strict"]
    dq = b.emit(ops.decay_rows, g, k, b_row, b_col, strict=strict)
    dk = b.emit(ops.decay_cols, g, q, b_row, b_col, strict=strict)
    db_col = b.emit(ops.neg, b.emit(ops.mul, k, dk))
    return {0: dq, 1: dk, 2: b.emit(ops.mul, q, dq), 3: db_col}


@_rule(ops.decay_rows)
def _decay_rows(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    p, k, b_row, b_col = node.args
    strict = node.kwargs["strict"]
    dp = b.emit(ops.decay_scores, g, k, b_row, b_col, strict=strict)
    dk = b.emit(ops.decay_cols, p, g, b_row, b_col, strict=strict)
    return {
        0: dp,
        1: dk,
        2: b.emit(ops.mul, node, g),
        3: b.emit(ops.neg, b.emit(ops.mul, k, dk)),
    }


@_rule(ops.decay_cols)
def _decay_cols(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    p, q, b_row, b_col = node.args
    strict = node.kwargs["strict"]
    dp = b.emit(ops.decay_scores, q, g, b_row, b_col, strict=strict)
    dq = b.emit(ops.decay_rows, p, g, b_row, b_col, strict=strict)
    return {
        0: dp,
        1: dq,
        2: b.emit(ops.mul, q, dq),
        3: b.emit(ops.neg, b.emit(ops.mul, node, g)),
    }


@_rule(ops.decay_scan)
def _decay_scan(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    gate = node.args[0]
    delta = b.emit(ops.decay_scan_reverse, gate, g)
    before = b.emit(ops.mul, b.emit(ops.exp, gate), b.emit(ops.shift, node, dim=-2, by=1))
    return {0: b.emit(ops.mul, delta, before), 1: delta}


@_rule(ops.decay_scan_reverse)
def _decay_scan_reverse(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    gate = node.args[0]
    delta = b.emit(ops.decay_scan, gate, g)
    before = b.emit(ops.mul, b.emit(ops.exp, gate), b.emit(ops.shift, delta, dim=-2, by=1))
    return {0: b.emit(ops.mul, node, before), 1: delta}


def _inverse_gradient(b: Builder, node: fx.Node, g: fx.Node) -> fx.Node:
    flipped = b.transpose(node)
    return b.emit(ops.neg, b.matmul(flipped, b.matmul(g, flipped)))


@_rule(ops.inverse)
def _inverse(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: _inverse_gradient(b, node, g)}


@_rule(ops.unit_tril_inverse)
def _unit_tril_inverse(b: Builder, node: fx.Node, g: fx.Node) -> Gradients:
    return {0: b.emit(ops.tril, _inverse_gradient(b, node, g), diagonal=-1)}
