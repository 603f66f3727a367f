"""The rewriting engine, its general rules, and the verifier behind every pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from flexla_dist.compiler import pipeline
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell, dims_of
from flexla_dist.compiler.passes import simplify, transpose
from flexla_dist.compiler.passes.engine import Rule, any_, call, either, match, rewrite
from flexla_dist.compiler.passes.order import FORWARD_PASSES
from flexla_dist.compiler.pipeline import compile_graphs, run_passes
from flexla_dist.compiler.verify import VerifyError, verify_cell

from .cells import SIZES, names, run
from .compiled import SPECS, graphs_of

CK, KC, CC = ("C", "K"), ("K", "C"), ("C", "C")
X, Y = any_("x"), any_("y")
DIMS = {"x": CK, "y": CK, "a": CC, "b": CC, "row": ("1", "K"), "c": ("C",)}


def cell_of(build: Callable[[Builder, dict[str, fx.Node]], Any]) -> Cell:
    """The node that `build` makes of the arguments DIMS, as the result `value`."""
    builder = Builder()
    arguments = {name: builder.placeholder(name, dims, "input") for name, dims in DIMS.items()}
    return builder.finish({"value": build(builder, arguments)})


def arguments(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {**SIZES, "1": 1}
    return {
        name: torch.randn([sizes[d] for d in dims], generator=generator, dtype=torch.float64)
        for name, dims in DIMS.items()
    }


# -- patterns -------------------------------------------------------------------------------------


def test_patterns_bind_operands() -> None:
    b = Builder()
    x, y = b.placeholder("x", CK, "input"), b.placeholder("y", CK, "input")
    node = b.emit(ops.mul, b.emit(ops.add, x, y), 2.0)
    assert match(X, node, {}) == {"x": node}
    assert match(call(ops.mul, X, Y), node, {}) == {"x": node.args[0], "y": 2.0}
    inner = call(ops.mul, call(ops.add, X, Y, name="sum"), 2.0)
    assert match(inner, node, {}) == {"sum": node.args[0], "x": x, "y": y}
    assert match(call(ops.mul, call(ops.add, X, Y), 3.0), node, {}) is None
    assert match(call(ops.add, X, Y), node, {}) is None
    assert match(call(ops.mul, any_("x", lambda o: o is y), Y), node, {}) is None


def test_the_same_name_is_the_same_operand() -> None:
    b = Builder()
    x, y = b.placeholder("x", CK, "input"), b.placeholder("y", CK, "input")
    twice = call(ops.mul, X, X)
    assert match(twice, b.emit(ops.mul, x, x), {}) == {"x": x}
    assert match(twice, b.emit(ops.mul, x, y), {}) is None


def test_commuting_patterns_try_both_orders() -> None:
    b = Builder()
    x, y = b.placeholder("x", CK, "input"), b.placeholder("y", CK, "input")
    node = b.emit(ops.add, x, b.emit(ops.neg, y))
    assert match(call(ops.add, call(ops.neg, Y), X), node, {}) is None
    assert match(either(ops.add, call(ops.neg, Y), X), node, {}) == {"x": x, "y": y}


def test_required_attributes() -> None:
    b = Builder()
    node = b.emit(ops.total, b.placeholder("x", CK, "input"), dim=-1)
    assert match(call(ops.total, X, dim=-1), node, {}) is not None
    assert match(call(ops.total, X, dim=-2), node, {}) is None


# -- the engine -----------------------------------------------------------------------------------


def test_rules_run_until_none_fires() -> None:
    double = Rule("exp(x) y", call(ops.mul, call(ops.exp, X), Y), lambda b, m: m["y"])
    cell = cell_of(
        lambda b, v: b.emit(
            ops.mul, b.emit(ops.exp, v["x"]), b.emit(ops.mul, b.emit(ops.exp, v["y"]), v["x"])
        )
    )
    new, fired = rewrite(cell, [double])
    assert names(new) == [] and fired == {"exp(x) y": 2}
    assert rewrite(new, [double])[1] == {}


def test_the_first_rule_that_fits_wins() -> None:
    rules = [
        Rule("never", call(ops.exp, X), lambda b, m: None),
        Rule("first", call(ops.exp, X), lambda b, m: b.emit(ops.tanh, m["x"])),
        Rule("second", call(ops.exp, X), lambda b, m: b.emit(ops.sin, m["x"])),
    ]
    new, fired = rewrite(cell_of(lambda b, v: b.emit(ops.exp, v["x"])), rules)
    assert names(new) == ["tanh"] and fired == {"first": 1}


def test_rules_that_never_settle_are_named() -> None:
    flip = [
        Rule("there", call(ops.sin, X), lambda b, m: b.emit(ops.cos, m["x"])),
        Rule("back", call(ops.cos, X), lambda b, m: b.emit(ops.sin, m["x"])),
    ]
    with pytest.raises(RuntimeError, match=r"do not settle .*\['back', 'there'\]"):
        rewrite(cell_of(lambda b, v: b.emit(ops.sin, v["x"])), flip)


def test_a_replacement_keeps_the_dims_of_what_it_replaces() -> None:
    number = Rule("one", call(ops.exp, X), lambda b, m: 1.0)
    new, _ = rewrite(cell_of(lambda b, v: b.emit(ops.exp, v["x"])), [number])
    assert new.outputs["value"].meta["dims"] == CK and names(new) == ["full"]
    narrow = Rule("row", call(ops.add, X, Y), lambda b, m: m["y"])
    new, _ = rewrite(cell_of(lambda b, v: b.emit(ops.add, v["x"], v["row"])), [narrow])
    assert new.outputs["value"].meta["dims"] == CK and names(new) == ["expand"]


def test_equal_nodes_exist_once() -> None:
    b = Builder()
    x = b.placeholder("x", CK, "input")
    assert b.emit(ops.exp, x) is b.emit(ops.exp, x)
    assert b.emit(ops.mul, x, 2) is b.emit(ops.mul, x, 2.0)
    assert b.emit(ops.total, x, dim=-1) is not b.emit(ops.total, x, dim=-2)
    assert b.placeholder("x", CK, "input") is x


def test_dead_code_is_dropped_and_unused_arguments_stay() -> None:
    b = Builder()
    x = b.placeholder("x", CK, "input")
    b.emit(ops.exp, x)
    cell = b.finish({"value": b.emit(ops.neg, x)})
    assert names(cell) == ["neg"] and set(cell.placeholders) == {"sizes", "x"}


# -- general rules --------------------------------------------------------------------------------

SIMPLER: dict[str, tuple[Callable[[Builder, dict[str, fx.Node]], Any], list[str]]] = {
    "x + 0": (lambda b, v: b.emit(ops.add, v["x"], 0.0), []),
    "0 + x": (lambda b, v: b.emit(ops.add, b.expand(0.0, CK), v["x"]), []),
    "x - 0": (lambda b, v: b.emit(ops.sub, v["x"], 0.0), []),
    "0 - x": (lambda b, v: b.emit(ops.sub, 0.0, v["x"]), ["neg"]),
    "x * 1": (lambda b, v: b.emit(ops.mul, v["x"], 1.0), []),
    "1 * x": (lambda b, v: b.emit(ops.mul, b.expand(1.0, CK), v["x"]), []),
    "x * 0": (lambda b, v: b.emit(ops.mul, v["x"], 0.0), ["full"]),
    "row * ones": (lambda b, v: b.emit(ops.mul, v["row"], b.expand(1.0, CK)), ["expand"]),
    "x / 1": (lambda b, v: b.emit(ops.div, v["x"], 1.0), []),
    "0 / x": (lambda b, v: b.emit(ops.div, 0.0, v["x"]), ["full"]),
    "-(-x)": (lambda b, v: b.emit(ops.neg, b.emit(ops.neg, v["x"])), []),
    "0 @ a": (lambda b, v: b.matmul(b.expand(0.0, KC), v["a"]), ["full"]),
    "a @ 0": (lambda b, v: b.matmul(v["a"], b.expand(0.0, CK)), ["full"]),
    "1 + 2": (lambda b, v: b.emit(ops.add, b.expand(1.0, CK), 2.0), ["full"]),
    "exp(2)": (lambda b, v: b.emit(ops.exp, b.expand(2.0, CK)), ["full"]),
    "exp(1000)": (lambda b, v: b.emit(ops.exp, b.expand(1000.0, CK)), ["full", "exp"]),
    "x + expand(row)": (lambda b, v: b.emit(ops.add, v["x"], b.expand(v["row"], CK)), ["add"]),
    "unsqueeze, squeeze": (
        lambda b, v: b.emit(ops.squeeze, b.emit(ops.unsqueeze, v["x"], dim=-2), dim=-2),
        [],
    ),
    "squeeze, unsqueeze": (
        lambda b, v: b.emit(ops.unsqueeze, b.emit(ops.squeeze, v["row"], dim=-2), dim=-2),
        [],
    ),
    "x.T.T": (lambda b, v: b.transpose(b.transpose(v["x"])), []),
    "turned twice": (
        lambda b, v: b.emit(
            ops.total,
            b.emit(
                ops.permute,
                b.emit(
                    ops.permute,
                    b.emit(ops.mul, b.emit(ops.unsqueeze, v["x"], dim=-1), v["row"]),
                    order=(-2, -1, -3),
                ),
                order=(-3, -1, -2),
            ),
            dim=-1,
        ),
        ["unsqueeze", "unsqueeze", "mul", "permute", "total"],
    ),
    "tril(2 a)": (
        lambda b, v: b.emit(ops.tril, b.emit(ops.mul, v["a"], 2.0), diagonal=0),
        ["tril", "mul"],
    ),
    "tril(0)": (lambda b, v: b.emit(ops.tril, b.expand(0.0, CC), diagonal=0), ["full"]),
    "sum(0)": (lambda b, v: b.emit(ops.total, b.expand(0.0, CC), dim=-1), ["full"]),
    "cumsum(0)": (lambda b, v: b.emit(ops.cumsum, b.expand(0.0, CC), dim=-1), ["full"]),
}
TURNED: dict[str, tuple[Callable[[Builder, dict[str, fx.Node]], Any], list[str]]] = {
    "(x.T @ a).T": (
        lambda b, v: b.transpose(b.matmul(b.transpose(v["x"]), v["a"])),
        ["permute", "matmul"],
    ),
    "(a + b).T": (lambda b, v: b.transpose(b.emit(ops.add, v["a"], v["b"])), ["add", "permute"]),
    "(a.T - b).T": (
        lambda b, v: b.transpose(b.emit(ops.sub, b.transpose(v["a"]), v["b"])),
        ["permute", "sub"],
    ),
    "(-(a @ b)).T": (
        lambda b, v: b.transpose(b.emit(ops.neg, b.matmul(v["a"], v["b"]))),
        ["permute", "permute", "matmul", "neg"],
    ),
    "(2 (a @ b)).T": (
        lambda b, v: b.transpose(b.emit(ops.mul, b.matmul(v["a"], v["b"]), 2.0)),
        ["permute", "permute", "matmul", "mul"],
    ),
}


@pytest.mark.parametrize("name", [*SIMPLER, *TURNED])
def test_general_rules(name: str) -> None:
    build, expected = {**SIMPLER, **TURNED}[name]
    cell = cell_of(build)
    rules = (*simplify.RULES, *(transpose.RULES if name in TURNED else ()))
    new, fired = rewrite(cell, rules)
    verify_cell(new, "test", {"value": cell.outputs["value"].meta["dims"]})
    assert sorted(names(new)) == sorted(expected)
    assert bool(fired) == (names(new) != names(cell))
    values = arguments()
    torch.testing.assert_close(run(new, values)["value"], run(cell, values)["value"])


def random_cell(rng: random.Random) -> Cell:
    """Twenty random operators on matrices and vectors of the chunk."""
    b = Builder()
    pool = [b.placeholder(name, dims, "input") for name, dims in DIMS.items()]
    pool += [b.expand(value, CC) for value in (0.0, 1.0, 2.0)]
    while len(pool) < 30:
        x, y = rng.choice(pool), rng.choice([*pool, 0.0, 1.0, -1.5])
        fn = rng.choice([ops.add, ops.sub, ops.mul, ops.neg, ops.tanh, ops.permute, ops.matmul])
        fn = rng.choice([fn, ops.tril, ops.total, ops.cumsum, ops.unsqueeze, ops.squeeze, ops.div])
        try:
            if fn in (ops.add, ops.sub, ops.mul):
                operands = (x, y) if rng.random() < 0.5 or fn is not ops.sub else (y, x)
                node = b.emit(fn, *operands)
            elif fn is ops.div:
                node = b.emit(fn, x, 2.0)
            elif fn in (ops.neg, ops.tanh):
                node = b.emit(fn, x)
            elif fn is ops.permute:
                node = b.transpose(x)
            elif fn is ops.matmul:
                node = b.matmul(x, y if isinstance(y, fx.Node) else x)
            elif fn is ops.tril:
                node = b.emit(fn, x, diagonal=rng.choice((0, -1)))
            else:
                node = b.emit(fn, x, dim=rng.choice((-1, -2)))
        except (ops.ShapeRuleError, AttributeError):
            continue
        if len(dims_of(node)) <= 2:
            pool.append(node)
    return b.finish({f"r{i}": node for i, node in enumerate(pool[-4:])})


def test_general_rules_keep_the_meaning_of_random_graphs() -> None:
    rng = random.Random(0)
    fired = set()
    for _ in range(150):
        cell = random_cell(rng)
        dims = {name: node.meta["dims"] for name, node in cell.outputs.items()}
        new, counts = rewrite(cell, simplify.RULES + transpose.RULES)
        verify_cell(new, "test", dims)
        fired |= set(counts)
        values = arguments(1)
        expected, got = run(cell, values), run(new, values)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name].expand_as(got[name]))
    assert len(fired) > 15, fired


# -- the verifier ---------------------------------------------------------------------------------


def tampered() -> dict[str, tuple[Cell, str]]:
    """Illegal cells and the message that each must meet."""
    out = {}
    cell = cell_of(lambda b, v: b.emit(ops.exp, v["x"]))
    cell.calls[0].meta["dims"] = KC
    out["dims"] = (cell, r"exp has dims \[K, C\]; its operands give \[C, K\]")
    cell = cell_of(lambda b, v: b.emit(ops.exp, v["x"]))
    cell.calls[0].target = torch.exp
    out["operator"] = (cell, "which is no operator")
    cell = cell_of(lambda b, v: b.emit(ops.mul, v["x"], v["y"]))
    cell.calls[0].args = (cell.placeholders["x"], cell.placeholders["a"])
    out["broadcast"] = (cell, r"\[C, K\] and \[C, C\] do not broadcast")
    cell = cell_of(lambda b, v: b.emit(ops.exp, b.emit(ops.greater, v["x"], 0.0)))
    out["mask as a value"] = (cell, "exp computes with a mask")
    cell = cell_of(lambda b, v: b.emit(ops.where, v["x"], v["x"], v["y"]))
    out["value as a mask"] = (cell, "where needs a mask and two values")
    cell = cell_of(lambda b, v: b.emit(ops.logical_not, v["x"]))
    out["logic of values"] = (cell, "logical_not needs masks")
    return out


@pytest.mark.parametrize("name", list(tampered()))
def test_the_verifier_refuses(name: str) -> None:
    cell, message = tampered()[name]
    with pytest.raises(VerifyError, match=f"after some pass: .*{message}"):
        verify_cell(cell, "some pass")


def test_the_verifier_compares_results_with_what_was_declared() -> None:
    cell = cell_of(lambda b, v: b.emit(ops.exp, v["x"]))
    verify_cell(cell, "some pass", {"value": CK})
    for results in ({"value": KC}, {"other": CK}, {}):
        with pytest.raises(VerifyError, match="after some pass: results"):
            verify_cell(cell, "some pass", results)


def test_the_verifier_refuses_a_use_before_the_definition() -> None:
    cell = cell_of(lambda b, v: b.emit(ops.exp, b.emit(ops.neg, v["x"])))
    neg, exp = cell.calls
    exp.append(neg)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        verify_cell(cell, "some pass")


def test_a_pass_that_breaks_a_graph_is_caught_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(b: Builder, m: Any) -> Any:
        return b.emit(ops.place, b.sizes, m["x"], dims=("V", "C"), dim=-2, index=0)

    bad = ("bad pass", (Rule("wrong dims", call(ops.exp, X), wrong),))
    with pytest.raises(VerifyError, match=r"in bad pass: \[V, C\] and \[C, K\]"):
        run_passes(cell_of(lambda b, v: b.emit(ops.exp, v["x"])), (bad,), [])
    monkeypatch.setattr(pipeline, "FORWARD_PASSES", (*FORWARD_PASSES[:1], bad))
    with pytest.raises(VerifyError, match="in bad pass: "):
        compile_graphs(SPECS["simple_gla"])


# -- the passes on whole specs --------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_passes_settle_and_every_form_prints(name: str) -> None:
    graphs = graphs_of(name)
    assert [s.name for s in graphs.stages][:2] == ["trace", "simplify"]
    for stage in graphs.stages:
        verify_cell(stage.cell, stage.name)
        lines = str(stage.cell).splitlines()
        assert len(lines) >= len(stage.cell.calls) and lines[-1].startswith("return ")
    for _, rules in FORWARD_PASSES:
        assert rewrite(graphs.cell, rules)[1] == {}


@pytest.mark.parametrize("name", SPECS)
def test_whole_chunks_run_without_padding(name: str) -> None:
    graphs = graphs_of(name)
    assert "valid" in graphs.forward(True).placeholders
    for cell in (graphs.forward(False), graphs.backward(False)):
        used = [n for n in cell.placeholders.values() if n.users]
        assert not any(n.meta["role"] == "valid" for n in used)


def test_compilation_is_a_pure_function_of_the_spec() -> None:
    hashes = {name: graphs_of(name).structural_hash for name in SPECS}
    for name, spec in SPECS.items():
        again = compile_graphs(spec)
        assert again.structural_hash == hashes[name]
        for mine, other in zip(again.stages, graphs_of(name).stages, strict=True):
            assert str(mine.cell) == str(other.cell) and mine.fired == other.fired
    same = {"simple_gla", "retention", "lightning"}
    assert len({hashes[name] for name in same}) == 1
    assert len(set(hashes.values())) == len(SPECS) - 2
