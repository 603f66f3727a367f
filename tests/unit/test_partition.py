"""Programs by level: each value is computed once, as soon as what it needs is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import OPERATORS, Sizes
from flexla_dist.compiler.partition import Program, partition

from .compiled import SPECS, graphs_of

SIZES = {"C": 8, "K": 5, "V": 7, "D": 6, "M": 4, "1": 1}
LEVEL_OF_ROLE = {"state": 1, "grad_next": 2}
DIRECTIONS = ("forward", "backward", "summary", "adjoint_summary")


def arguments(cell: Cell) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Tensor] = {}
    for name, node in cell.placeholders.items():
        x = torch.randn([SIZES[d] for d in node.meta["dims"]], generator=generator).double()
        values[name] = -x.abs() if node.meta["role"] == "log_decay" else x * 0.3
    values["valid"] = torch.arange(SIZES["C"]) < 6
    values["sizes"] = Sizes(SIZES, torch.device("cpu"), torch.float64)  # type: ignore[assignment]
    return values


def whole(cell: Cell, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return fx.GraphModule({}, cell.graph)(*(values[name] for name in cell.placeholders))


def cell_of(name: str, direction: str, padded: bool) -> Cell:
    graphs = graphs_of(name)
    forward = direction in ("forward", "summary")
    return graphs.forward(padded) if forward else graphs.backward(padded)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", SPECS)
def test_programs_compute_what_the_cell_does(name: str, direction: str) -> None:
    for padded in (True, False):
        cell = cell_of(name, direction, padded)
        values = arguments(cell)
        expected = whole(cell, values)
        programs = graphs_of(name).programs(direction, padded)
        names = {result for program in programs.values() for result in program.results}
        known = {key: x for key, x in values.items() if padded or key != "valid"}
        for level in sorted(programs):
            programs[level].run(known)
        for key in names - {key for key in names if key.startswith("value_")}:
            torch.testing.assert_close(known[key], expected[key], msg=key)


@pytest.mark.parametrize("name", SPECS)
def test_a_program_reads_only_what_is_known_at_its_level(name: str) -> None:
    for direction in DIRECTIONS:
        cell = cell_of(name, direction, True)
        roles = {key: node.meta["role"] for key, node in cell.placeholders.items()}
        programs = graphs_of(name).programs(direction, True)
        made: set[str] = set()
        for level in sorted(programs):
            for argument in programs[level].arguments:
                if argument in roles:
                    assert LEVEL_OF_ROLE.get(roles[argument], 0) <= level, (direction, argument)
                else:
                    assert argument in made, (direction, argument)
            made |= set(programs[level].results)


@pytest.mark.parametrize("name", SPECS)
def test_nothing_but_views_and_constants_is_computed_twice(name: str) -> None:
    for direction in ("forward", "backward"):
        programs = graphs_of(name).programs(direction, True)
        seen: dict[str, int] = {}
        for level, program in programs.items():
            for node in program.module.graph.nodes:
                if node.op == "call_function" and not free(node):
                    assert node.name not in seen, (direction, node.name, level, seen[node.name])
                    seen[node.name] = level


def free(node: fx.Node) -> bool:
    views = (ops.unsqueeze, ops.squeeze, ops.permute, ops.expand)
    return node.target in views or OPERATORS[node.target].kind == "source"


def test_elements_need_no_state() -> None:
    for name in SPECS:
        graphs = graphs_of(name)
        assert set(graphs.programs("summary", True)) == {0}
        assert set(graphs.programs("summary", True)[0].results) == set(graphs.elements)
        adjoint = graphs.programs("adjoint_summary", True)
        results = {r for p in adjoint.values() for r in p.results}
        assert {f"adjoint_{s}" for s in SPECS[name].state_dims} <= results
        assert not any(r.startswith("grad_") for r in results)


def test_a_linear_merge_needs_no_state_for_its_adjoint() -> None:
    for name in ("linear_attn", "simple_gla", "gla", "gated_delta_rule", "kda", "hgrn"):
        assert set(graphs_of(name).programs("adjoint_summary", True)) == {0}
    for name in ("linear_attn_normalized", "gsa", "mlstm"):
        assert set(graphs_of(name).programs("adjoint_summary", True)) == {0, 1}


def small_cell() -> Cell:
    """exp(x) is used at levels 0 and 1, a transposed view of it at level 1."""
    b = Builder()
    x, state = b.placeholder("x", ("K", "V"), "input"), b.placeholder("s", ("K", "V"), "state")
    grown = b.emit(ops.exp, x)
    return b.finish(
        {
            "early": b.emit(ops.neg, grown),
            "late": b.emit(ops.mul, grown, state),
            "turned": b.matmul(b.transpose(grown), state),
        }
    )


def test_values_travel_and_views_are_made_again() -> None:
    programs = partition(small_cell())
    first, second = programs[0], programs[1]
    assert first.results == ("early", "value_exp") and second.results == ("late", "turned")
    assert second.arguments == ("s", "value_exp")
    assert [n.target for n in second.module.graph.nodes if n.op == "call_function"] == [
        ops.mul,
        ops.permute,
        ops.matmul,
    ]


def test_only_what_the_named_results_need_is_computed() -> None:
    programs = partition(small_cell(), ["early"])
    assert set(programs) == {0} and programs[0].results == ("early",)
    assert programs[0].arguments == ("x",)


def test_a_program_adds_its_results() -> None:
    values = {"x": torch.zeros(2, 3, dtype=torch.float64)}
    program: Program = partition(small_cell(), ["early"])[0]
    program.run(values)
    assert torch.equal(values["early"], torch.full((2, 3), -1.0, dtype=torch.float64))
