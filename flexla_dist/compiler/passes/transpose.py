"""Transposes move to the leaves, where executors and kernels read them for free.

Requires: canonical spelling. Guarantees: no transpose of a matrix product, sum, product with a
number or of a triangle; so `(S.mT @ k).mT` is the product that it means. Here because the affine
analysis of the state reads products from the left.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand
from flexla_dist.compiler.passes.engine import Match, Rule, any_, call

SWAP = (-1, -2)
X, Y = any_("x"), any_("y")


def _of_product(b: Builder, m: Match) -> Operand:
    return b.matmul(b.transpose(m["y"]), b.transpose(m["x"]))


def _flip(b: Builder, x: Operand) -> Operand:
    return b.transpose(x) if isinstance(x, fx.Node) else x


def _of_elementwise(fn: Any) -> Any:
    def replacement(b: Builder, m: Match) -> Operand | None:
        if not any(_is_transposed(x) for x in (m["x"], m["y"])):
            return None
        return b.emit(fn, _flip(b, m["x"]), _flip(b, m["y"]))

    return replacement


def _is_transposed(x: Operand) -> bool:
    return isinstance(x, fx.Node) and (
        (x.target is ops.permute and x.kwargs["order"] == SWAP) or x.target is ops.matmul
    )


def _of_unary(fn: Any) -> Any:
    def replacement(b: Builder, m: Match) -> Operand | None:
        return b.emit(fn, b.transpose(m["x"])) if _is_transposed(m["x"]) else None

    return replacement


RULES: tuple[Rule, ...] = (
    Rule("(x y)^T", call(ops.permute, call(ops.matmul, X, Y), order=SWAP), _of_product),
    *(
        Rule("(x + y)^T", call(ops.permute, call(fn, X, Y), order=SWAP), _of_elementwise(fn))
        for fn in (ops.add, ops.sub, ops.mul)
    ),
    Rule("(-x)^T", call(ops.permute, call(ops.neg, X), order=SWAP), _of_unary(ops.neg)),
)
