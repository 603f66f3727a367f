"""Operators by what they cost in a kernel."""

from __future__ import annotations

from torch import fx

from flexla_dist.compiler.ir import operators as ops

HEAVY = frozenset({ops.unit_tril_inverse, ops.decay_scores, ops.decay_rows, ops.decay_cols})
SLOW = frozenset(
    {
        *(ops.exp, ops.expm1, ops.log, ops.log1p, ops.sigmoid, ops.logsigmoid, ops.softplus),
        *(ops.tanh, ops.sqrt, ops.rsqrt, ops.power, ops.sin, ops.cos, ops.cumsum),
    }
)
VECTOR_SUMS = frozenset({ops.decay_rows, ops.decay_cols})
VIEWS = frozenset({ops.unsqueeze, ops.squeeze, ops.permute, ops.expand})
SUMS = frozenset({ops.total, ops.amax})


def pair_of_sums(node: fx.Node) -> tuple[object, ...]:
    """What `decay_rows` and `decay_cols` must have alike to be computed together: the weights of
    the pairs, both gates, and which pairs count."""
    p, _, b_row, b_col = node.args
    return p, b_row, b_col, node.kwargs["strict"]
