"""DeltaNet (arXiv 2406.06484): a state corrected towards v at k.

`S_t = S_{t-1} + beta_t k_t (v_t - k_t S_{t-1})'`, `o_t = scale q_t S_t`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import merge_delta, outer, read, wy_factors


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    q = x.q * p.scale
    U, W = wy_factors(x.k @ x.k.T, x.k, x.v, x.beta)
    return {"q_in": q, "scores": (q @ x.k.T).tril(), "k": x.k, "U": U, "W": W}


def decay_mode(S: Tensor, c: Any) -> Tensor:
    return S + c.k.T @ (c.U - c.W @ S)


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    S = S + outer(x.beta[..., None] * x.k, x.v - read(x.k, S))
    return S, p.scale * read(x.q, S)


SPEC = LinearAttentionSpec(
    name="delta_rule",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "beta": "C"},
    scalars={"scale": None},
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_delta,
    recurrence=recurrence,
)
