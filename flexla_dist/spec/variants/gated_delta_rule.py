"""Gated DeltaNet (arXiv 2412.06464), one decay a head.

`R = exp(g_t) S_{t-1}`, `S_t = R + beta_t k_t (v_t - k_t R)'`, `o_t = scale q_t S_t`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.functional import decay_matrix
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import merge_delta, outer, read, wy_factors


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    b = x.g.cumsum(0)
    grown, ratios = b.exp()[:, None], decay_matrix(b, b)
    q = x.q * p.scale
    U, W = wy_factors((x.k @ x.k.T) * ratios, x.k * grown, x.v, x.beta)
    return {
        "q_in": q * grown,
        "k_out": x.k * (b[-1] - b).exp()[:, None],
        "scores": (q @ x.k.T) * ratios,
        "U": U,
        "W": W,
        "decay": b[-1].exp(),
    }


def decay_mode(S: Tensor, c: Any) -> Tensor:
    return c.decay * S + c.k_out.T @ (c.U - c.W @ S)


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    S = x.g.exp()[..., None, None] * S
    S = S + outer(x.beta[..., None] * x.k, x.v - read(x.k, S))
    return S, p.scale * read(x.q, S)


SPEC = LinearAttentionSpec(
    name="gated_delta_rule",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C <=0", "beta": "C"},
    scalars={"scale": None},
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_delta,
    recurrence=recurrence,
)
