"""The passes in the order in which they run.

Simplify first, so that patterns meet one spelling; transposes next, because domain patterns read
products; then domain operators; then once more what they left behind. What cancels in gradients is
taken out once they are tidy; graphs without gradients have nothing of it.
"""

from __future__ import annotations

from flexla_dist.compiler.passes import (
    cuts,
    diagonals,
    domain,
    factors,
    padding,
    scales,
    scans,
    simplify,
    transpose,
)
from flexla_dist.compiler.passes.engine import Rule

FORWARD_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("simplify", simplify.RULES),
    ("transpose", transpose.RULES),
    ("domain operators", domain.RULES),
    ("tidy", simplify.RULES + transpose.RULES),
)
DERIVED_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (("tidy backward", simplify.RULES),)
BACKWARD_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    *DERIVED_PASSES,
    ("diagonals that cancel", diagonals.RULES),
)
CUT_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("pairs across cuts", cuts.RULES),
    ("tidy cuts", simplify.RULES),
)
UNPADDED_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("drop padding", padding.RULES),
    ("tidy", simplify.RULES),
)
KERNEL_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("last rows of scans", scans.RULES),
    ("scales out of products", scales.RULES),
    ("tidy kernels", simplify.RULES),
    ("common factors", factors.RULES + simplify.RULES),
)
