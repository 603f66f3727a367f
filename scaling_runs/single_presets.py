"""Which calls `single_gpu.py` measures, the most important first.

Contract: a point is one call, both directions, with the implementations that are wanted of it. In
a preset our kernels and softmax attention come first at every shape, other libraries after them:
they tune at shapes that they have not seen, which takes long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scaling_runs.bench import Point, Shape
from scaling_runs.implementations import SOFTMAX

PRESETS = ("sweep", "shapes")
SWEEP_HEADS = 16
SWEEP_BATCH, SWEEP_TOKENS = (1, 4, 16), (2048, 4096, 8192, 16384)
SWEEP_FIRST = ((16, 4096), (1, 16384), (16, 16384), (1, 4096), (4, 8192))
OTHERS = ("fla", "flashqla")
SIX = ("gated_delta_rule", "gla", "simple_gla", "kda", "linear_attn", "hgrn")
BOTH, FORWARD = ("fwd", "fwdbwd"), ("fwd",)
# B, T, H, D, HV (0: as H), directions, variants
SHAPES = (
    (1, 262144, 32, 128, 0, FORWARD, SIX),
    (8, 4096, 16, 128, 0, BOTH, SIX),
    (1, 131072, 4, 128, 0, BOTH, SIX),
    (1, 1024, 32, 128, 0, BOTH, SIX),
    (1, 4096, 32, 128, 0, BOTH, SIX),
    (1, 16384, 16, 128, 32, BOTH, ("gated_delta_rule", "kda", "simple_gla", "gla")),
    (1, 16384, 32, 64, 0, BOTH, SIX),
    (1, 16384, 32, 256, 0, BOTH, SIX),
)


def points(
    preset: str,
    directions: Sequence[str],
    variants: Iterable[str],
    impls: Iterable[str],
    dtype: str,
) -> list[Point]:
    """Points of a preset; of its directions, variants and implementations those that are given."""
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; expected one of {', '.join(PRESETS)}")
    make = _sweep if preset == "sweep" else _shapes
    variants, impls = tuple(variants), tuple(impls)
    found = []
    for shape, of in make(directions, variants, dtype):
        wanted = tuple(name for name in of if name in impls)
        if wanted and shape:
            found.append(Point(tuple(shape), wanted))
    return found


Chosen = list[tuple[list[Shape], tuple[str, ...]]]


def _sweep(directions: Sequence[str], variants: Sequence[str], dtype: str) -> Chosen:
    """GLA beside softmax attention over batch and length."""
    every = [(b, t) for t in SWEEP_TOKENS for b in SWEEP_BATCH]
    order = [*SWEEP_FIRST, *(at for at in every if at not in SWEEP_FIRST)]

    def calls(variant: str, batch: int, tokens: int) -> list[Shape]:
        if variant not in variants:
            return []
        return [Shape(variant, d, batch, tokens, SWEEP_HEADS, 128, 128, dtype) for d in directions]

    first = [(calls(name, *at), ("ours", "sdpa")) for at in order for name in ("gla", SOFTMAX)]
    return first + [(calls("gla", *at), ("fla",)) for at in order]


def _shapes(directions: Sequence[str], variants: Sequence[str], dtype: str) -> Chosen:
    """Few and many heads, short and long, small and large heads, groups of heads."""
    found: Chosen = []
    for impls in (("ours",), OTHERS):
        for batch, tokens, heads, size, value_heads, ways, names in SHAPES:
            for name in names:
                calls = [
                    Shape(name, d, batch, tokens, heads, size, size, dtype, value_heads)
                    for d in ways
                    if d in directions and name in variants
                ]
                found.append((calls, impls))
    return found
