"""Linear attention divided by the sum of its weights (arXiv 2006.16236).

`S_t = S_{t-1} + k_t v_t'`, `z_t = z_{t-1} + k_t`, `o_t = scale q_t S_t / (scale q_t z_t + 1e-10)`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import outer, read

EPS = 1e-10


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    q = x.q * p.scale
    scores = (q @ x.k.T).tril()
    return {"q_in": q, "k": x.k, "v": x.v, "local": scores @ x.v, "weight": scores.sum(-1)}


def decay_mode(S: Any, c: Any) -> dict[str, Tensor]:
    return {"S": S.S + c.k.T @ c.v, "z": S.z + c.k.sum(0)}


def merge_mode(S: Any, c: Any) -> Tensor:
    weight = c.q_in @ S.z + c.weight
    return (c.q_in @ S.S + c.local) / (weight + EPS)[:, None]


def recurrence(S: Any, x: Any, p: Any) -> tuple[dict[str, Tensor], Tensor]:
    state, z = S.S + outer(x.k, x.v), S.z + x.k
    weight = p.scale * (x.q * z).sum(-1, keepdim=True)
    return {"S": state, "z": z}, p.scale * read(x.q, state) / (weight + EPS)


SPEC = LinearAttentionSpec(
    name="linear_attn_normalized",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V"},
    scalars={"scale": None},
    state={"S": "K V", "z": "K"},
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_mode,
    recurrence=recurrence,
)
