"""Removes the selection of padding where every token of every chunk is real.

Requires: `valid` only in selections. Guarantees: the cell no longer reads `valid`. Used for whole
chunks; only a ragged last chunk runs the padded form.
"""

from __future__ import annotations

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Operand
from flexla_dist.compiler.passes.engine import Rule, any_, call


def is_valid_mask(x: Operand) -> bool:
    """True for the argument `valid`, whatever dims were inserted."""
    while isinstance(x, fx.Node) and x.target is ops.unsqueeze:
        x = x.args[0]  # type: ignore[assignment]
    return isinstance(x, fx.Node) and x.meta.get("role") == "valid"


RULES: tuple[Rule, ...] = (
    Rule(
        "all tokens valid",
        call(ops.where, any_("valid", is_valid_mask), any_("x"), any_("pad")),
        lambda b, m: m["x"],
    ),
)
