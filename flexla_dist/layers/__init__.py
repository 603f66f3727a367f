"""Modules: the linear-attention layer of every variant, and a decoder built of it."""

from flexla_dist.layers.exchange import (
    DecodeExchange,
    LayerCache,
    LocalExchange,
    SequenceExchange,
)
from flexla_dist.layers.linear_attention import LayerConfig, LinearAttentionLayer
from flexla_dist.layers.model import LinearAttentionModel, ModelConfig, generate
from flexla_dist.layers.recipes import RECIPES

__all__ = [
    "RECIPES",
    "DecodeExchange",
    "LayerCache",
    "LayerConfig",
    "LinearAttentionLayer",
    "LinearAttentionModel",
    "LocalExchange",
    "ModelConfig",
    "SequenceExchange",
    "generate",
]
