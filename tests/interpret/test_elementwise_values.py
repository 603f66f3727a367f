"""Values that a variant computes by itself: what lies beyond a dim's size never gets into results,
sizes may be used as numbers, and powers and tanh are those of PyTorch.

Kernels in the interpreter against the torch executor in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist import LinearAttentionSpec, compile

T, CHUNK, H = 32, 16, 1
Value = Callable[[Any], Tensor]


def spec_of(value: Value) -> LinearAttentionSpec:
    """A variant whose keys go through `value`, which is summed over K and over tokens."""
    return LinearAttentionSpec(
        "valued",
        inputs={"q": "C K", "k": "C K", "v": "C V"},
        chunk_mode=lambda x, p: {"q": x.q, "w": value(x.k), "k": x.k, "v": x.v},
        decay_mode=lambda S, c: S + c.k.T @ c.v,
        merge_mode=lambda S, c: c.w @ S + (c.q @ c.w.T).tril() @ c.v,
    )


def results(spec: LinearAttentionSpec, K: int, executor: str, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)

    def make(width: int) -> Tensor:
        x = torch.randn(1, T, H, width, generator=g)
        x = x + 0.3 * x.sign()  # away from zero, where quotients have their poles
        return x.to(dtype).requires_grad_()

    inputs = {"q": make(K), "k": make(K), "v": make(5)}
    out, _ = compile(spec, executor=executor, chunk_size=CHUNK, check=False)(**inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(inputs.values()))]


def check(value: Value, K: int, bound: float = 1e-5) -> None:
    spec = spec_of(value)
    got = results(spec, K, "triton", torch.float32)
    for x, y in zip(got, results(spec, K, "torch", torch.float64), strict=True):
        assert bool(x.isfinite().all())
        assert float((x.double() - y).norm()) <= bound * float(y.norm())


PADDED: dict[str, Value] = {
    "quotient": lambda k: k / k.abs(),
    "quotient by the largest": lambda k: k / k.abs().amax(0),
    "inverse": lambda k: 1 / k,
    "logarithm": lambda k: k.abs().log(),
    "rsqrt": lambda k: k * (k * k).rsqrt(),
    "sqrt of a sum": lambda k: ((k @ k.T).tril() @ k).abs().sqrt(),
    "negative power": lambda k: k.abs() ** -1.5,
    "zero times infinity": lambda k: k * (1 / k) * k,
}


@pytest.mark.parametrize("K", [5, 24])
@pytest.mark.parametrize("name", PADDED)
def test_nothing_comes_from_beyond_the_size(name: str, K: int) -> None:
    check(PADDED[name], K)


SIZES: dict[str, Value] = {
    "K as a number": lambda k: k * k.shape[-1] ** -0.5,
    "C as a number": lambda k: k / k.shape[0],
    "mean over K": lambda k: k - k.mean(-1, keepdim=True),
    "positions": lambda k: k * (torch.arange(k.shape[0]) / k.shape[0])[:, None],
    "of products": lambda k: k * (k @ k.T).tril().sum() / k.shape[0],
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_numbers(name: str) -> None:
    check(SIZES[name], 12)


@pytest.mark.parametrize("exponent", [-5, -4, -1, 0, 1, 5, 6, 7, 21, 66, 67])
def test_whole_powers_of_negative_values(exponent: int) -> None:
    check(lambda k: (k * 0.3) ** exponent + k, 16)


def test_tanh_is_exact_near_zero() -> None:
    check(lambda k: (k * 1e-5).tanh() * 1e5, 16, 2e-6)
    check(lambda k: (k * 2).tanh() + k.tanh(), 16)


def test_squares_beside_other_products() -> None:
    """Their gradient adds one value twice."""
    check(lambda k: k * k.sigmoid() + k * k * 0.5 - (k * k).exp() * 0.01, 16)
