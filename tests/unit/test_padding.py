"""A chunk of padding leaves every state as it was, or the spec is refused with the fix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexla_dist.compiler.padding import prove_padding_identity
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.compiler.trace.stages import trace_spec
from flexla_dist.errors import PaddingError
from flexla_dist.spec import LinearAttentionSpec, LogScaled
from flexla_dist.spec import functional as F

from .extra_specs import EXTRA_SPECS
from .test_signs import package_specs


def prove(spec: LinearAttentionSpec) -> None:
    prove_padding_identity(trace_spec(spec), spec)


def make(
    chunk_mode: Callable[[Any, Any], Any],
    decay_mode: Callable[[Any, Any], Any],
    inputs: dict[str, str] | None = None,
    **settings: Any,
) -> LinearAttentionSpec:
    known = {"k": "C K", "v": "C V", "a": "C", "g": "C <=0", "beta": "C"}
    return LinearAttentionSpec(
        name="padded",
        inputs=inputs or known,
        chunk_mode=lambda x, p: {"v": x.v, **chunk_mode(x, p)},
        decay_mode=decay_mode,
        merge_mode=lambda S, c: c.v + 0.0 * c.v,
        params={"w": "", "u": "K"},
        scalars={"scale": 1.0},
        **settings,
    )


@pytest.mark.parametrize("spec", [*package_specs().values(), *EXTRA_SPECS.values()])
def test_package_and_extra_variants_pass(spec: LinearAttentionSpec) -> None:
    prove(spec)


def write(x: Any) -> dict[str, Any]:
    return {"write": x.k.T @ x.v}


PASSING: dict[str, LinearAttentionSpec] = {
    "sum": make(lambda x, p: write(x), lambda S, c: S + c.write),
    "subtracted": make(lambda x, p: write(x), lambda S, c: S - c.write),
    "untouched": make(lambda x, p: {}, lambda S, c: S),
    "log decay": make(
        lambda x, p: {**write(x), "d": x.g.sum(0).exp()}, lambda S, c: S * c.d + c.write
    ),
    "scaled log decay": make(
        lambda x, p: {**write(x), "d": (p.w.exp() * x.g).cumsum(0)[-1].exp()},
        lambda S, c: c.d * S + c.write,
    ),
    "one minus a gate that is padded with zero": make(
        lambda x, p: {**write(x), "d": (1 - x.a)[-1]}, lambda S, c: S * c.d + c.write
    ),
    "multiplicative, declared": make(
        lambda x, p: {**write(x), "d": x.a.log().sum(0).exp()},
        lambda S, c: S * c.d + c.write,
        padding={"a": 1.0},
    ),
    "sigmoid gate, declared": make(
        lambda x, p: {**write(x), "d": torch.sigmoid(x.a).log().sum(0).exp()},
        lambda S, c: S * c.d + c.write,
        padding={"a": math.inf},
    ),
    "dense": make(
        lambda x, p: {"M": torch.eye(x.k.shape[1]) - x.k.T @ (x.beta[:, None] * x.k), **write(x)},
        lambda S, c: c.M @ S + c.write,
    ),
    "diagonal": make(
        lambda x, p: {"d": x.g.sum(0).exp()[None].expand(x.k.shape[1]), **write(x)},
        lambda S, c: torch.diag(c.d) @ S + c.write,
    ),
    "transposed twice": make(lambda x, p: write(x), lambda S, c: (S.T + c.write.T).T),
    "delta rule": make(
        lambda x, p: {
            "T": F.unit_tril_inverse(x.beta[:, None] * (x.k @ x.k.T)), "k": x.k, "b": x.beta,
        },
        lambda S, c: S + c.k.T @ (c.T @ (c.b[:, None] * (c.v - c.k @ S))),
    ),
    "inverse of one": make(
        lambda x, p: {"T": torch.linalg.inv(torch.eye(x.k.shape[0]) + (x.k @ x.k.T).tril(-1)),
                      "k": x.k},
        lambda S, c: S + c.k.T @ (c.T @ c.v),
    ),
    "scan": make(
        lambda x, p: {"h": F.decay_scan(x.x, x.x)[-1], "d": x.x.sum(0).exp()},
        lambda S, c: S * c.d + c.h,
        inputs={"x": "C D <=0", "v": "C V"},
        state="D",
    ),
    "two states": make(
        lambda x, p: {**write(x), "k": x.k.sum(0)},
        lambda S, c: {"A": S.A + c.write, "z": S.z + c.k},
        state={"A": "K V", "z": "K"},
    ),
    "masked write": make(
        lambda x, p: {"w": torch.where(x.k > 0, x.k, 0.0).T @ x.v}, lambda S, c: S + c.w
    ),
    "divided": make(
        lambda x, p: {"w": (x.k / (x.k.sum(-1, keepdim=True) + p.u.sum())).T @ x.v},
        lambda S, c: S + c.w,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
def test_passing(name: str) -> None:
    prove(PASSING[name])


FAILING: dict[str, tuple[LinearAttentionSpec, str, str]] = {
    "multiplicative": (
        make(
            lambda x, p: {**write(x), "d": x.a.log().sum(0).exp()},
            lambda S, c: S * c.d + c.write,
        ),
        "0 everywhere",
        "padding={'a': 1.0}",
    ),
    "multiplicative, other padding stays": (
        make(
            lambda x, p: {**write(x), "d": x.a[-1]},
            lambda S, c: S * c.d + c.write,
            padding={"beta": 2.0},
        ),
        "0 everywhere",
        "padding={'beta': 2.0, 'a': 1.0}",
    ),
    "softplus": (
        make(
            lambda x, p: {**write(x), "d": (-torch.nn.functional.softplus(x.a)).sum(0).exp()},
            lambda S, c: S * c.d + c.write,
        ),
        "a different value",
        "padding={'a': -math.inf}",
    ),
    "exponential feature map": (
        make(lambda x, p: {"w": x.k.exp().T @ x.v, "z": x.k.exp().sum(0)},
             lambda S, c: {"A": S.A + c.w, "z": S.z + c.z}, state={"A": "K V", "z": "K"}),
        "next state 'z'",
        "padding={'k': -math.inf}",
    ),
    "a constant is added": (
        make(lambda x, p: {}, lambda S, c: S + 1.0), "a different value", "decay of a padded token",
    ),
    "a parameter decays": (
        make(lambda x, p: {"d": p.w.exp()}, lambda S, c: S * c.d),
        "a different value",
        "declare padding={'name': value}",
    ),
    "negated": (make(lambda x, p: {}, lambda S, c: -S), "a different value", "declare padding"),
    "replaced": (
        make(lambda x, p: write(x), lambda S, c: c.write), "0 everywhere", "declare padding",
    ),
    "nan": (
        make(lambda x, p: {"w": (x.k / x.a[:, None]).T @ x.v}, lambda S, c: S + c.w),
        "nan everywhere",
        "padding={'a': 1.0}",
    ),
    "swapped states": (
        make(lambda x, p: {}, lambda S, c: {"A": S.B, "B": S.A}, state={"A": "K V", "B": "K V"}),
        "the entering state 'B'",
        "declare padding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_failing(name: str) -> None:
    spec, got, fix = FAILING[name]
    with pytest.raises(PaddingError) as caught:
        prove(spec)
    message = str(caught.value)
    assert got in message and fix in message, message
    assert "padded.decay_mode" in message and "expected the entering state" in message
    assert "test_padding.py" in message


def test_the_suggested_padding_is_right() -> None:
    """A multiplicative decay fails with the default and passes with what the message says."""
    spec, _, _ = FAILING["multiplicative"]
    with pytest.raises(PaddingError):
        compile_graphs(spec)
    prove(make(lambda x, p: {**write(x), "d": x.a.log().sum(0).exp()},
               lambda S, c: S * c.d + c.write, padding={"a": 1.0}))  # fmt: skip


def test_line_of_the_operation_that_loses_the_state() -> None:
    def decay_mode(S: Any, c: Any) -> Any:
        kept = S * c.d
        return kept + c.write

    spec = make(lambda x, p: {**write(x), "d": x.a[-1]}, decay_mode)
    with pytest.raises(PaddingError) as caught:
        prove(spec)
    assert "kept = S * c.d" in str(caught.value) and "in decay_mode" in str(caught.value)
    assert "Padded tokens have k = 0, v = 0, a = 0" in str(caught.value)


def log_scaled(decay: Callable[[Any], Any], **settings: Any) -> LinearAttentionSpec:
    def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
        mu = x.i.amax(0)
        return {"b": decay(x), "mu": mu, "w": (x.k * (x.i - mu).exp()[:, None]).T @ x.v}

    return make(
        chunk_mode,
        lambda S, c: S * c.carry + c.fresh * c.w,
        inputs={"k": "C K", "v": "C V", "i": "C", "f": "C <=0", "a": "C"},
        log_scaled=LogScaled(decay="b", weight="mu"),
        **settings,
    )


def test_log_scaled_states() -> None:
    prove(log_scaled(lambda x: x.f.sum(0)))
    prove(log_scaled(lambda x: x.f.sum(0), padding={"i": -1e30}))
    with pytest.raises(PaddingError, match="log decay 'b' is -inf everywhere"):
        prove(log_scaled(lambda x: x.a.log().sum(0) + 0.0 * x.f.sum(0), padding={"a": 0.0}))
    with pytest.raises(PaddingError, match="expected 0"):
        prove(log_scaled(lambda x: x.f.sum(0) - 1.0))
