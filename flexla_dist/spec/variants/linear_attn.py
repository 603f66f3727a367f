"""Linear attention (arXiv 2006.16236): `S_t = S_{t-1} + k_t v_t'`, `o_t = scale q_t S_t`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.common import merge_linear, outer, read


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    q = x.q * p.scale
    return {"q_in": q, "scores": (q @ x.k.T).tril(), "k": x.k, "v": x.v}


def decay_mode(S: Tensor, c: Any) -> Tensor:
    return S + c.k.T @ c.v


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    S = S + outer(x.k, x.v)
    return S, p.scale * read(x.q, S)


SPEC = LinearAttentionSpec(
    name="linear_attn",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V"},
    scalars={"scale": None},
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_linear,
    recurrence=recurrence,
)
