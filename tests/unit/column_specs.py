"""Specs that mix the columns of the output, each in another way."""

from __future__ import annotations

from typing import Any

import torch

from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec import functional as F
from flexla_dist.spec.variants import get_variant

from .extra_specs import GSA, outer, read

INPUTS = {"q": "C K @qk", "k": "C K @qk", "v": "C V"}


def plain_chunk(x: Any, p: Any) -> dict[str, Any]:
    q = x.q * p.scale
    return {"q_in": q, "k": x.k, "v": x.v, "local": (q @ x.k.T).tril() @ x.v}


def plain_decay(S: Any, c: Any) -> Any:
    return S + c.k.T @ c.v


# -- outputs over the root of their mean square


def rms_merge(S: Any, c: Any) -> Any:
    o = c.q_in @ S + c.local
    return o * torch.rsqrt((o * o).sum(-1) + 1e-2)[:, None]


def rms_recurrence(S: Any, x: Any, p: Any) -> Any:
    S = S + outer(x.k, x.v)
    o = p.scale * read(x.q, S)
    return S, o * torch.rsqrt((o * o).sum(-1, keepdim=True) + 1e-2)


RMS_OUTPUT = LinearAttentionSpec(
    name="rms_output",
    inputs=INPUTS,
    scalars={"scale": None},
    chunk_mode=plain_chunk,
    decay_mode=plain_decay,
    merge_mode=rms_merge,
    recurrence=rms_recurrence,
)


# -- a softmax over the columns of the output: a largest value does not add up over tiles


def softmax_merge(S: Any, c: Any) -> Any:
    return torch.softmax(c.q_in @ S + c.local, -1)


def softmax_recurrence(S: Any, x: Any, p: Any) -> Any:
    S = S + outer(x.k, x.v)
    return S, torch.softmax(p.scale * read(x.q, S), -1)


SOFTMAX_OUTPUT = LinearAttentionSpec(
    name="softmax_output",
    inputs=INPUTS,
    scalars={"scale": None},
    chunk_mode=plain_chunk,
    decay_mode=plain_decay,
    merge_mode=softmax_merge,
    recurrence=softmax_recurrence,
)


# -- a decay made of the values: before every scan the gates need a sum over columns


def value_gate(x: Any) -> Any:
    return -0.05 * (x.v * x.v).sum(-1)


def gated_chunk(x: Any, p: Any) -> dict[str, Any]:
    b = value_gate(x).cumsum(0)
    q = x.q * p.scale
    scores = (q @ x.k.T) * F.decay_matrix(b, b)
    return {
        "q_in": q * b.exp()[:, None], "k_out": x.k * (b[-1] - b).exp()[:, None], "v": x.v,
        "local": scores @ x.v, "decay": b[-1].exp(),
    }  # fmt: skip


def gated_decay(S: Any, c: Any) -> Any:
    return c.decay * S + c.k_out.T @ c.v


def gated_merge(S: Any, c: Any) -> Any:
    return c.q_in @ S + c.local


def gated_recurrence(S: Any, x: Any, p: Any) -> Any:
    S = value_gate(x).exp()[..., None, None] * S + outer(x.k, x.v)
    return S, p.scale * read(x.q, S)


VALUE_GATE = LinearAttentionSpec(
    name="value_gate",
    inputs=INPUTS,
    scalars={"scale": None},
    chunk_mode=gated_chunk,
    decay_mode=gated_decay,
    merge_mode=gated_merge,
    recurrence=gated_recurrence,
)


COLUMN_SPECS = {
    spec.name: spec
    for spec in (
        get_variant("linear_attn_normalized"),
        GSA,
        RMS_OUTPUT,
        SOFTMAX_OUTPUT,
        VALUE_GATE,
    )
}
