"""Lookup of the package's variants by name."""

from __future__ import annotations

from flexla_dist.errors import SpecError
from flexla_dist.shapes import nearest
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants import (
    delta_rule,
    gated_delta_rule,
    gla,
    hgrn,
    kda,
    lightning,
    linear_attn,
    linear_attn_normalized,
    mamba2,
    retention,
    simple_gla,
)

_VARIANTS = {
    module.SPEC.name: module.SPEC
    for module in (
        linear_attn,
        linear_attn_normalized,
        retention,
        lightning,
        simple_gla,
        mamba2,
        gla,
        hgrn,
        delta_rule,
        gated_delta_rule,
        kda,
    )
}


def get_variant(name: str) -> LinearAttentionSpec:
    """Spec of a variant of the package. Raises SpecError with the nearest name when unknown."""
    if name not in _VARIANTS:
        hint = nearest(name, _VARIANTS) if isinstance(name, str) else ""
        raise SpecError(f"no variant named {name!r}{hint}; variants: {', '.join(_VARIANTS)}")
    return _VARIANTS[name]


def variant_names() -> tuple[str, ...]:
    """Names of all variants of the package, simplest first."""
    return tuple(_VARIANTS)
