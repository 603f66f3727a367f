"""Variants that the package does not have, as a user would write them."""

from __future__ import annotations

from typing import Any

import torch

from flexla_dist.spec import LinearAttentionSpec, LogScaled
from flexla_dist.spec import functional as F


def outer(a: Any, b: Any) -> Any:
    return a[..., :, None] * b[..., None, :]


def read(q: Any, S: Any) -> Any:
    return (q[..., :, None] * S).sum(-2)


# -- mLSTM (arXiv 2405.04517): exponential input gates, log-scaled states


def mlstm_chunk(x: Any, p: Any) -> dict[str, Any]:
    b, q = x.f.cumsum(0), x.q * p.scale
    at_end = b[-1] - b + x.i
    mu = at_end.amax(0)
    weights = b[:, None] - b[None, :] + x.i[None, :]
    masked = torch.where(torch.ones_like(weights).tril() > 0, weights, -torch.inf)
    top = masked.amax(-1)
    scores = (q @ x.k.T) * (masked - top[:, None]).exp()
    return {
        "q": q, "b": b, "top": top, "local": scores @ x.v, "weight": scores.sum(-1), "v": x.v,
        "k_out": x.k * (at_end - mu).exp()[:, None], "b_total": b[-1], "mu": mu,
    }  # fmt: skip


def mlstm_decay(S: Any, c: Any) -> dict[str, Any]:
    return {
        "S": S.S * c.carry + c.fresh * (c.k_out.T @ c.v),
        "z": S.z * c.carry + c.fresh * c.k_out.sum(0),
    }


def mlstm_merge(S: Any, c: Any) -> Any:
    level = torch.maximum(c.m + c.b, c.top)
    old, new = (c.m + c.b - level).exp(), (c.top - level).exp()
    weight = old * (c.q @ S.z) + new * c.weight
    total = old[:, None] * (c.q @ S.S) + new[:, None] * c.local
    return total / torch.maximum(weight.abs(), (-level).clamp_max(80.0).exp())[:, None]


def mlstm_recurrence(S: Any, x: Any, p: Any) -> Any:
    f, i = x.f.exp()[..., None], x.i.exp()[..., None]
    state, z = f[..., None] * S.S + outer(i * x.k, x.v), f * S.z + i * x.k
    weight = p.scale * (x.q * z).sum(-1, keepdim=True)
    return {"S": state, "z": z}, p.scale * read(x.q, state) / weight.abs().clamp_min(1.0)


MLSTM = LinearAttentionSpec(
    name="mlstm",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "i": "C", "f": "C <=0"},
    scalars={"scale": None},
    state={"S": "K V", "z": "K"},
    padding={"i": -1e30},
    log_scaled=LogScaled(decay="b_total", weight="mu"),
    chunk_mode=mlstm_chunk,
    decay_mode=mlstm_decay,
    merge_mode=mlstm_merge,
    recurrence=mlstm_recurrence,
)


# -- GSA (arXiv 2409.07146): two passes with a softmax between, two states


def gsa_chunk(x: Any, p: Any) -> dict[str, Any]:
    b, q = x.g.cumsum(0), x.q * p.scale
    weights = (q @ x.k.T).tril()
    return {
        "q": q, "k": x.k, "s": x.s, "v": x.v, "b": b, "grown": b.exp(), "total": b[-1].exp(),
        "s_out": x.s * (b[-1] - b).exp(), "slots": F.decay_rows(weights, x.s, b, b),
    }  # fmt: skip


def gsa_decay(S: Any, c: Any) -> dict[str, Any]:
    return {
        "slot_keys": S.slot_keys * c.total[None, :] + c.k.T @ c.s_out,
        "slot_values": S.slot_values * c.total[:, None] + c.s_out.T @ c.v,
    }


def gsa_merge(S: Any, c: Any) -> Any:
    slots = torch.softmax((c.q @ S.slot_keys) * c.grown + c.slots, -1)
    return (slots * c.grown) @ S.slot_values + F.decay_scores(slots, c.s, c.b, c.b) @ c.v


def gsa_recurrence(S: Any, x: Any, p: Any) -> Any:
    decay = x.g.exp()
    keys = decay[..., None, :] * S.slot_keys + outer(x.k, x.s)
    values = decay[..., :, None] * S.slot_values + outer(x.s, x.v)
    slots = torch.softmax(p.scale * read(x.q, keys), -1)
    return {"slot_keys": keys, "slot_values": values}, read(slots, values)


GSA = LinearAttentionSpec(
    name="gsa",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "s": "C M", "g": "C M <=0"},
    scalars={"scale": None},
    state={"slot_keys": "K M", "slot_values": "M V"},
    chunk_mode=gsa_chunk,
    decay_mode=gsa_decay,
    merge_mode=gsa_merge,
    recurrence=gsa_recurrence,
)


# -- RWKV6 (arXiv 2404.05892): the current token is weighted by a learned bonus u, not decayed


def rwkv6_chunk(x: Any, p: Any) -> dict[str, Any]:
    b = x.g.cumsum(0)
    before, q = b - x.g, x.q * p.scale
    bonus = (q * p.u * x.k).sum(-1)[:, None] * x.v
    return {
        "q_in": q * before.exp(), "k_out": x.k * (b[-1] - b).exp(), "v": x.v,
        "local": F.decay_scores(q, x.k, before, b, strict=True) @ x.v + bonus,
        "decay": b[-1].exp(),
    }  # fmt: skip


def rwkv6_decay(S: Any, c: Any) -> Any:
    return c.decay[:, None] * S + c.k_out.T @ c.v


def rwkv6_merge(S: Any, c: Any) -> Any:
    return c.q_in @ S + c.local


def rwkv6_recurrence(S: Any, x: Any, p: Any) -> Any:
    write = outer(x.k, x.v)
    return x.g.exp()[..., None] * S + write, p.scale * read(x.q, S + p.u[..., None] * write)


RWKV6 = LinearAttentionSpec(
    name="rwkv6",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C K <=0"},
    params={"u": "K"},
    scalars={"scale": None},
    chunk_mode=rwkv6_chunk,
    decay_mode=rwkv6_decay,
    merge_mode=rwkv6_merge,
    recurrence=rwkv6_recurrence,
)


# -- DPLR, as in RWKV7 (arXiv 2503.14456): S_t = (diag(exp g_t) + b_t a_t') S_{t-1} + k_t v_t'


def dplr_chunk(x: Any, p: Any) -> dict[str, Any]:
    g, q = x.g.cumsum(0), x.q * p.scale
    before, out = g - x.g, (g[-1] - g).exp()
    T = F.unit_tril_inverse(-F.decay_scores(x.a, x.b, before, g, strict=True))
    return {
        "U": T @ (F.decay_scores(x.a, x.k, before, g, strict=True) @ x.v),
        "W": T @ (x.a * before.exp()),
        "q_in": q * g.exp(), "k_out": x.k * out, "b_out": x.b * out, "decay": g[-1].exp(),
        "local": F.decay_scores(q, x.k, g, g) @ x.v, "scores": F.decay_scores(q, x.b, g, g),
        "v": x.v,
    }  # fmt: skip


def dplr_decay(S: Any, c: Any) -> Any:
    return c.decay[:, None] * S + c.k_out.T @ c.v + c.b_out.T @ (c.U + c.W @ S)


def dplr_merge(S: Any, c: Any) -> Any:
    return c.q_in @ S + c.local + c.scores @ (c.U + c.W @ S)


def dplr_recurrence(S: Any, x: Any, p: Any) -> Any:
    S = x.g.exp()[..., None] * S + outer(x.b, read(x.a, S)) + outer(x.k, x.v)
    return S, p.scale * read(x.q, S)


DPLR = LinearAttentionSpec(
    name="dplr",
    inputs={
        "q": "C K @qk",
        "k": "C K @qk",
        "v": "C V",
        "a": "C K",
        "b": "C K",
        "g": "C K <=0",
    },
    scalars={"scale": None},
    chunk_mode=dplr_chunk,
    decay_mode=dplr_decay,
    merge_mode=dplr_merge,
    recurrence=dplr_recurrence,
)

EXTRA_SPECS = {spec.name: spec for spec in (MLSTM, GSA, RWKV6, DPLR)}
