"""Scales leave the operands of products that lie in memory, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import Sizes
from flexla_dist.compiler.passes import scales, simplify
from flexla_dist.compiler.passes.engine import rewrite

from .compiled import graphs_of

SIZES = {"C": 13, "K": 5, "V": 7, "1": 1}
ARGUMENTS = {
    "q": (("C", "K"), "input"),
    "k": (("C", "K"), "input"),
    "v": (("C", "V"), "input"),
    "w": (("C",), "log_decay"),
    "u": (("K",), "param"),
    "scale": ((), "scalar"),
    "valid": (("C",), "valid"),
    "state": (("K", "V"), "state"),
}
Build = Callable[[Builder, dict[str, fx.Node]], fx.Node]


def cell_of(build: Build) -> Cell:
    b = Builder()
    arguments = {
        name: b.placeholder(name, dims, role, mask=name == "valid")
        for name, (dims, role) in ARGUMENTS.items()
    }
    return b.finish({"value": build(b, arguments)})


def run(cell: Cell) -> Tensor:
    g = torch.Generator().manual_seed(0)
    known: dict[str, Any] = {"sizes": Sizes(SIZES, torch.device("cpu"), torch.float64)}
    for name, (dims, _) in ARGUMENTS.items():
        x = torch.randn([SIZES[d] for d in dims], generator=g, dtype=torch.float64)
        known[name] = x > 0 if name == "valid" else x
    return fx.GraphModule({}, cell.graph)(*(known[name] for name in cell.placeholders))["value"]


def rewritten(build: Build) -> tuple[Cell, list[str], list[list[str]]]:
    """The new cell, the operators after the product, and which arguments its operands read as
    they are."""
    before = cell_of(build)
    after, _ = rewrite(before, simplify.RULES + scales.RULES)
    assert torch.allclose(run(after), run(before), rtol=1e-12, atol=1e-12)
    again, fired = rewrite(after, scales.RULES)
    assert not fired and str(again) == str(after)
    (product,) = (n for n in after.calls if n.target is ops.matmul)
    later = [n.target.__name__ for n in after.calls[after.calls.index(product) + 1 :]]
    return after, later, [_stored(x) for x in product.args]


def _stored(node: Any) -> list[str]:
    while node.op == "call_function" and node.target in (ops.permute, ops.where):
        node = node.args[1] if node.target is ops.where else node.args[0]
    return [node.meta["key"]] if node.op == "placeholder" else []


def row(b: Builder, x: fx.Node) -> fx.Node:
    return b.emit(ops.unsqueeze, x, dim=-1)


def scaled(b: Builder, x: fx.Node, *factors: Any) -> fx.Node:
    for factor in factors:
        x = b.emit(ops.mul, x, factor)  # type: ignore[assignment]
    return x


def padded(b: Builder, a: dict[str, fx.Node], x: fx.Node) -> fx.Node:
    return b.emit(ops.where, row(b, a["valid"]), x, 0.0)


def test_rows_and_numbers_of_the_left_come_after() -> None:
    after, later, stored = rewritten(
        lambda b, a: b.matmul(scaled(b, a["q"], a["scale"], row(b, a["w"])), a["state"])
    )
    assert stored == [["q"], ["state"]] and set(later) == {"mul"}
    whole = [n for n in after.calls if n.target is ops.mul and n.meta["dims"] == ("C", "V")]
    assert len(whole) == 1  # both factors as one


def test_numbers_are_multiplied_at_once() -> None:
    after, _, stored = rewritten(
        lambda b, a: b.matmul(scaled(b, a["q"], 0.5, row(b, a["w"]), 4.0), a["state"])
    )
    assert stored == [["q"], ["state"]]
    assert [x for n in after.calls for x in n.args if isinstance(x, float)] == [2.0]
    after, later, stored = rewritten(
        lambda b, a: b.matmul(scaled(b, a["q"], 0.5), scaled(b, a["state"], 8.0))
    )
    assert stored == [["q"], ["state"]] and later == ["mul"]


def test_signs_come_after() -> None:
    for sides, after in ((("q",), ["neg"]), (("state",), ["neg"]), (("q", "state"), [])):
        _, later, stored = rewritten(
            lambda b, a, sides=sides: b.matmul(  # type: ignore[misc]
                *(b.emit(ops.neg, a[x]) if x in sides else a[x] for x in ("q", "state"))
            )
        )
        assert stored == [["q"], ["state"]] and later == after


def test_padding_that_is_selected_stays() -> None:
    _, later, stored = rewritten(
        lambda b, a: b.matmul(scaled(b, padded(b, a, a["q"]), 0.5, row(b, a["w"])), a["state"])
    )
    assert stored == [["q"], ["state"]] and later[-1] == "mul"


def test_columns_of_the_right_come_after() -> None:
    _, later, stored = rewritten(
        lambda b, a: b.matmul(a["q"], b.transpose(scaled(b, a["k"], row(b, a["w"]))))
    )
    assert stored == [["q"], ["k"]] and later[-1] == "mul"


def test_factors_along_the_sum_go_to_the_right() -> None:
    after, later, stored = rewritten(
        lambda b, a: b.matmul(b.transpose(scaled(b, a["k"], row(b, a["w"]))), a["v"])
    )
    assert stored == [["k"], []] and later == []
    (product,) = (n for n in after.calls if n.target is ops.mul)
    assert product.meta["dims"] == ("C", "V")


def test_factors_along_the_sum_go_to_what_is_computed() -> None:
    def build(b: Builder, a: dict[str, fx.Node]) -> fx.Node:
        computed = b.emit(ops.exp, b.emit(ops.decay_matrix, a["w"], a["w"], strict=False))
        return b.matmul(computed, scaled(b, a["v"], row(b, a["w"])))

    after, later, stored = rewritten(build)
    assert stored == [[], ["v"]] and later == []
    assert ("C", "C") in [n.meta["dims"] for n in after.calls if n.target is ops.mul]


def test_what_has_no_stored_operand_stays() -> None:
    def build(b: Builder, a: dict[str, fx.Node]) -> fx.Node:
        computed = b.emit(ops.exp, a["q"])
        return b.matmul(scaled(b, computed, row(b, a["w"])), b.emit(ops.exp, a["state"]))

    before = cell_of(build)
    assert not rewrite(before, scales.RULES)[1]


def test_factors_of_every_entry_stay() -> None:
    """A vector decay scales each entry by itself."""
    before = cell_of(lambda b, a: b.matmul(b.emit(ops.mul, a["q"], a["k"]), a["state"]))
    assert not rewrite(before, scales.RULES)[1]


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_of_variants_have_none(name: str, direction: str) -> None:
    stages = graphs_of(name).kernel_stages(direction)
    (stage,) = (s for s in stages if s.name == "scales out of products")
    assert stage.fired["scale of an operand"] > 0
    assert not rewrite(stages[-1].cell, scales.RULES)[1]
