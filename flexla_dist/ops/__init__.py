"""Public operators: compiled specs and the functions named as in flash-linear-attention."""

from flexla_dist.ops.chunk import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_gla,
    chunk_hgrn,
    chunk_kda,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_mamba2,
    chunk_retention,
    chunk_simple_gla,
)

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
