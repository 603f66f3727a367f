"""Checks that a cell is well formed; runs after tracing and after every pass.

Contract: `verify_cell` raises VerifyError, a fault of the package and never of the user, naming
the pass, the node and the rule broken. Rules: only known operators; operands defined before use;
dims as the operator's rule says; masks only where masks belong; named results with the declared
dims.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell, dims_of, is_mask
from flexla_dist.compiler.ir.operators import OPERATORS, ShapeRuleError
from flexla_dist.shapes import Dims, format_dims

MASK_OPERANDS = frozenset({ops.logical_not, ops.logical_and, ops.logical_or})


class VerifyError(AssertionError):
    """A pass of the compiler produced an illegal graph."""


def verify_cell(cell: Cell, after: str, results: Mapping[str, Dims] | None = None) -> None:
    """Check every node of a cell and, if given, the dims of its results."""
    cell.graph.lint()
    for node in cell.calls:
        _verify_node(node, after)
    if results is not None:
        have = {name: node.meta["dims"] for name, node in cell.outputs.items()}
        if have != dict(results):
            raise VerifyError(f"after {after}: results {have}; expected {dict(results)}")


def _verify_node(node: fx.Node, after: str) -> None:
    info = OPERATORS.get(node.target)  # type: ignore[arg-type]
    if info is None:
        raise VerifyError(f"after {after}: node {node} calls {node.target}, which is no operator")
    nodes = [x for x in node.args if isinstance(x, fx.Node)]
    try:
        dims = info.dims(*(dims_of(x) for x in nodes), **node.kwargs)
    except ShapeRuleError as wrong:
        raise VerifyError(f"after {after}: {node} = {info.name}: {wrong}") from None
    if dims != node.meta["dims"]:
        raise VerifyError(
            f"after {after}: {node} = {info.name} has dims {format_dims(node.meta['dims'])}; "
            f"its operands give {format_dims(dims)}"
        )
    _verify_masks(node, info, nodes, after)


def _verify_masks(node: fx.Node, info: ops.Operator, nodes: list[fx.Node], after: str) -> None:
    if node.target is ops.where:
        expected = [True] + [False] * (len(node.args) - 1)
        got = [is_mask(x) if isinstance(x, fx.Node) else False for x in node.args]
        if got != expected:
            raise VerifyError(f"after {after}: {node}: where needs a mask and two values")
    elif node.target in MASK_OPERANDS:
        if not all(is_mask(x) for x in nodes):
            raise VerifyError(f"after {after}: {node} = {info.name} needs masks")
    elif info.kind != "shape" and any(is_mask(x) for x in nodes):
        raise VerifyError(f"after {after}: {node} = {info.name} computes with a mask")
