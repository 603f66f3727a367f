"""Seeded inputs for any spec, with different gates in every head.

Contract: the same arguments give the same numbers on every machine (drawn in float64 on the CPU
unless a device is named, then cast). Values are chosen by what a spec declares and, for the usual
names, by what keeps it stable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants import lightning, retention

DEFAULT_SIZES = {"K": 8, "V": 6, "D": 10, "M": 5}


@dataclass(frozen=True)
class CallInputs:
    """Everything a call of a compiled operator takes, by kind."""

    inputs: dict[str, Tensor]
    params: dict[str, Tensor]
    scalars: dict[str, float]
    initial_state: Tensor | tuple[Tensor, ...]
    cu_seqlens: Tensor | None = field(default=None)

    def leaves(self) -> dict[str, Tensor]:
        """Inputs, parameters and initial states by name, to be differentiated (m is not)."""
        tensors = {**self.inputs, **self.params}
        if isinstance(self.initial_state, tuple):
            tensors |= {f"initial_state.{i}": x for i, x in enumerate(self.initial_state)}
        else:
            tensors["initial_state"] = self.initial_state
        return {name: x for name, x in tensors.items() if x.requires_grad}

    def to(self, dtype: torch.dtype) -> CallInputs:
        """Copy with inputs in `dtype`; parameters and states in float64 or else float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        states = self.initial_state
        return replace(
            self,
            inputs={name: _cast(x, dtype) for name, x in self.inputs.items()},
            params={name: _cast(x, wide) for name, x in self.params.items()},
            initial_state=tuple(_cast(x, wide) for x in states)
            if isinstance(states, tuple)
            else _cast(states, wide),
        )


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)


def make_inputs(
    spec: LinearAttentionSpec,
    *,
    batch: int = 2,
    tokens: int = 37,
    heads: int = 2,
    value_heads: int = 4,
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float64,
    cu_seqlens: Tensor | None = None,
    gate_scale: float = 1.0,
    seed: int = 0,
    requires_grad: bool = True,
    device: torch.device | str = "cpu",
) -> CallInputs:
    """Inputs, parameters, scalars and a non-zero initial state for one call of `spec`.

    Args:
        spec: any spec.
        batch, tokens, heads, value_heads: B, T, H of head groups, HV of all else.
        sizes: sizes of the named dims; `DEFAULT_SIZES` for those left out.
        dtype: dtype of the inputs; parameters and states are float32, or float64 with it.
        cu_seqlens: document bounds; then `batch` must be 1 and states are one a document.
        gate_scale: multiplies declared log decays.
        seed: seed of the generator.
        requires_grad: make leaves that want gradients.
        device: where the numbers are drawn and stay.
    """
    generator = torch.Generator(device).manual_seed(seed)
    known = {**DEFAULT_SIZES, **(sizes or {}), "1": 1}

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=device)

    inputs = {}
    for name, item in spec.input_specs.items():
        count = value_heads if item.group is None else heads
        noise = draw(batch, tokens, count, *(known[dim] for dim in item.dims[1:]))
        inputs[name] = _shape_input(spec, name, noise, item.log_decay, gate_scale)
    params = {
        name: _shape_param(name, draw(value_heads, *(known[dim] for dim in item.dims)))
        for name, item in spec.param_specs.items()
    }
    documents = batch if cu_seqlens is None else len(cu_seqlens) - 1
    states = [
        draw(documents, value_heads, *(known[dim] for dim in dims)) * 0.5
        for dims in spec.state_dims.values()
    ]
    if spec.name == "linear_attn_normalized":
        states[1] = states[1].abs() + 1
    wanted = [True] * len(states)
    if spec.log_scaled is not None:
        states.append(draw(documents, value_heads))
        wanted.append(False)
    for x in (*inputs.values(), *params.values()):
        x.requires_grad_(requires_grad)
    for x, want in zip(states, wanted, strict=True):
        x.requires_grad_(requires_grad and want)
    scalars = {
        name: (known["K"] ** -0.5 if default is None else default)
        for name, default in spec.scalars.items()
    }
    state = states[0] if len(states) == 1 else tuple(states)
    return CallInputs(inputs, params, scalars, state, cu_seqlens).to(dtype)


def _shape_input(
    spec: LinearAttentionSpec, name: str, noise: Tensor, log_decay: bool, gate_scale: float
) -> Tensor:
    count = noise.shape[2]
    if name == "g" and spec.name == "retention":
        return retention.head_decay(count).to(noise).expand(noise.shape).clone() * gate_scale
    if name == "g" and spec.name == "lightning":
        return lightning.head_decay(count, 1, 4).to(noise).expand(noise.shape).clone() * gate_scale
    if log_decay:
        head = torch.linspace(0.0, 4.0, count, dtype=torch.float64, device=noise.device)
        return logsigmoid(noise + head.view(-1, *(1,) * (noise.ndim - 3))) * gate_scale
    if name == "beta":
        return noise.sigmoid()
    if name == "k" and "beta" in spec.inputs:
        return normalize(noise, dim=-1)
    if name in ("a", "b") and noise.ndim > 3:  # a transition diag + b a', near a contraction
        return normalize(noise, dim=-1) * (0.2 if name == "b" else 1.0)
    if spec.name == "linear_attn_normalized" and name in ("q", "k"):
        return noise.abs() + 0.1  # feature maps are positive, so that the divisor is
    return noise


def _shape_param(name: str, noise: Tensor) -> Tensor:
    if name == "A_log":
        return noise * 0.3 + math.log(2.0)
    return noise * 0.5
