"""Gated linear attention (arXiv 2312.06635), one decay a key dim.

`S_t = diag(exp(g_t)) S_{t-1} + k_t v_t'`, `o_t = scale q_t S_t`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.functional import decay_scores
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import merge_linear, outer, read


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    b = x.g.cumsum(0)
    q = x.q * p.scale
    return {
        "q_in": q * b.exp(),
        "k_out": x.k * (b[-1] - b).exp(),
        "scores": decay_scores(q, x.k, b, b),
        "v": x.v,
        "decay": b[-1].exp(),
    }


def decay_mode(S: Tensor, c: Any) -> Tensor:
    return c.decay[:, None] * S + c.k_out.T @ c.v


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    S = x.g.exp()[..., None] * S + outer(x.k, x.v)
    return S, p.scale * read(x.q, S)


SPEC = LinearAttentionSpec(
    name="gla",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C K <=0"},
    scalars={"scale": None},
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_linear,
    recurrence=recurrence,
)
