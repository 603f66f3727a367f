"""What sets the variants apart as layers: their decay, their beta, their keys.

A recipe is data. Adding a variant to the layers is one entry here; its mathematics is its spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from flexla_dist.layers import gates

if TYPE_CHECKING:
    from flexla_dist.layers.linear_attention import LayerConfig


@dataclass(frozen=True)
class Recipe:
    """How a layer feeds one spec.

    spec: name of the package's spec.
    decay: makes the module of log-decays from (config, layer index, number of layers), or None.
    beta: the delta rule's writing strength, sigmoid(x W), is an input.
    unit_keys: q and k have length one (the delta rule needs it to be stable).
    raw_step: the spec itself makes the decay from the raw step, A_log and dt_bias, and adds a skip
        D * v (Mamba2).
    forget_inputs: there are no q and k; the input is (1 - exp(g)) * v (HGRN).
    """

    spec: str
    decay: Callable[[LayerConfig, int, int], nn.Module] | None = None
    beta: bool = False
    unit_keys: bool = False
    raw_step: bool = False
    forget_inputs: bool = False


def _retention(config: LayerConfig, layer: int, layers: int) -> nn.Module:
    return gates.RetentionDecay(config.num_value_heads)


def _lightning(config: LayerConfig, layer: int, layers: int) -> nn.Module:
    return gates.LightningDecay(config.num_value_heads, layer, layers)


def _sigmoid(config: LayerConfig, layer: int, layers: int) -> nn.Module:
    return gates.SigmoidDecay(config.width, config.num_value_heads)


def _step(config: LayerConfig, layer: int, layers: int) -> nn.Module:
    return gates.StepDecay(config.width, config.num_value_heads)


def _low_rank_sigmoid(config: LayerConfig, layer: int, layers: int) -> nn.Module:
    return gates.LowRankSigmoidDecay(config.width, config.num_value_heads, config.key_dim)


def _low_rank_step(config: LayerConfig, layer: int, layers: int) -> nn.Module:
    return gates.LowRankStepDecay(config.width, config.num_value_heads, config.key_dim)


def _value_sigmoid(config: LayerConfig, layer: int, layers: int) -> nn.Module:
    return gates.ForgetGate(config.width, config.num_value_heads, config.value_dim, layer, layers)


RECIPES: dict[str, Recipe] = {
    "linear_attn": Recipe("linear_attn"),
    "retention": Recipe("retention", _retention),
    "lightning": Recipe("lightning", _lightning),
    "simple_gla": Recipe("simple_gla", _sigmoid),
    "mamba2": Recipe("mamba2", _step, raw_step=True),
    "gla": Recipe("gla", _low_rank_sigmoid),
    "hgrn": Recipe("hgrn", _value_sigmoid, forget_inputs=True),
    "delta_rule": Recipe("delta_rule", beta=True, unit_keys=True),
    "gated_delta_rule": Recipe("gated_delta_rule", _step, beta=True, unit_keys=True),
    "kda": Recipe("kda", _low_rank_step, beta=True, unit_keys=True),
}
