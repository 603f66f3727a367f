"""The linear-attention layer, one for all variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexla_dist.errors import ArgumentError
from flexla_dist.layers.convolution import ShortConvolution
from flexla_dist.layers.exchange import (
    DecodeExchange,
    LayerCache,
    LocalExchange,
    SequenceExchange,
)
from flexla_dist.layers.gates import StepDecay, accurate
from flexla_dist.layers.recipes import RECIPES
from flexla_dist.ops.custom_ops import PUBLISHED
from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.shapes import nearest
from flexla_dist.spec.variants import get_variant

_LEAST = {"width": 1, "heads": 1, "value_heads": 1, "key_dim": 1, "value_dim": 1, "conv_width": 0}


@dataclass(frozen=True)
class LayerConfig:
    """Shape of a linear-attention layer.

    width: model width D. heads: heads H of q and k. value_heads: heads HV of v and of the state, a
    multiple of H (None: H). key_dim, value_dim: K and V of a head. conv_width: taps of the short
    convolution (0: none).
    """

    variant: str = "gated_delta_rule"
    width: int = 128
    heads: int = 2
    value_heads: int | None = None
    key_dim: int = 64
    value_dim: int = 64
    conv_width: int = 4
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str) or self.variant not in RECIPES:
            raise ArgumentError(
                f"unknown variant {self.variant!r}{nearest(str(self.variant), RECIPES)}; "
                f"layers exist for {', '.join(RECIPES)}"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name == "value_heads" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(
                    f"{name} is {value!r}; expected a whole number, at least {least}"
                )
        if isinstance(self.norm_eps, bool) or not isinstance(self.norm_eps, int | float):
            raise ArgumentError(f"norm_eps is {self.norm_eps!r}; expected a number such as 1e-6")
        if self.num_value_heads % self.heads:
            raise ArgumentError(
                f"value_heads must be a multiple of heads, got {self.num_value_heads} value heads "
                f"and {self.heads} heads"
            )

    @property
    def num_value_heads(self) -> int:
        """HV."""
        return self.heads if self.value_heads is None else self.value_heads


def variant_op(spec_name: str) -> LinearAttentionOp:
    """The compiled operator of one of the package's specs; layers of a variant share it."""
    if torch.compiler.is_compiling():
        return getattr(PUBLISHED, _publish(spec_name))
    return _compiled(spec_name)


@torch.compiler.assume_constant_result
def _publish(spec_name: str) -> str:
    """Run by Dynamo, not traced: compiling a spec is no part of a graph."""
    return PUBLISHED.add(_compiled(spec_name))


@cache
def _compiled(spec_name: str) -> LinearAttentionOp:
    return compile(get_variant(spec_name))


class LinearAttentionLayer(nn.Module):
    """Projections, short convolution, gates, linear attention, gated norm, output projection.

    `forward` asks its `exchange` for everything that lies before its
    tokens (see `SequenceExchange`), so the same code runs on a whole sequence, on one rank's shard
    of it, and one token at a time.
    """

    def __init__(self, config: LayerConfig, layer_index: int = 0, num_layers: int = 1) -> None:
        super().__init__()
        self.config = config
        self.recipe = RECIPES[config.variant]
        qk_channels = 0 if self.recipe.forget_inputs else config.heads * config.key_dim
        v_channels = config.num_value_heads * config.value_dim
        self.splits = [qk_channels, qk_channels, v_channels]
        self.qkv = nn.Linear(config.width, sum(self.splits), bias=False)
        self.conv = (
            ShortConvolution(sum(self.splits), config.conv_width) if config.conv_width else None
        )
        make_decay = self.recipe.decay
        self.decay = make_decay(config, layer_index, num_layers) if make_decay else None
        self.beta = (
            nn.Linear(config.width, config.num_value_heads, bias=False)
            if self.recipe.beta
            else None
        )
        self.skip = (
            nn.Parameter(torch.ones(config.num_value_heads)) if self.recipe.raw_step else None
        )
        self.gate = nn.Linear(config.width, v_channels, bias=False)
        self.norm = nn.RMSNorm(config.value_dim, eps=config.norm_eps)
        self.out = nn.Linear(v_channels, config.width, bias=False)

    @property
    def op(self) -> LinearAttentionOp:
        """The compiled operator; layers of a variant share it, and copies of a layer too."""
        return variant_op(self.recipe.spec)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        exchange: SequenceExchange | None = None,
    ) -> Tensor:
        """y [B, T, D] from x [B, T, D].

        cu_seqlens: document starts [N+1] of a packed x (B = 1), a list or a tensor on the CPU.
        exchange: what lies before x; None means that x is the whole sequence. Give at most one.
        """
        if exchange is None:
            exchange = LocalExchange(cu_seqlens)
        elif cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens and exchange were both given: the exchange already knows the documents"
            )
        return self._mix(x, exchange)

    def _mix(self, x: Tensor, exchange: SequenceExchange) -> Tensor:
        if x.ndim != 3 or x.shape[-1] != self.config.width:
            raise ArgumentError(
                f"x is {list(x.shape)}; expected [B, T, D] with D = {self.config.width}"
            )
        q, k, v = self.project(x, exchange)
        inputs, scalars = self.operator_inputs(x, q, k, v), self.operator_scalars()
        o = exchange.attend(self.op, inputs, self.operator_params(), scalars)
        gate = self.gate(x).unflatten(-1, (-1, self.config.value_dim))
        o = self.norm(accurate(o)) * F.silu(gate)
        return self.out(o.flatten(-2))

    def step(self, x: Tensor, cache: LayerCache) -> Tensor:
        """Decode: y for the next tokens x [B, T, D], T >= 1, of `cache`; updates the cache.

        Equal to `forward` on the whole sequence.
        """
        return self._mix(x, DecodeExchange(cache))

    def operator_scalars(self) -> dict[str, float]:
        """Run-time numbers of the operator: the scale 1/sqrt(K) where it has one."""
        return {"scale": self.config.key_dim**-0.5} if "scale" in self.op.spec.scalars else {}

    def operator_params(self) -> dict[str, Tensor]:
        """Learned per-head tensors of the operator."""
        if not self.recipe.raw_step:
            return {}
        assert isinstance(self.decay, StepDecay) and self.skip is not None
        return {"A_log": self.decay.A_log, "dt_bias": self.decay.dt_bias, "D": self.skip}

    def project(self, x: Tensor, exchange: SequenceExchange) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, K], k [B, T, H, K] and v [B, T, HV, V], convolved; HGRN's q, k are empty."""
        config = self.config
        mixed = self.qkv(x)
        if self.conv is not None:
            halo = exchange.convolve_halo(mixed, self.conv.width - 1)
            mixed = self.conv(mixed, halo, exchange.cu_seqlens)
        q, k, v = mixed.split(self.splits, dim=-1)
        v = v.unflatten(-1, (config.num_value_heads, config.value_dim))
        qk_shape = (config.heads, self.splits[0] // config.heads)
        return q.unflatten(-1, qk_shape), k.unflatten(-1, qk_shape), v

    def operator_inputs(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Inputs of the operator, each [B, T, heads, dims], as the recipe says."""
        recipe = self.recipe
        if recipe.unit_keys:
            q, k = (F.normalize(t, dim=-1, eps=self.config.norm_eps) for t in (q, k))
        if recipe.forget_inputs:
            assert self.decay is not None
            g = self.decay(x)
            return {"x": v * -torch.expm1(g).to(v.dtype), "g": g}
        inputs = {"q": q, "k": k, "v": v}
        if self.beta is not None:
            inputs["beta"] = torch.sigmoid(accurate(self.beta(x)))
        if recipe.raw_step:
            assert isinstance(self.decay, StepDecay)
            inputs["dt"] = accurate(self.decay.project(x))
        elif self.decay is not None:
            inputs["g"] = self.decay(x)
        return inputs
