"""Which operators let one token see another."""

from __future__ import annotations

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import dims_of
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.shapes import TOKEN_DIM

_ALONG = frozenset({ops.select, ops.place, ops.shift})


def mixes_tokens(node: fx.Node) -> bool:
    """Whether a node is more than a function of each token by itself: it reduces or picks along the
    token dim, pairs tokens, or depends on their number or position."""
    kind = OPERATORS[node.target].kind  # type: ignore[index]
    if kind == "domain" or dims_of(node).count(TOKEN_DIM) > 1:
        return True
    if kind == "source":
        return node.kwargs.get("dim") == TOKEN_DIM
    if node.target is ops.matmul:
        return dims_of(node.args[0])[1] == TOKEN_DIM  # type: ignore[arg-type]
    if kind == "reduce" or node.target in _ALONG:
        operand = next(x for x in node.args if isinstance(x, fx.Node) and dims_of(x))
        return dims_of(operand)[node.kwargs["dim"]] == TOKEN_DIM  # type: ignore[index]
    return False
