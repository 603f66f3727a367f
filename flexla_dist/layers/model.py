"""A decoder of linear-attention layers: RMSNorm, SwiGLU, tied embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flexla_dist.layers.exchange import LayerCache
from flexla_dist.layers.linear_attention import LayerConfig, LinearAttentionLayer


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model.

    Args:
        variant: which linear attention every layer uses.
        layers: number of blocks.
        width: model width D.
        heads: heads H of q and k in a layer.
        value_heads: heads HV of v and of the state, a multiple of heads; null means as many.
        key_dim: key width K of a head.
        value_dim: value width V of a head.
        conv_width: taps of the short convolution, 0 for none.
        mlp_width: hidden width of the SwiGLU.
        vocab: number of tokens, 256 for bytes.
        norm_eps: epsilon of every RMSNorm.
    """

    variant: str = "gated_delta_rule"
    layers: int = 4
    width: int = 128
    heads: int = 2
    value_heads: int | None = None
    key_dim: int = 64
    value_dim: int = 64
    conv_width: int = 4
    mlp_width: int = 384
    vocab: int = 256
    norm_eps: float = 1e-6

    def layer(self) -> LayerConfig:
        """The shape of one attention layer."""
        return LayerConfig(
            variant=self.variant,
            width=self.width,
            heads=self.heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_width=self.conv_width,
            norm_eps=self.norm_eps,
        )


class SwiGLU(nn.Module):
    """y = (silu(x W_g) * x W_u) W_d."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attn = LinearAttentionLayer(config.layer(), index, config.layers)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config.width, config.mlp_width)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cu_seqlens=cu_seqlens)
        return x + self.mlp(self.mlp_norm(x))

    def step(self, x: Tensor, cache: LayerCache) -> Tensor:
        x = x + self.attn.step(self.attn_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


class LinearAttentionModel(nn.Module):
    """Tokens [B, T] -> logits [B, T, vocab] of the token that follows each.

    `checkpoint_activations` recomputes the blocks in the backward pass instead of keeping their
    activations.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Linear weights of variance 1/inputs, those that write to the residual stream smaller with
        depth. Embeddings have length one: times sqrt(width) they enter the stream at the size of
        what the blocks add, and a small last norm keeps the first guesses near uniform."""
        residual = 1.0 / math.sqrt(2 * self.config.layers)
        nn.init.normal_(self.embedding.weight, std=self.config.width**-0.5)
        nn.init.constant_(self.norm.weight, 0.25)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = residual if name.endswith((".out", ".down")) else 1.0
                nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Logits. cu_seqlens: document starts [N+1] where tokens [1, T] are packed documents."""
        x = self._embed(tokens)
        for block in self.blocks:
            if self.checkpoint_activations and self.training:
                x = checkpoint(block, x, cu_seqlens, use_reentrant=False)
            else:
                x = block(x, cu_seqlens)
        return self._logits(x)

    def new_cache(self) -> list[LayerCache]:
        """The decoding state of an empty sequence."""
        return [LayerCache() for _ in self.blocks]

    def step(self, tokens: Tensor, cache: list[LayerCache]) -> Tensor:
        """Logits of the next tokens [B, T], T >= 1, of the sequence in `cache`; updates it."""
        x = self._embed(tokens)
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            assert isinstance(block, Block)
            x = block.step(x, layer_cache)
        return self._logits(x)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.config.width**0.5

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


@torch.no_grad()
def generate(
    model: LinearAttentionModel,
    prompt: Tensor,
    new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompt [B, T], T >= 1, continued by `new_tokens` sampled tokens: [B, T + new_tokens].

    temperature 0 takes the likeliest token. Memory does not grow with the length: each layer keeps
    its state and the last tokens before its convolution.
    """
    if prompt.dim() != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"prompt must be [B, T] with T >= 1, got {list(prompt.shape)}; start from some byte"
        )
    cache = model.new_cache()
    tokens, following = prompt, prompt
    for _ in range(new_tokens):
        logits = model.step(following, cache)[:, -1].float()
        if temperature == 0:
            following = logits.argmax(-1, keepdim=True)
        else:
            chances = torch.softmax(logits / temperature, dim=-1)
            following = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens
