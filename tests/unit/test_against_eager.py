"""Specs with unusual names and spellings: compiled, they give what their callables give eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexla_dist
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec.chunked import run_chunks

SIZES = {"C": 20, "K": 3, "V": 4}
QKV = {"q": "C K", "k": "C K", "v": "C V"}
Stage = Callable[..., Any]


def spec_of(chunk_mode: Stage, **changes: Any) -> LinearAttentionSpec:
    settings: dict[str, Any] = {
        "name": "unusual",
        "inputs": QKV,
        "chunk_mode": chunk_mode,
        "decay_mode": lambda S, c: S + c.k.T @ c.v,
        "merge_mode": lambda S, c: c.q @ S + (c.q @ c.k.T).tril() @ c.v,
        **changes,
    }
    return LinearAttentionSpec(**settings)


def tensors(spec: LinearAttentionSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of one head and parameters, float64, as leaves."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    inputs = {
        name: draw(1, SIZES["C"], 1, *(SIZES[d] for d in item.dims[1:]))
        for name, item in spec.input_specs.items()
    }
    params = {
        name: draw(1, *(SIZES[d] for d in item.dims)) for name, item in spec.param_specs.items()
    }
    return inputs, params


def measured(call: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    """Output and gradients of the leaves."""
    output = call()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [output.detach(), *zeros]


def check(
    spec: LinearAttentionSpec, given: dict[str, list[float]] | None = None, **scalars: float
) -> None:
    """Output and every gradient, of 20 tokens in chunks of 16; `given` are the first numbers of
    inputs and parameters."""
    inputs, params = tensors(spec)
    for name, numbers in (given or {}).items():
        with torch.no_grad():
            flat = {**inputs, **params}[name].view(-1)
            flat[: len(numbers)] = torch.tensor(numbers, dtype=flat.dtype)
    leaves = (*inputs.values(), *params.values())
    op = flexla_dist.compile(spec, executor="torch", chunk_size=16)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of the constants that callables make
    try:
        expected = measured(
            lambda: run_chunks(spec, inputs, params, scalars, chunk_size=16)[0], *leaves
        )
    finally:
        torch.set_default_dtype(previous)
    got = measured(lambda: op(**inputs, **params, **scalars)[0], *leaves)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, equal_nan=True)


# -- names that torch.fx spells alike -------------------------------------------------------------

ALIKE = [("A", "a"), ("a", "A"), ("K", "k"), ("qK", "q_k"), ("KeyT", "key_t"), ("k", "k_1")]


@pytest.mark.parametrize("names", ALIKE, ids="-".join)
def test_inputs_whose_names_differ_in_case_or_underscores(names: tuple[str, str]) -> None:
    first, second = names

    def chunk_mode(x: Any, p: Any) -> Any:
        return {"q": x[first], "k": x[second] * 2.0, "v": x.v}

    check(spec_of(chunk_mode, inputs={first: "C K", second: "C K", "v": "C V"}))


def test_params_and_inputs_whose_names_differ_in_case() -> None:
    def chunk_mode(x: Any, p: Any) -> Any:
        return {"q": x.q * p.U * p.Q, "k": x.k * p.u, "v": x.v}

    check(spec_of(chunk_mode, params={"U": "K", "u": "K", "Q": "K"}))


def test_states_whose_names_differ_in_case() -> None:
    def decay_mode(S: Any, c: Any) -> Any:
        return {"A": S.A + c.k.T @ c.v, "a": S.a + c.q.T @ c.v}

    def merge_mode(S: Any, c: Any) -> Any:
        return c.q @ S.a + 2.0 * (c.k @ S.A)

    for state in ({"A": "K V", "a": "K V"}, {"a": "K V", "A": "K V"}):
        check(
            spec_of(
                lambda x, p: {"q": x.q, "k": x.k, "v": x.v},
                state=state,
                decay_mode=decay_mode,
                merge_mode=merge_mode,
            )
        )


# -- masks as numbers -----------------------------------------------------------------------------

MASKS: dict[str, Stage] = {
    "keys": lambda x, p: {"q": x.q, "k": (x.k > 0).double(), "v": x.v},
    "a column": lambda x, p: {"q": x.q, "k": (x.k[:, :1] > 0) * torch.ones_like(x.k), "v": x.v},
    "values": lambda x, p: {"q": x.q, "k": x.k, "v": (x.v > 0.2).double() - (x.v < -0.2).double()},
    "product": lambda x, p: {"q": x.q @ ((x.k > 0).double().T @ x.k), "k": x.k, "v": x.v},
    "scaled": lambda x, p: {"q": x.q, "k": torch.where(x.k > 0, 2.0, -0.5), "v": x.v},
}


@pytest.mark.parametrize("name", MASKS)
def test_transposed_masks(name: str) -> None:
    check(spec_of(MASKS[name]))


# -- powers ---------------------------------------------------------------------------------------

POWERS: dict[str, Stage] = {
    "of a value": lambda x, p: x.q.abs() ** p.u,
    "of a number": lambda x, p: 1.5**x.q,
    "of zero": lambda x, p: 0.0 ** x.q.abs(),
    "constant": lambda x, p: x.q**2 + x.q**3.0 + x.q**1 + x.q**0 + x.q**True,
    "large": lambda x, p: x.q**5 + x.q**8 + (x.q.abs() + 1) ** -7 + x.q**11.0,
    "constant tensor": lambda x, p: x.q ** torch.tensor(3.0),
    "of a mask": lambda x, p: (x.q > 0) ** p.u,
    "of a softplus": lambda x, p: torch.nn.functional.softplus(x.q) ** p.scale,
    "of a position": lambda x, p: torch.arange(x.q.shape[0])[:, None] ** p.u.abs(),
}


@pytest.mark.filterwarnings("ignore::flexla_dist.errors.NumericsWarning")
@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize("powers", [[2.0, 1.0, 0.0], [0.5, 1.5, 3.5]], ids=str)
def test_powers_are_those_of_torch(name: str, powers: list[float]) -> None:
    """Also at zero, values and gradients."""

    def chunk_mode(x: Any, p: Any) -> Any:
        return {"q": POWERS[name](x, p), "k": x.k, "v": x.v}

    spec = spec_of(chunk_mode, params={"u": "K"}, scalars={"scale": 0.3})
    check(spec, {"q": [0.0, 0.0, 0.0, 0.0, -1.0, 2.0], "u": powers}, scale=1.7)
