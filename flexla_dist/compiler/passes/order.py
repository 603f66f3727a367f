"""The passes in the order in which they run.

Simplify first, so that patterns meet one spelling; transposes next, because domain patterns read
products; then domain operators; then once more what they left behind.
"""

from __future__ import annotations

from flexla_dist.compiler.passes import domain, padding, scans, simplify, transpose
from flexla_dist.compiler.passes.engine import Rule

FORWARD_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("simplify", simplify.RULES),
    ("transpose", transpose.RULES),
    ("domain operators", domain.RULES),
    ("tidy", simplify.RULES + transpose.RULES),
)
BACKWARD_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (("tidy backward", simplify.RULES),)
UNPADDED_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("drop padding", padding.RULES),
    ("tidy", simplify.RULES),
)
KERNEL_PASSES: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("last rows of scans", scans.RULES),
    ("tidy kernels", simplify.RULES),
)
