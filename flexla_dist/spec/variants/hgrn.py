"""HGRN (arXiv 2311.04823), a vector state: `h_t = exp(g_t) h_{t-1} + x_t`, `o_t = h_t`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.functional import decay_scan
from flexla_dist.spec.spec import LinearAttentionSpec


def chunk_mode(x: Any, p: Any) -> dict[str, Tensor]:
    h = decay_scan(x.g, x.x)
    carried = x.g.cumsum(0).exp()
    return {"h": h, "last": h[-1], "carried": carried, "decay": carried[-1]}


def decay_mode(S: Tensor, c: Any) -> Tensor:
    return c.decay * S + c.last


def merge_mode(S: Tensor, c: Any) -> Tensor:
    return c.carried * S + c.h


def recurrence(S: Tensor, x: Any, p: Any) -> tuple[Tensor, Tensor]:
    S = x.g.exp() * S + x.x
    return S, S


SPEC = LinearAttentionSpec(
    name="hgrn",
    inputs={"x": "C D", "g": "C D <=0"},
    state="D",
    output="C D",
    chunk_mode=chunk_mode,
    decay_mode=decay_mode,
    merge_mode=merge_mode,
    recurrence=recurrence,
)
