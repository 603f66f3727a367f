"""How torch spellings become operators: one table, a function per spelling.

Contract: every entry takes the tracer and the user's arguments and returns traced values. What is
not in the table is refused by name. Several spellings of one thing lower to the same nodes, so
that later rules see one form only: matrix-vector products become matrix products, `softmax` its
stable form, masks `tri_mask`.
"""

from flexla_dist.compiler.trace.lowering import (
    constants,
    elementwise,
    movement,
    powers,
    products,
)
from flexla_dist.compiler.trace.lowering.table import LOWERINGS, supported_names

__all__ = [
    "LOWERINGS",
    "constants",
    "elementwise",
    "movement",
    "powers",
    "products",
    "supported_names",
]
