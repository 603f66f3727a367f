"""What the linear part M of a state is.

Contract: data that executors, plans and people read; derived by `flexla_dist.compiler.affine`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexla_dist.shapes import UNIT_DIM, Dims

KINDS = ("identity", "scalar", "rows", "columns", "full", "dense")


@dataclass(frozen=True)
class Transition:
    """M of one state.

    `kind` is one of KINDS: elementwise factors by the state dims they have (a vector state has
    `scalar` or `full` ones), or `dense` on the first dim. `has_decay` and `has_matrix` tell which
    of the results `decay_<state>` and `matrix_<state>` the cell has.
    """

    state: str
    kind: str
    has_decay: bool
    has_matrix: bool


def elementwise_kind(decay: Dims) -> str:
    """Kind of an elementwise M from the dims of its factors."""
    present = [dim != UNIT_DIM for dim in decay]
    if all(present):
        return "full"
    if not any(present):
        return "scalar"
    return "rows" if present[0] else "columns"
