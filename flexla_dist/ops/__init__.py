"""Public operators: compiled specs and the functions named as in flash-linear-attention."""

from typing import Any

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
from flexla_dist.shapes import nearest

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


def __getattr__(name: str) -> Any:
    hint = "" if name.startswith("_") else nearest(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
