"""The derivative of every operator against autograd through the operator's own torch function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from flexla_dist.compiler.differentiate import differentiate
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import OPERATORS, Sizes
from flexla_dist.compiler.ir.vjp import CONSTANT, RULES
from flexla_dist.compiler.verify import verify_cell

SIZES = {"C": 6, "K": 3, "V": 4, "1": 1}
LEAD = (2, 3)
CK, CV, KV, CC, C = ("C", "K"), ("C", "V"), ("K", "V"), ("C", "C"), ("C",)


@dataclass(frozen=True)
class Case:
    """An operator on operands: dims of a tensor, or a number; `draw` makes the tensors."""

    fn: Callable[..., Any]
    operands: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[int, Tensor], Tensor] = lambda at, x: x

    def __str__(self) -> str:
        shown = [x if isinstance(x, float) else "".join(x) for x in self.operands]
        attrs = [f"{k}={v}" for k, v in self.attrs.items() if k != "dims"]
        return "-".join(map(str, [self.fn.__name__, *shown, *attrs])).replace(" ", "")


def positive(at: int, x: Tensor) -> Tensor:
    return x.abs() + 0.5


def divisor(at: int, x: Tensor) -> Tensor:
    return positive(at, x) if at == 1 else x


def ties(at: int, x: Tensor) -> Tensor:
    return x.round()


def gates(*which: int) -> Callable[[int, Tensor], Tensor]:
    """Operands that are running sums of log decays along C."""

    def draw(at: int, x: Tensor) -> Tensor:
        dim = -1 if x.dim() == len(LEAD) + 1 else -2
        return (-x.abs()).cumsum(dim) if at in which else x

    return draw


def steps(at: int, x: Tensor) -> Tensor:
    return -x.abs() if at == 0 else x


def regular(at: int, x: Tensor) -> Tensor:
    return x + 4 * torch.eye(x.shape[-1], dtype=x.dtype)


UNARY = [
    *(Case(fn, (CK,)) for fn in (ops.neg, ops.exp, ops.expm1, ops.sigmoid, ops.logsigmoid)),
    *(Case(fn, (CK,)) for fn in (ops.softplus, ops.tanh, ops.absolute, ops.sin, ops.cos)),
    *(Case(fn, (CK,), draw=positive) for fn in (ops.log, ops.log1p, ops.sqrt, ops.rsqrt)),
    *(Case(ops.power, (CK,), {"exponent": e}, positive) for e in (3.0, -1.0, 0.5, 0.0)),
]
BINARY = [
    *(Case(fn, (CK, CK), draw=divisor) for fn in (ops.add, ops.sub, ops.mul, ops.div)),
    *(Case(fn, (CK, 1.7)) for fn in (ops.add, ops.sub, ops.mul, ops.div)),
    *(Case(fn, (1.7, CK), draw=divisor) for fn in (ops.sub, ops.div)),
    *(Case(fn, (("C", "1"), ("1", "K")), draw=divisor) for fn in (ops.mul, ops.div, ops.sub)),
    *(Case(fn, (CK, CK)) for fn in (ops.maximum, ops.minimum)),
    *(Case(fn, (CK, 0.2)) for fn in (ops.maximum, ops.minimum)),
]
SHAPE = [
    Case(ops.unsqueeze, (CK,), {"dim": -2}),
    Case(ops.squeeze, (("C", "1", "K"),), {"dim": -2}),
    Case(ops.permute, (CK,), {"order": (-1, -2)}),
    Case(ops.permute, (("C", "K", "V"),), {"order": (-1, -3, -2)}),
    Case(ops.expand, (("1", "K"),), {"dims": CK}),
    *(Case(ops.select, (CK,), {"dim": d, "index": i}) for d in (-1, -2) for i in (0, -1)),
    Case(ops.place, (("K",),), {"dims": CK, "dim": -2, "index": -1}),
    *(Case(ops.shift, (CK,), {"dim": d, "by": n}) for d, n in ((-2, 1), (-1, -2), (-1, 9))),
    *(Case(fn, (CC,), {"diagonal": d}) for fn in (ops.tril, ops.triu) for d in (0, -1, 2)),
]
SUMS = [
    *(Case(ops.total, (CK,), {"dim": d}) for d in (-1, -2)),
    *(Case(ops.amax, (CK,), {"dim": d}) for d in (-1, -2)),
    Case(ops.amax, (CK,), {"dim": -2}, ties),
    *(Case(ops.cumsum, (CK,), {"dim": d, "reverse": r}) for d in (-1, -2) for r in (True, False)),
    Case(ops.matmul, (("C", "K"), KV)),
]
DOMAIN = [
    *(
        case
        for strict in (False, True)
        for case in (
            Case(ops.decay_matrix, (C, C), {"strict": strict}, gates(0, 1)),
            Case(ops.decay_scores, (CK, CK, CK, CK), {"strict": strict}, gates(2, 3)),
            Case(ops.decay_rows, (CC, CK, CK, CK), {"strict": strict}, gates(2, 3)),
            Case(ops.decay_cols, (CC, CK, CK, CK), {"strict": strict}, gates(2, 3)),
        )
    ),
    *(Case(fn, (CK, CK), draw=steps) for fn in (ops.decay_scan, ops.decay_scan_reverse)),
    Case(ops.unit_tril_inverse, (CC,)),
    Case(ops.inverse, (CC,), draw=regular),
]
CASES = [*UNARY, *BINARY, *SHAPE, *SUMS, *DOMAIN]
SIZED = (ops.expand, ops.place)


def draw_all(case: Case) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    out: list[Any] = []
    for at, dims in enumerate(case.operands):
        if isinstance(dims, float):
            out.append(dims)
            continue
        shape = (*LEAD, *(SIZES[d] for d in dims))
        x = case.draw(at, torch.randn(shape, generator=generator, dtype=torch.float64))
        out.append(x.requires_grad_())
    if case.fn in (ops.decay_scores, ops.decay_matrix, ops.decay_rows, ops.decay_cols):
        out[-2] = out[-1].detach().clone().requires_grad_()  # rows and columns share one gate
    return out


def gradient_cell(case: Case) -> Cell:
    """Result and gradients of one operator as a cell."""
    builder = Builder()
    operands: list[fx.Node | float] = [
        dims if isinstance(dims, float) else builder.placeholder(f"x{at}", dims, "input")
        for at, dims in enumerate(case.operands)
    ]
    head = (builder.sizes,) if case.fn in SIZED else ()
    out = builder.emit(case.fn, *head, *operands, **case.attrs)
    seed = builder.placeholder("seed", out.meta["dims"], "grad_output")
    wanted = [x for x in operands if isinstance(x, fx.Node)]
    found = differentiate(builder, [(out, seed)], wanted)
    results = {"out": out}
    results.update({f"d{x.meta['key']}": g for x, g in found.items() if g is not None})
    return builder.finish(results)


def run(cell: Cell, values: dict[str, Any]) -> dict[str, Tensor]:
    sizes = Sizes(SIZES, torch.device("cpu"), torch.float64)
    known = {"sizes": sizes, **values}
    return fx.GraphModule({}, cell.graph)(*(known[name] for name in cell.placeholders))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivative_equals_autograd(case: Case) -> None:
    values = draw_all(case)
    cell = gradient_cell(case)
    verify_cell(cell, "differentiate")
    sizes = Sizes(SIZES, torch.device("cpu"), torch.float64)
    want = case.fn(*((sizes,) if case.fn in SIZED else ()), *values, **case.attrs)
    seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(4), dtype=want.dtype)
    tensors = {f"x{at}": x for at, x in enumerate(values) if isinstance(x, Tensor)}
    with torch.no_grad():
        got = run(cell, {**tensors, "seed": seed})
    torch.testing.assert_close(got["out"], want.detach(), rtol=1e-13, atol=1e-13)
    found = torch.autograd.grad(want, list(tensors.values()), seed, allow_unused=True)
    for (name, x), gradient in zip(tensors.items(), found, strict=True):
        gradient = torch.zeros_like(x) if gradient is None else gradient
        mine = got.get(f"d{name}", torch.zeros_like(x))
        torch.testing.assert_close(mine, gradient, rtol=1e-11, atol=1e-11, msg=f"d{name}")


def test_derivative_of_a_selection_goes_to_the_branch_taken() -> None:
    mask = torch.tensor([True, False, True, True, False, False])
    for a, b in ((C, C), (C, 2.0), (0.5, C)):
        builder = Builder()
        chosen = builder.placeholder("mask", C, "valid", mask=True)
        operands = [
            x if isinstance(x, float) else builder.placeholder(name, x, "input")
            for name, x in (("a", a), ("b", b))
        ]
        out = builder.emit(ops.where, chosen, *operands)
        seed = builder.placeholder("seed", C, "grad_output")
        nodes = [x for x in operands if isinstance(x, fx.Node)]
        found = differentiate(builder, [(out, seed)], nodes)
        cell = builder.finish({f"d{n.meta['key']}": g for n, g in found.items()})  # type: ignore[misc]
        seed_value = torch.arange(1.0, 7.0, dtype=torch.float64)
        got = run(cell, {"mask": mask, "a": seed_value, "b": seed_value, "seed": seed_value})
        for name, gradient in got.items():
            taken = mask if name == "da" else ~mask
            assert torch.equal(gradient, torch.where(taken, seed_value, 0.0)), name


def test_the_gradient_of_an_equal_pair_goes_to_the_first() -> None:
    for fn in (ops.maximum, ops.minimum):
        cell = gradient_cell(Case(fn, (C, C)))
        x = torch.zeros(6, dtype=torch.float64)
        got = run(cell, {"x0": x, "x1": x, "seed": x + 1})
        assert torch.equal(got["dx0"], x + 1) and torch.equal(got["dx1"], x)


def test_every_operator_has_a_derivative_or_is_known_to_have_none() -> None:
    for fn, info in OPERATORS.items():
        none = info.kind in ("mask", "source", "cast") or fn in CONSTANT
        assert (fn in RULES) != none, info.name
    covered = {case.fn for case in CASES} | {ops.where}
    assert covered == set(RULES)


def test_constants_stop_the_gradient() -> None:
    for fn in CONSTANT:
        builder = Builder()
        x = builder.placeholder("x", C, "input")
        out = builder.emit(fn, x)
        seed = builder.placeholder("seed", C, "grad_output")
        assert differentiate(builder, [(out, seed)], [x]) == {x: None}


def test_gradients_of_a_value_used_twice_are_summed() -> None:
    builder = Builder()
    x = builder.placeholder("x0", CK, "input")
    y = builder.emit(ops.mul, builder.emit(ops.exp, x), builder.emit(ops.tanh, x))
    total = builder.emit(ops.total, y, dim=-1)
    seed = builder.placeholder("seed", C, "grad_output")
    (gradient,) = differentiate(builder, [(total, seed), (y, y)], [x]).values()
    assert gradient is not None
    cell = builder.finish({"dx": gradient})
    value = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(6, dtype=torch.float64)
    out = value.exp() * value.tanh()
    (want,) = torch.autograd.grad((out.sum(-1), out), value, (ones, out.detach()))
    with torch.no_grad():
        torch.testing.assert_close(run(cell, {"x0": value, "seed": ones})["dx"], want)


def test_nothing_is_computed_for_what_nobody_wants() -> None:
    builder = Builder()
    x, y = (builder.placeholder(name, CK, "input") for name in "xy")
    out = builder.emit(ops.mul, builder.emit(ops.exp, x), y)
    seed = builder.placeholder("seed", CK, "grad_output")
    (gradient,) = differentiate(builder, [(out, seed)], [y]).values()
    assert gradient is not None
    names = [n.target.__name__ for n in builder.finish({"dy": gradient}).calls]
    assert names == ["exp", "mul"]
