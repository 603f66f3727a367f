"""The package's variants as functions with the argument names, layouts and returns of FLA 0.6.0.

Contract: `[B, T, H, K]` layout, states `[N, HV, K, V]`, gates natural logarithms; `q` and `k` may
have fewer heads (H) than `v`, gates and `beta` (HV), in every function. Each returns
`(o, final_state or None)`. Differences from FLA: all float dtypes work everywhere, the chunk size
is any power of two, context parallelism is `SequenceParallelLA` instead of an argument, and an
option that is not supported is refused by name.
"""

from flexla_dist.ops.chunk.delta import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
)
from flexla_dist.ops.chunk.linear import chunk_linear_attn
from flexla_dist.ops.chunk.scalar import (
    chunk_lightning_attn,
    chunk_mamba2,
    chunk_retention,
    chunk_simple_gla,
)
from flexla_dist.ops.chunk.vector import chunk_gla, chunk_hgrn

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_hgrn",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_mamba2",
    "chunk_retention",
    "chunk_simple_gla",
]
