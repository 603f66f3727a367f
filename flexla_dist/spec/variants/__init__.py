"""The package's own variants, by name.

Contract: each module exports `SPEC`, built of three callables and an independent token recurrence.
The compiler knows no variant by name; a user's spec has the same standing.
"""

from flexla_dist.spec.variants.registry import get_variant, variant_names

__all__ = ["get_variant", "variant_names"]
