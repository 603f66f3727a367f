"""Common factors of the terms of a sum are multiplied once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import Sizes
from flexla_dist.compiler.passes import factors, simplify
from flexla_dist.compiler.passes.engine import rewrite

from .compiled import graphs_of

SIZES = {"C": 5, "K": 3, "1": 1}
DIMS = {"q": ("C", "K"), "k": ("C", "K"), "x": ("C", "K"), "y": ("C", "K"), "w": ("C", "1")}
Build = Callable[..., fx.Node]


def mul(b: Builder, *of: Any) -> Any:
    first, *others = of
    for x in others:
        first = b.emit(ops.mul, first, x)
    return first


def cell_of(build: Build) -> Cell:
    b = Builder()
    return b.finish(
        {"value": build(b, **{n: b.placeholder(n, dims, "input") for n, dims in DIMS.items()})}
    )


def run(cell: Cell) -> Tensor:
    g = torch.Generator().manual_seed(0)
    known: dict[str, Any] = {"sizes": Sizes(SIZES, torch.device("cpu"), torch.float64)}
    for name, dims in DIMS.items():
        known[name] = torch.randn([SIZES[d] for d in dims], generator=g, dtype=torch.float64)
    return fx.GraphModule({}, cell.graph)(*(known[name] for name in cell.placeholders))["value"]


def rewritten(build: Build) -> tuple[Cell, int]:
    """The new cell and how many products it has."""
    before = cell_of(build)
    after, _ = rewrite(before, factors.RULES + simplify.RULES)
    assert torch.allclose(run(after), run(before), rtol=1e-12, atol=1e-12)
    return after, sum(node.target is ops.mul for node in after.calls)


def test_two_terms() -> None:
    _, products = rewritten(
        lambda b, q, k, x, y, w: b.emit(ops.add, mul(b, q, b.emit(ops.exp, x)), mul(b, q, y))
    )
    assert products == 1


def test_signs_and_terms_between() -> None:
    """q exp(x) - k y + (q y - k x): two products are left."""

    def build(b: Builder, q: Any, k: Any, x: Any, y: Any, w: Any) -> Any:
        first = b.emit(ops.sub, mul(b, q, b.emit(ops.exp, x)), mul(b, k, y))
        return b.emit(ops.add, first, b.emit(ops.sub, mul(b, q, y), mul(b, k, x)))

    _, products = rewritten(build)
    assert products == 2


@pytest.mark.parametrize("negative", [0, 1])
def test_opposite_signs(negative: int) -> None:
    """q exp(x) - q y and -q exp(x) + q y."""

    def build(b: Builder, q: Any, k: Any, x: Any, y: Any, w: Any) -> Any:
        terms = [mul(b, q, b.emit(ops.exp, x)), mul(b, q, y)]
        terms[negative] = b.emit(ops.neg, terms[negative])
        return b.emit(ops.add, *terms)

    _, products = rewritten(build)
    assert products == 1


@pytest.mark.parametrize("signs", ["++", "+-", "-+", "--"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_term_that_occurs_twice(signs: str, shared: bool) -> None:
    """q x + q x + q y, as the gradient of a square has it: only one of the equal terms is joined
    with the third, and each keeps its sign, also where both come from one sum."""

    def build(b: Builder, q: Any, k: Any, x: Any, y: Any, w: Any) -> Any:
        one = mul(b, q, x)
        if shared:
            one = b.emit(ops.add, one, k)
        first, second = (ops.add if sign == "+" else ops.sub for sign in signs)
        return b.emit(second, b.emit(first, one, one), mul(b, q, y))

    _, products = rewritten(build)
    assert products < 3


def test_factors_deep_in_a_term() -> None:
    """(y (q 0.5)) w + (q 0.5) x is (q 0.5) (y w + x)."""

    def build(b: Builder, q: Any, k: Any, x: Any, y: Any, w: Any) -> Any:
        half = mul(b, q, 0.5)
        return b.emit(ops.add, mul(b, mul(b, y, half), w), mul(b, half, x))

    after, products = rewritten(build)
    assert products == 3
    kept = [n for n in after.calls if n.target is ops.mul and n.args[1] == 0.5]
    assert len(kept) == 1


@pytest.mark.parametrize("second", ["row", "same", "alone"])
def test_what_stays(second: str) -> None:
    """A factor a row is no factor of full dims; a term that is a factor alone has no rest."""

    def build(b: Builder, q: Any, k: Any, x: Any, y: Any, w: Any) -> Any:
        if second == "row":
            return b.emit(ops.add, mul(b, x, w), mul(b, y, w))
        one = mul(b, q, x)
        return b.emit(ops.add, one, one if second == "same" else q)

    cell = cell_of(build)
    assert not rewrite(cell, factors.RULES)[1]


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_gradients_of_vector_gates(name: str) -> None:
    """q and k are multiplied once each in the gradient of the gate."""
    stages = graphs_of(name).kernel_stages("backward")
    (stage,) = (s for s in stages if s.name == "common factors")
    assert stage.fired["common factor"] >= 2
    assert not rewrite(stages[-1].cell, factors.RULES)[1]
