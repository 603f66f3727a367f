"""Mamba2's state space layer (arXiv 2405.21060): `simple_gla` from the raw step, with a skip.

`d_t = softplus(dt_t + dt_bias)`, `S_t = exp(-exp(A_log) d_t) S_{t-1} + d_t B_t x_t'`,
`o_t = C_t S_t + D x_t`; here q is C, k is B and v is x.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import softplus

from flexla_dist.spec.functional import decay_matrix
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import outer, read
from flexla_dist.spec.variants.simple_gla import decay_mode


def token_mode(x: Any, p: Any) -> dict[str, Tensor]:
    return {"dt": softplus(x.dt + p.dt_bias)}


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    b = (-p.A_log.exp() * x.dt).cumsum(0)
    return {
        "q_in": x.q * b.exp()[:, None],
        "k_out": x.k * (b[-1] - b).exp()[:, None],
        "scores": (x.q @ x.k.T) * decay_matrix(b, b),
        "v": x.v * x.dt[:, None],
        "skip": x.v * p.D,
        "decay": b[-1].exp(),
    }


def merge_mode(S: Tensor, c: Any) -> Tensor:
    return c.q_in @ S + c.scores @ c.v + c.skip


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    dt = softplus(x.dt + p.dt_bias)
    S = (-p.A_log.exp() * dt).exp()[..., None, None] * S + outer(dt[..., None] * x.k, x.v)
    return S, read(x.q, S) + p.D[..., None] * x.v


SPEC = LinearAttentionSpec(
    name="mamba2",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "dt": "C"},
    params={"A_log": "", "dt_bias": "", "D": ""},
    token_mode=token_mode,
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_mode,
    recurrence=recurrence,
)
