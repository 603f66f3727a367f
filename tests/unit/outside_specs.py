"""Specs that no variant of the package has, each hard on one part of the compiler."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import softplus

from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec import functional as F

from .extra_specs import DPLR, GSA, RWKV6, outer, read

# -- a delta rule that looks up with one key and writes with another: M = exp(g) (I - beta k a')


def lookup_chunk(x: Any, p: Any) -> dict[str, Any]:
    b, beta = x.g.cumsum(0), x.beta[:, None]
    ratios, grown, q = F.decay_matrix(b, b), b.exp()[:, None], x.q * p.scale
    T = F.unit_tril_inverse((beta * (x.a @ x.k.T) * ratios).tril(-1))
    return {
        "q_in": q * grown, "scores": (q @ x.k.T) * ratios, "U": T @ (beta * x.v),
        "W": T @ (beta * x.a * grown), "k_out": x.k * (b[-1] - b).exp()[:, None],
        "decay": b[-1].exp(),
    }  # fmt: skip


def lookup_decay(S: Any, c: Any) -> Any:
    return c.decay * S + c.k_out.T @ (c.U - c.W @ S)


def lookup_merge(S: Any, c: Any) -> Any:
    return c.q_in @ S + c.scores @ (c.U - c.W @ S)


def lookup_recurrence(S: Any, x: Any, p: Any) -> Any:
    S = x.g.exp()[..., None, None] * S
    S = S + outer(x.beta[..., None] * x.k, x.v - read(x.a, S))
    return S, p.scale * read(x.q, S)


LOOKUP_DELTA = LinearAttentionSpec(
    name="lookup_delta",
    inputs={
        "q": "C K @qk",
        "k": "C K @qk",
        "a": "C K",
        "v": "C V",
        "g": "C <=0",
        "beta": "C",
    },
    scalars={"scale": None},
    chunk_mode=lookup_chunk,
    decay_mode=lookup_decay,
    merge_mode=lookup_merge,
    recurrence=lookup_recurrence,
)


# -- rows and columns of the state decay apart: S_t = exp(g_t + h_t') * S_{t-1} + k_t v_t'


def grid_chunk(x: Any, p: Any) -> dict[str, Any]:
    b, d = x.g.cumsum(0), x.h.cumsum(0)
    q = x.q * p.scale
    return {
        "q_in": q * b.exp(), "k_out": x.k * (b[-1] - b).exp(), "v_out": x.v * (d[-1] - d).exp(),
        "local": F.decay_rows(F.decay_scores(q, x.k, b, b), x.v, d, d), "grown": d.exp(),
        "rows": b[-1].exp(), "columns": d[-1].exp(),
    }  # fmt: skip


def grid_decay(S: Any, c: Any) -> Any:
    return c.rows[:, None] * S * c.columns[None, :] + c.k_out.T @ c.v_out


def grid_merge(S: Any, c: Any) -> Any:
    return (c.q_in @ S) * c.grown + c.local


def grid_recurrence(S: Any, x: Any, p: Any) -> Any:
    S = x.g.exp()[..., :, None] * S * x.h.exp()[..., None, :] + outer(x.k, x.v)
    return S, p.scale * read(x.q, S)


GRID_DECAY = LinearAttentionSpec(
    name="grid_decay",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C K <=0", "h": "C V <=0"},
    scalars={"scale": None},
    chunk_mode=grid_chunk,
    decay_mode=grid_decay,
    merge_mode=grid_merge,
    recurrence=grid_recurrence,
)


# -- a forget gate made from a raw step by two parameters of each head, an input gate, a skip


def gated_tokens(x: Any, p: Any) -> dict[str, Any]:
    return {"f": softplus(x.f + p.dt_bias), "k": x.k * x.i.sigmoid()}


def gated_chunk(x: Any, p: Any) -> dict[str, Any]:
    b = (-p.A_log.exp() * x.f).cumsum(0)
    q = x.q * p.scale
    return {
        "q_in": q * b.exp()[:, None], "k_out": x.k * (b[-1] - b).exp()[:, None], "v": x.v,
        "local": ((q @ x.k.T) * F.decay_matrix(b, b)) @ x.v + x.v * p.skip, "decay": b[-1].exp(),
    }  # fmt: skip


def gated_decay(S: Any, c: Any) -> Any:
    return c.decay * S + c.k_out.T @ c.v


def gated_merge(S: Any, c: Any) -> Any:
    return c.q_in @ S + c.local


def gated_recurrence(S: Any, x: Any, p: Any) -> Any:
    gate = -p.A_log.exp() * softplus(x.f + p.dt_bias)
    S = gate.exp()[..., None, None] * S + outer(x.k * x.i.sigmoid(), x.v)
    return S, p.scale * read(x.q, S) + p.skip * x.v


TWO_GATES = LinearAttentionSpec(
    name="two_gates",
    inputs={"q": "C K @qk", "k": "C K", "v": "C V", "f": "C", "i": "C K"},
    params={"A_log": "", "dt_bias": "", "skip": "V"},
    scalars={"scale": None},
    token_mode=gated_tokens,
    chunk_mode=gated_chunk,
    decay_mode=gated_decay,
    merge_mode=gated_merge,
    recurrence=gated_recurrence,
)

OUTSIDE = {spec.name: spec for spec in (GSA, RWKV6, DPLR, LOOKUP_DELTA, GRID_DECAY, TWO_GATES)}
