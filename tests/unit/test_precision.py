"""Exponents are kept in float64, nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import Sizes
from flexla_dist.compiler.precision import WIDE_RESULTS, widen_exponents
from flexla_dist.compiler.verify import verify_cell

from .cells import names
from .compiled import SPECS, graphs_of
from .test_partition import SIZES, arguments

C, CK = ("C",), ("C", "K")


class Dtypes(fx.Interpreter):
    """Runs a cell and notes the dtype of every value."""

    def __init__(self, cell: Cell):
        super().__init__(fx.GraphModule({}, cell.graph))
        self.dtypes: dict[str, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> object:
        out = super().run_node(n)
        if isinstance(out, Tensor):
            self.dtypes[n.name] = out.dtype
        return out


def single(cell: Cell) -> dict[str, object]:
    values: dict[str, object] = {
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in arguments(cell).items()
    }
    values["sizes"] = Sizes(SIZES, torch.device("cpu"), torch.float32)
    return values


@pytest.mark.parametrize("name", SPECS)
def test_results_are_in_the_compute_dtype_and_mean_the_same(name: str) -> None:
    for padded in (True, False):
        for plain in (graphs_of(name).forward(padded), graphs_of(name).backward(padded)):
            cell = widen_exponents(plain)
            dims = {key: node.meta["dims"] for key, node in plain.outputs.items()}
            verify_cell(cell, "widen", dims)
            values = single(cell)
            noted = Dtypes(cell)
            got = noted.run(*(values[key] for key in cell.placeholders))
            for key, x in got.items():
                assert x.dtype == (torch.float64 if key in WIDE_RESULTS else torch.float32), key
            exact = arguments(plain)
            want = fx.GraphModule({}, plain.graph)(*(exact[key] for key in plain.placeholders))
            for key, x in got.items():
                torch.testing.assert_close(x.double(), want[key], rtol=1e-3, atol=1e-4, msg=key)


def test_only_sums_of_gates_are_wide() -> None:
    for name in SPECS:
        cell = widen_exponents(graphs_of(name).backward(False))
        values, noted = single(cell), Dtypes(cell)
        noted.run(*(values[key] for key in cell.placeholders))
        wide = [n for n in cell.calls if noted.dtypes.get(n.name) == torch.float64]
        if name in ("linear_attn", "linear_attn_normalized", "delta_rule", "hgrn"):
            continue
        assert wide, name
        if name != "mlstm":  # which writes its decays between tokens plainly
            assert not any(n.meta["dims"] == ("C", "C") for n in wide), name
        assert not any(n.target in (ops.matmul, ops.exp, ops.decay_scan) for n in wide), name


def built(make) -> Cell:  # type: ignore[no-untyped-def]
    b = Builder()
    g, x = b.placeholder("g", C, "log_decay"), b.placeholder("x", CK, "input")
    return widen_exponents(b.finish({"value": make(b, g, x)}))


def test_a_running_sum_that_is_no_exponent_stays_as_it_is() -> None:
    cell = built(lambda b, g, x: b.emit(ops.cumsum, x, dim=-2, reverse=False))
    assert names(cell) == ["cumsum"]


def test_an_exponential_of_a_gate_itself_stays_as_it_is() -> None:
    cell = built(lambda b, g, x: b.emit(ops.exp, b.emit(ops.neg, g)))
    assert names(cell) == ["neg", "exp"]


def test_differences_of_sums_are_made_before_they_are_rounded() -> None:
    def decays(b, g, x):  # type: ignore[no-untyped-def]
        total = b.emit(ops.cumsum, g, dim=-1, reverse=False)
        return b.emit(ops.exp, b.emit(ops.sub, total, b.emit(ops.add, g, 1.0)))

    assert names(built(decays)) == ["widen", "cumsum", "add", "widen", "sub", "narrow", "exp"]


def test_a_gradient_of_terms_that_cancel_is_summed_wide() -> None:
    def gradient(b, g, x):  # type: ignore[no-untyped-def]
        rows = b.emit(ops.total, x, dim=-1)
        return b.emit(ops.cumsum, b.emit(ops.sub, rows, g), dim=-1, reverse=True)

    assert names(built(gradient)) == ["wide_total", "widen", "sub", "cumsum", "narrow"]


def test_neighbours_after_strong_gates_keep_their_decay() -> None:
    """A float32 sum near -3000 is off by 1e-4; the last decay here must not be."""
    cell = widen_exponents(graphs_of("simple_gla").forward(False))
    values = single(cell)
    g = torch.full((SIZES["C"],), -500.0)
    g[-1] = -0.3
    values["g"] = g
    module = fx.GraphModule({}, cell.graph)
    local = module(*(values[key] for key in cell.placeholders))["local_S"]
    k, v = values["k"], values["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    expected = k[-1].outer(v[-1]) + torch.tensor(-0.3).exp() * k[-2].outer(v[-2])
    torch.testing.assert_close(local, expected, rtol=1e-6, atol=1e-7)
