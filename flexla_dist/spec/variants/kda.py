"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with one decay a key dim.

`R = diag(exp(g_t)) S_{t-1}`, `S_t = R + beta_t k_t (v_t - k_t R)'`, `o_t = scale q_t S_t`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.functional import decay_scores
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import merge_delta, outer, read, wy_factors


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    b = x.g.cumsum(0)
    grown = b.exp()
    q = x.q * p.scale
    U, W = wy_factors(decay_scores(x.k, x.k, b, b, strict=True), x.k * grown, x.v, x.beta)
    return {
        "q_in": q * grown,
        "k_out": x.k * (b[-1] - b).exp(),
        "scores": decay_scores(q, x.k, b, b),
        "U": U,
        "W": W,
        "decay": grown[-1],
    }


def decay_mode(S: Tensor, c: Any) -> Tensor:
    return c.decay[:, None] * S + c.k_out.T @ (c.U - c.W @ S)


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    S = x.g.exp()[..., None] * S
    S = S + outer(x.beta[..., None] * x.k, x.v - read(x.k, S))
    return S, p.scale * read(x.q, S)


SPEC = LinearAttentionSpec(
    name="kda",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C K <=0", "beta": "C"},
    scalars={"scale": None},
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_delta,
    recurrence=recurrence,
)
