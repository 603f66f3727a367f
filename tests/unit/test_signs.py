"""Every exponential is proved not to overflow, or the user is told which one may."""

from __future__ import annotations

import importlib
import linecache
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as tnf

import flexla_dist
from flexla_dist.compiler.exponents import ordered
from flexla_dist.compiler.forms import FIRST, LAST, Bound
from flexla_dist.compiler.pipeline import FORWARD_PASSES, run_passes
from flexla_dist.compiler.signs import SignFact, analyse_signs
from flexla_dist.compiler.trace.stages import trace_spec
from flexla_dist.errors import NumericsError, NumericsWarning
from flexla_dist.spec import LinearAttentionSpec, variants
from flexla_dist.spec import functional as F

from .cells import spec_of
from .extra_specs import EXTRA_SPECS

Expression = Callable[[Any, Any], Any]


def facts_of(spec: LinearAttentionSpec, strict: bool = False) -> tuple[SignFact, ...]:
    cell = run_passes(trace_spec(spec), FORWARD_PASSES, [])
    return analyse_signs(cell, spec, strict)


def package_specs() -> dict[str, LinearAttentionSpec]:
    found = {}
    for module in pkgutil.iter_modules(variants.__path__):
        spec = getattr(importlib.import_module(f"{variants.__name__}.{module.name}"), "SPEC", None)
        if spec is not None:
            found[spec.name] = spec
    return found


@pytest.mark.parametrize("spec", [*package_specs().values(), *EXTRA_SPECS.values()])
def test_package_and_extra_variants_are_safe(spec: LinearAttentionSpec) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        facts = facts_of(spec, strict=True)
    assert all(fact.proved for fact in facts)


# -- what is proved -------------------------------------------------------------------------------


def b_of(x: Any) -> Any:
    return x.g.cumsum(0)


def rows_and_cols(x: Any) -> tuple[Any, Any]:
    at = torch.arange(x.q.shape[0])
    return at[:, None], at[None, :]


def mlstm_scores(x: Any, p: Any) -> Any:
    b = b_of(x)
    i, j = rows_and_cols(x)
    weights = torch.where(i >= j, b[:, None] - b[None, :] + x.w[None, :], -torch.inf)
    top = torch.maximum(weights.amax(-1), b + x.beta)
    return (weights - top[:, None]).exp().sum(-1) + (b + x.beta - top).exp()


SAFE: dict[str, Expression] = {
    "declared": lambda x, p: x.g.exp(),
    "running sum": lambda x, p: b_of(x).exp(),
    "last": lambda x, p: b_of(x)[-1].exp(),
    "total": lambda x, p: x.g.sum(0).exp(),
    "to the end": lambda x, p: (b_of(x)[-1] - b_of(x)).exp(),
    "to the end, slice": lambda x, p: (b_of(x)[-1:] - b_of(x)).exp(),
    "to the end, sum": lambda x, p: (x.g.sum() - b_of(x)).exp(),
    "to the end, negated": lambda x, p: torch.exp(-(b_of(x) - b_of(x)[-1])),
    "from the first": lambda x, p: (b_of(x) - b_of(x)[0]).exp(),
    "first to last": lambda x, p: (b_of(x)[-1] - b_of(x)[0]).exp(),
    "exclusive": lambda x, p: (b_of(x) - x.g).exp(),
    "exclusive, to the end": lambda x, p: (b_of(x)[-1] - (b_of(x) - x.g)).exp(),
    "reversed sum": lambda x, p: (x.g.sum(0) - x.g.cumsum(0) + x.g).exp(),
    "vector": lambda x, p: (x.gk.cumsum(0)[-1] - x.gk.cumsum(0)).exp(),
    "vector and scalar": lambda x, p: (x.gk.cumsum(0) + b_of(x)[:, None]).exp(),
    "half": lambda x, p: (0.5 * b_of(x)).exp(),
    "base two": lambda x, p: torch.exp2(b_of(x)[-1] - b_of(x)),
    "softplus": lambda x, p: (-tnf.softplus(x.beta)).exp(),
    "mamba": lambda x, p: (-p.a.exp() * tnf.softplus(x.beta)).cumsum(0).exp(),
    "mamba, to the end": lambda x, p: mamba(x, p),
    "logsigmoid": lambda x, p: (tnf.logsigmoid(x.beta) / 16).cumsum(0).exp(),
    "log of sigmoid": lambda x, p: torch.sigmoid(x.beta).log().cumsum(0).exp(),
    "minus absolute": lambda x, p: (-x.beta.abs()).cumsum(0).exp(),
    "minus square": lambda x, p: (-(x.beta**2)).exp(),
    "minus square, product": lambda x, p: (-x.beta * x.beta).exp(),
    "minus relu": lambda x, p: (-tnf.relu(x.beta)).exp(),
    "clamped": lambda x, p: x.beta.clamp(max=0).exp(),
    "clamped to a bound": lambda x, p: x.beta.clamp(max=60.0).exp(),
    "minimum": lambda x, p: torch.minimum(x.beta, x.g).exp(),
    "where": lambda x, p: torch.where(x.beta > 0, x.g, x.g * 2).exp(),
    "elu + 1": lambda x, p: tnf.elu(x.beta) + 1,
    "less its maximum": lambda x, p: (x.q - x.q.amax(-1, keepdim=True)).exp(),
    "less its maximum, detached": lambda x, p: (x.q - x.q.amax(-1, True).detach()).exp(),
    "less max": lambda x, p: (x.q - x.q.max(-1, keepdim=True).values).exp(),
    "softmax": lambda x, p: torch.softmax(x.q @ x.k.T, -1),
    "less a larger": lambda x, p: (x.beta - torch.maximum(x.beta, x.w)).exp(),
    "less the larger of three": lambda x, p: (
        x.w - torch.maximum(torch.maximum(x.beta, x.w), x.g)
    ).exp(),
    "mlstm": mlstm_scores,
    "masked exponent": lambda x, p: masked(x, x.beta),
    "tril of a difference": lambda x, p: torch.tril(b_of(x)[:, None] - b_of(x)[None, :]).exp(),
    "plain decay": lambda x, p: torch.tril((b_of(x)[:, None] - b_of(x)[None, :]).exp()),
    "factored decay": lambda x, p: torch.tril(
        (x.q * x.gk.cumsum(0).exp()) @ (x.k * (-x.gk.cumsum(0)).exp()).T
    ),
    "matrix": lambda x, p: F.decay_matrix(b_of(x), b_of(x)),
    "strict, exclusive": lambda x, p: F.decay_matrix(b_of(x) - x.g, b_of(x), strict=True),
    "scores": lambda x, p: F.decay_scores(x.q, x.k, x.gk.cumsum(0), x.gk.cumsum(0)),
    "scan": lambda x, p: F.decay_scan(x.gd, x.x),
    "parameter": lambda x, p: x.v * p.a.exp(),
}  # fmt: skip


def mamba(x: Any, p: Any) -> Any:
    b = (-p.a.exp() * tnf.softplus(x.beta)).cumsum(0)
    return (b[-1] - b).exp()


def masked(x: Any, extra: Any) -> Any:
    """A cross term that only the mask makes safe: inside it is a decay."""
    b = b_of(x)
    i, j = rows_and_cols(x)
    later = torch.where(i >= j, b[:, None] - b[None, :] - extra.abs()[:, None], -1e30)
    return later.exp()


@pytest.mark.parametrize("name", SAFE)
def test_safe(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        facts = facts_of(spec_of(SAFE[name]))
    assert facts or name == "factored decay"


# -- what is not ----------------------------------------------------------------------------------

UNSAFE: dict[str, tuple[Expression, str]] = {
    "undeclared": (lambda x, p: x.beta.cumsum(0).exp(), "declare it"),
    "positive": (lambda x, p: (-b_of(x)).exp(), "differences before exp"),
    "from the start": (lambda x, p: (b_of(x) - b_of(x)[-1]).exp(), "differences before exp"),
    "unmasked pairs": (lambda x, p: (b_of(x)[:, None] - b_of(x)[None]).exp(), "mask the exponent"),
    "upper triangle": (
        lambda x, p: torch.triu((b_of(x)[:, None] - b_of(x)[None]).exp(), 1),
        "mask the exponent",
    ),
    "selected afterwards": (
        lambda x, p: torch.where(x.beta > 0, (-x.beta).exp(), 0.0),
        "declare it",
    ),
    "factored without a mask": (
        lambda x, p: (x.q * b_of(x).exp()[:, None]) @ (x.k * (-b_of(x)).exp()[:, None]).T,
        "differences before exp",
    ),
    "exclusive with the diagonal": (
        lambda x, p: F.decay_matrix(b_of(x) - x.g, b_of(x)),
        "maximum",
    ),
    "feature map": (lambda x, p: x.q.exp(), "declare it"),
    "multiplied by something small": (lambda x, p: (-b_of(x)).exp() * b_of(x).exp(), "before exp"),
    "scaled by an unknown": (lambda x, p: (p.scale * b_of(x)).exp(), "exp"),
    "one of two": (lambda x, p: torch.maximum(x.g, x.beta).exp(), "clamp"),
    "less a maximum of others": (lambda x, p: (x.beta - x.w.amax(0)).exp(), "maximum"),
    "scan": (lambda x, p: F.decay_scan(x.x, x.x), "declare it"),
    "scores": (lambda x, p: F.decay_scores(x.q, x.k, x.q, x.q), "declare it"),
    "expm1": (lambda x, p: torch.expm1(x.beta), "declare it"),
    "clamped too high": (lambda x, p: x.beta.clamp(max=100.0).exp(), "clamp"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe(name: str) -> None:
    expression, fix = UNSAFE[name]
    with pytest.warns(NumericsWarning) as caught:
        facts = facts_of(spec_of(expression))
    assert not all(fact.proved for fact in facts)
    message = str(caught[0].message)
    assert "example.chunk_mode" in message and "can overflow" in message and fix in message
    assert "test_signs.py:" in message
    with pytest.raises(NumericsError, match="can overflow"):
        facts_of(spec_of(expression), strict=True)


def test_the_message_shows_line_and_exponent() -> None:
    def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
        b = x.g.cumsum(0)
        grown = torch.exp(-b)
        return {"value": x.v * grown[:, None], "v": x.v}

    with pytest.warns(NumericsWarning) as caught:
        facts_of(spec_of(lambda x, p: 0, chunk_mode=chunk_mode))
    message = str(caught[0].message)
    assert "exp of -cumsum(g)[C] can overflow" in message
    assert "grown = torch.exp(-b)" in message and "in chunk_mode" in message


def test_a_spec_is_warned_of_once_at_the_callers_line() -> None:
    def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
        grown = torch.exp(-x.g.cumsum(0))
        return {"value": x.v * grown[:, None] * torch.exp(x.beta)[:, None], "v": x.v}

    spec = spec_of(lambda x, p: 0, chunk_mode=chunk_mode)
    with pytest.warns(NumericsWarning) as caught:
        flexla_dist.compile(spec)
    (warning,) = caught
    assert warning.filename == __file__
    assert "flexla_dist.compile(spec)" in linecache.getline(__file__, warning.lineno)
    text = str(warning.message)
    assert "exp of -cumsum(g)[C]" in text and "and 1 more" in text
    assert text.count("test_signs.py:") == 2


def test_the_plain_triangle_is_the_reason() -> None:
    """A plain masked exponential is finite with a NaN gradient; the rewritten one is not."""
    g = torch.full((64,), -50.0, requires_grad=True)
    b = g.cumsum(0)
    torch.tril((b[:, None] - b[None, :]).exp()).sum().backward()
    assert not torch.isfinite(g.grad).all()
    g.grad = None
    F.decay_matrix(g.cumsum(0), g.cumsum(0)).sum().backward()
    assert torch.isfinite(g.grad).all()


# -- order of places ------------------------------------------------------------------------------


def test_order_of_places() -> None:
    row, col, before = (0, 0), (1, 0), (0, -1)
    assert ordered({(LAST, 0): 1.0, row: -1.0}, ())
    assert not ordered({(LAST, 0): -1.0, row: 1.0}, ())
    assert ordered({row: 1.0, (FIRST, 0): -1.0}, ())
    assert not ordered({row: 1.0, col: -1.0}, ())
    assert ordered({row: 1.0, col: -1.0}, (Bound(0, 1, 0),))
    assert not ordered({before: 1.0, col: -1.0}, (Bound(0, 1, 0),))
    assert ordered({before: 1.0, col: -1.0}, (Bound(0, 1, 1),))
    assert ordered({row: 2.0, col: -1.0}, (Bound(0, 1, 0),))
    assert not ordered({row: 1.0, col: -2.0}, (Bound(0, 1, 0),))


def test_facts_print() -> None:
    shown = [str(fact) for fact in facts_of(spec_of(SAFE["to the end"]))]
    assert len(shown) == 1
    assert shown[0].startswith("exp(cumsum(g)[last] - cumsum(g)[C]): exponent <= 0   # chunk_mode")
