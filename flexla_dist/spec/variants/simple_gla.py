"""Gated linear attention, one decay a head.

`S_t = exp(g_t) S_{t-1} + k_t v_t'`, `o_t = scale q_t S_t`.

It is Mamba2's recurrence (arXiv 2405.21060) and, with a constant g, RetNet's and Lightning's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.functional import decay_matrix
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import merge_linear, outer, read


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    b = x.g.cumsum(0)
    q = x.q * p.scale
    return {
        "q_in": q * b.exp()[:, None],
        "k_out": x.k * (b[-1] - b).exp()[:, None],
        "scores": (q @ x.k.T) * decay_matrix(b, b),
        "v": x.v,
        "decay": b[-1].exp(),
    }


def decay_mode(S: Tensor, c: Any) -> Tensor:
    return c.decay * S + c.k_out.T @ c.v


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    S = x.g.exp()[..., None, None] * S + outer(x.k, x.v)
    return S, p.scale * read(x.q, S)


SPEC = LinearAttentionSpec(
    name="simple_gla",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C <=0"},
    scalars={"scale": None},
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_linear,
    recurrence=recurrence,
)
