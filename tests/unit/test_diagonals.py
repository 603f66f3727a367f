"""Passes over gradients of gates: terms that cancel are left out, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from flexla_dist.compiler.differentiate import differentiate
from flexla_dist.compiler.explain import explain
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import Sizes
from flexla_dist.compiler.passes import cuts, diagonals, simplify
from flexla_dist.compiler.passes.cuts import needs_cuts
from flexla_dist.compiler.passes.engine import Rule, rewrite
from flexla_dist.compiler.passes.sums import highest_diagonal, terms
from flexla_dist.compiler.pipeline import run_passes

from .cells import names
from .compiled import DISTINCT, SPECS, graphs_of

SIZES = {"C": 13, "K": 5, "V": 7, "1": 1}
C, CK, CC = ("C",), ("C", "K"), ("C", "C")
DIMS = {"b": C, "other": C, "x": C, "p": CC, "q": CK, "k": CK, "g": CK, "h": CK}
GATES = ("b", "other", "g", "h")
Build = Callable[[Builder, dict[str, fx.Node]], fx.Node]


def gradients_of(build: Build, *wanted: str) -> Cell:
    """Gradients, tidied, of one value made of the arguments `DIMS`."""
    builder = Builder()
    arguments = {name: builder.placeholder(name, dims, "input") for name, dims in DIMS.items()}
    value = build(builder, arguments)
    seed = builder.placeholder("seed", value.meta["dims"], "grad_output")
    found = differentiate(builder, [(value, seed)], [arguments[name] for name in wanted])
    cell = builder.finish({n.meta["key"]: g for n, g in found.items() if g is not None})
    return run_passes(cell, (("tidy", simplify.RULES),), [])


def run(cell: Cell, dtype: torch.dtype = torch.float64, gate: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    known: dict[str, Any] = {"sizes": Sizes(SIZES, torch.device("cpu"), dtype)}
    for name, dims in {**DIMS, "seed": CC}.items():
        x = torch.randn([SIZES[d] for d in dims], generator=generator, dtype=torch.float64)
        known[name] = (-gate * (x.abs() + 0.5)).cumsum(0) if name in GATES else x
        known[name] = known[name].to(dtype)
    wanted = [known[name][: SIZES["C"]] for name in cell.placeholders if name != "sizes"]
    return fx.GraphModule({}, cell.graph)(
        *([known["sizes"]] if "sizes" in cell.placeholders else []), *wanted
    )


def fired(cell: Cell, rules: tuple[Rule, ...]) -> dict[str, int]:
    """Which rules fire; the results stay what they were."""
    before = run(cell)
    new, count = rewrite(cell, rules)
    checked = run_passes(cell, (("test", rules),), [])  # verified
    for name, x in run(new).items():
        torch.testing.assert_close(x, before[name], rtol=1e-12, atol=1e-12)
    assert names(checked) == names(new)
    return count


def matrix(row: str, col: str, strict: bool = False) -> Build:
    return lambda b, v: b.emit(ops.decay_matrix, v[row], v[col], strict=strict)


def scores(row: str, col: str, strict: bool = False) -> Build:
    return lambda b, v: b.emit(ops.decay_scores, v["q"], v["k"], v[row], v[col], strict=strict)


# -- diagonals ------------------------------------------------------------------------------------


def test_row_sums_less_column_sums_of_one_gate() -> None:
    cell = gradients_of(matrix("b", "b"), "b")
    assert fired(cell, diagonals.RULES) == {"row sums less column sums": 1}
    new, _ = rewrite(cell, diagonals.RULES)
    summed = [x.args[0] for x in new.calls if x.target is ops.total]
    assert [highest_diagonal(x) for x in summed] == [-1, -1]
    assert rewrite(new, diagonals.RULES)[1] == {}


def test_gates_whose_gradients_go_different_ways_are_left() -> None:
    assert fired(gradients_of(matrix("b", "other"), "b", "other"), diagonals.RULES) == {}
    assert fired(gradients_of(scores("g", "h"), "g", "h", "q", "k"), diagonals.RULES) == {}


def test_different_gates_of_one_vector_match() -> None:
    """Rows read b less x: the gradient of b still has rows less columns, that of x rows alone."""

    def build(b: Builder, v: dict[str, fx.Node]) -> fx.Node:
        return b.emit(ops.decay_matrix, b.emit(ops.add, v["b"], v["x"]), v["b"], strict=False)

    cell = gradients_of(build, "b", "x")
    assert fired(cell, diagonals.RULES) == {"row sums less column sums": 1}


def test_a_strict_decay_has_no_diagonal() -> None:
    assert fired(gradients_of(matrix("b", "b", strict=True), "b"), diagonals.RULES) == {}
    assert fired(gradients_of(scores("g", "g", strict=True), "g", "q"), diagonals.RULES) == {}


def test_sums_that_add_up_are_left() -> None:
    def build(b: Builder, v: dict[str, fx.Node]) -> fx.Node:
        lower = b.emit(ops.tril, v["p"], diagonal=0)
        rows, columns = (b.emit(ops.total, lower, dim=d) for d in (-1, -2))
        return b.emit(ops.add, b.emit(ops.mul, rows, 2.0), columns)

    builder = Builder()
    arguments = {name: builder.placeholder(name, dims, "input") for name, dims in DIMS.items()}
    assert fired(builder.finish({"y": build(builder, arguments)}), diagonals.RULES) == {}


def test_values_that_are_no_triangle_are_left() -> None:
    builder = Builder()
    p = builder.placeholder("p", CC, "input")
    rows, columns = (builder.emit(ops.total, p, dim=d) for d in (-1, -2))
    cell = builder.finish({"y": builder.emit(ops.sub, rows, columns)})
    assert fired(cell, diagonals.RULES) == {}
    assert highest_diagonal(p) is None


@pytest.mark.parametrize("fn", [ops.decay_rows, ops.decay_cols])
def test_sums_under_a_vector_decay(fn: Any) -> None:
    def build(b: Builder, v: dict[str, fx.Node]) -> fx.Node:
        out = b.emit(fn, v["p"], v["q"], v["g"], v["g"], strict=False)
        return b.matmul(out, b.transpose(v["k"]))

    count = fired(gradients_of(build, "g", "p", "q"), diagonals.RULES)
    assert count["decayed rows less decayed columns"] == 1


def test_scores_of_one_vector_gate() -> None:
    cell = gradients_of(scores("g", "g"), "g", "q", "k")
    want = {"diagonal apart": 2, "decayed rows less decayed columns": 1}
    assert fired(cell, diagonals.RULES) == want
    new, _ = rewrite(cell, diagonals.RULES)
    decayed = [x for x in new.calls if x.target in (ops.decay_rows, ops.decay_cols)]
    assert len(decayed) == 2 and all(x.kwargs["strict"] for x in decayed)
    found = list(terms(new.outputs["g"]))
    assert [sign for _, sign in found] == [1, -1]
    assert all(x.args[1] in decayed for x, _ in found)


@pytest.mark.parametrize("build", [matrix("b", "b"), scores("g", "g")], ids=["matrix", "scores"])
def test_steep_gates_keep_their_digits(build: Build) -> None:
    """The diagonal outweighs all else by some e^8."""
    gate = "b" if build(*arguments_of()).target is ops.decay_matrix else "g"
    plain = gradients_of(build, gate)
    new, _ = rewrite(plain, diagonals.RULES)
    want = run(plain, gate=8.0)[gate]
    errors = [
        float((run(x, torch.float32, gate=8.0)[gate].double() - want).norm() / want.norm())
        for x in (plain, new)
    ]
    assert errors[1] < 8e-6 and 2 * errors[1] < errors[0], errors


def arguments_of() -> tuple[Builder, dict[str, fx.Node]]:
    builder = Builder()
    return builder, {n: builder.placeholder(n, dims, "input") for n, dims in DIMS.items()}


# -- cuts -----------------------------------------------------------------------------------------


def summed_gate(b: Builder, v: dict[str, fx.Node]) -> fx.Node:
    decay = b.emit(ops.neg, b.emit(ops.absolute, v["x"]))
    gate = b.emit(ops.cumsum, decay, dim=-1, reverse=False)
    return b.emit(ops.decay_matrix, gate, gate, strict=False)


def cut_cell() -> Cell:
    cell = gradients_of(summed_gate, "x")
    return rewrite(cell, diagonals.RULES)[0]


def test_running_sums_become_sums_across_a_cut() -> None:
    cell = cut_cell()
    assert fired(cell, cuts.RULES) == {"pairs across a cut": 1}
    new, _ = rewrite(rewrite(cell, cuts.RULES)[0], simplify.RULES)
    running = [x for x in new.calls if x.target is ops.cumsum]
    assert [x.meta["dims"] for x in running] == [C, CC]
    assert not any(x.kwargs["reverse"] for x in running)


def test_other_terms_keep_their_running_sum() -> None:
    def build(b: Builder, v: dict[str, fx.Node]) -> fx.Node:
        decay = b.emit(ops.neg, b.emit(ops.absolute, v["x"]))
        gate = b.emit(ops.cumsum, decay, dim=-1, reverse=False)
        ratios = b.emit(ops.decay_matrix, gate, gate, strict=False)
        return b.emit(ops.mul, ratios, b.emit(ops.unsqueeze, b.emit(ops.sin, gate), dim=-1))

    assert fired(gradients_of(build, "x"), cuts.RULES) == {"pairs across a cut": 1}


def test_only_gradients_of_parameters_that_read_gates_ask_for_cuts() -> None:
    asking = [n for n in DISTINCT if _needs(n)]
    assert asking == ["mamba2"]


def _needs(name: str) -> bool:
    stages = graphs_of(name).kernel_stages("backward")
    return needs_cuts(stages[1].cell, SPECS[name].param_specs)


# -- in the pipeline ------------------------------------------------------------------------------


def test_passes_are_part_of_the_backward_kernels_and_printed() -> None:
    text = str(explain("mamba2", stage="passes"))
    assert "row sums less column sums" in text and "pairs across a cut" in text
    forward = [stage.name for stage in graphs_of("gsa").kernel_stages("forward")]
    assert "diagonals that cancel" not in forward


@pytest.mark.parametrize("name", ["gla", "kda", "gated_delta_rule", "gsa", "dplr"])
def test_gates_of_variants_have_no_diagonal(name: str) -> None:
    (stage,) = [s for s in graphs_of(name).kernel_stages("backward") if "diagonals" in s.name]
    assert stage.fired
