"""Token-wise options of a variant: unit keys, raw betas, raw gates.

Contract: `with_options` returns the same variant with a `token_mode`, so that the activations are
part of the compiled operator: nothing is kept for backward but the raw inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexla_dist.errors import ArgumentError
from flexla_dist.spec.spec import LinearAttentionSpec

UNIT_EPS = 1e-6


@dataclass(frozen=True)
class TokenOptions:
    """What is done to raw inputs before the recurrence.

    unit_qk: q and k become `x / sqrt(|x|^2 + 1e-6)`.
    beta_range: 0 leaves beta as given; 1 or 2 makes it `beta_range * sigmoid(beta)`.
    gate: "given" leaves g, a log decay; "softplus" makes it `-exp(A_log) softplus(g + dt_bias)`,
        "bounded" makes it `lower_bound sigmoid(exp(A_log) (g + dt_bias))`.
    has_scale, has_bias: whether A_log and dt_bias are parameters (1 and 0 otherwise).
    lower_bound: of the "bounded" gate, negative.
    """

    unit_qk: bool = False
    beta_range: Literal[0, 1, 2] = 0
    gate: Literal["given", "softplus", "bounded"] = "given"
    has_scale: bool = True
    has_bias: bool = True
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        bounded = self.gate == "bounded"
        if bounded and (self.lower_bound is None or not self.lower_bound < 0):
            raise ArgumentError(
                f"lower_bound must be negative, the least log decay of a token; "
                f"got {self.lower_bound}"
            )
        if self.gate == "softplus" and not self.has_scale:
            raise ArgumentError(
                "A_log [HV] is needed for a raw gate (use_gate_in_kernel=True) without lower_bound"
            )


def with_options(spec: LinearAttentionSpec, options: TokenOptions) -> LinearAttentionSpec:
    """The variant with raw inputs; `spec` itself when there is nothing to do.

    A raw gate has parameters `A_log` (one a head) and `dt_bias` (with the dims of g).
    """
    if options == TokenOptions():
        return spec
    inputs, params = dict(spec.inputs), dict(spec.params)
    if options.gate != "given":
        inputs["g"] = inputs["g"].replace("<=0", "").strip()  # raw: any sign
        if options.has_scale:
            params["A_log"] = ""
        if options.has_bias:
            params["dt_bias"] = " ".join(spec.input_specs["g"].dims[1:])

    def token_mode(x: Any, p: Any) -> dict[str, Tensor]:
        values = {} if spec.token_mode is None else dict(spec.token_mode(x, p))
        if options.unit_qk:
            values["q"], values["k"] = _unit(x.q), _unit(x.k)
        if options.beta_range:
            values["beta"] = options.beta_range * torch.sigmoid(x.beta)
        if options.gate != "given":
            values["g"] = _gate(options, x.g + p.dt_bias if options.has_bias else x.g, p)
        return values

    return replace(spec, inputs=inputs, params=params, token_mode=token_mode, recurrence=None)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _gate(options: TokenOptions, raw: Tensor, p: Any) -> Tensor:
    if options.gate == "softplus":
        return -p.A_log.exp() * softplus(raw)
    assert options.lower_bound is not None
    return options.lower_bound * torch.sigmoid(p.A_log.exp() * raw if options.has_scale else raw)
