"""The last row of a scan without the scan: a weighted sum.

Requires: canonical spelling. Guarantees: no `decay_scan` of which only the last token is read. The
weights are `exp` of the gates that follow a token, summed from the end, so that no digits are lost.
Here because a loop over chunks needs only what its last token leaves behind.
"""

from __future__ import annotations

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Operand
from flexla_dist.compiler.passes.engine import Match, Rule, any_, call


def _weighted_sum(b: Builder, m: Match) -> Operand:
    following = b.emit(ops.cumsum, m["g"], dim=-2, reverse=True)
    weights = b.emit(ops.exp, b.emit(ops.sub, following, m["g"]))
    return b.emit(ops.total, b.emit(ops.mul, m["x"], weights), dim=-2)


RULES: tuple[Rule, ...] = (
    Rule(
        "last row of a scan",
        call(ops.select, call(ops.decay_scan, any_("g"), any_("x")), dim=-2, index=-1),
        _weighted_sum,
    ),
)
