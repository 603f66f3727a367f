"""Reverse-mode differentiation of a graph, as more nodes of the same graph.

Contract: `differentiate` appends the vector-Jacobian product of the graph that ends in `seeds`
and returns gradients of the wanted nodes, each with exactly its node's dims; None where nothing
flows. The result is again a graph of operators, so that every executor that runs a forward graph
runs its backward.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Mark, Operand
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.ir.vjp import CONSTANT, RULES


def differentiate(
    builder: Builder, seeds: Iterable[tuple[fx.Node, fx.Node]], wanted: Iterable[fx.Node]
) -> dict[fx.Node, fx.Node | None]:
    """Gradients of `sum(seed * node)` over all seeds with respect to every wanted node."""
    wanted = list(wanted)
    order = [node for node in builder.graph.nodes if node.op in ("placeholder", "call_function")]
    reached = _depends_on(order, wanted)
    gradients: dict[fx.Node, fx.Node] = {}
    for node, seed in seeds:
        if node in reached:
            _accumulate(builder, gradients, node, seed)
    for node in reversed(order):
        if node.op != "call_function" or node not in gradients or node.target in CONSTANT:
            continue
        info = OPERATORS[node.target]
        if info.kind in ("mask", "source"):
            continue
        builder.mark = Mark(f"d {node.meta['stage']}", node.meta["origin"])
        if node.target not in RULES:
            raise AssertionError(f"operator {info.name} has no derivative rule")
        for at, gradient in RULES[node.target](builder, node, gradients[node]).items():
            operand = node.args[at]
            if isinstance(operand, fx.Node) and operand in reached:
                _accumulate(builder, gradients, operand, gradient)
    return {node: gradients.get(node) for node in wanted}


def _depends_on(order: list[fx.Node], wanted: list[fx.Node]) -> set[fx.Node]:
    reached = set(wanted)
    for node in order:
        passes = node.op == "call_function" and node.target not in CONSTANT
        if passes and any(isinstance(x, fx.Node) and x in reached for x in node.args):
            reached.add(node)
    return reached


def _accumulate(
    builder: Builder, gradients: dict[fx.Node, fx.Node], node: fx.Node, gradient: Operand
) -> None:
    dims = node.meta["dims"]
    if isinstance(gradient, fx.Node):
        gradient = builder.lift(gradient, len(dims))
        gradient = builder.reduce_to(gradient, dims)
    gradient = builder.expand(gradient, dims)
    if node in gradients:
        gradient = builder.emit(ops.add, gradients[node], gradient)
    gradients[node] = gradient
