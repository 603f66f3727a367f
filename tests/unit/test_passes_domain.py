"""Every plain spelling of a domain operator is recognised, and means what it meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as tnf

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.passes.domain import refuse_inverses
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.errors import TraceError
from flexla_dist.spec import functional as F

from .cells import cell_of, data, names, rewritten, run, spec_of

Expression = Callable[[Any, Any], Any]
BARE = {"exp", "where", "inverse", "total", "tri_mask"}


def check(expression: Expression, operator: str, forbidden: set[str] = BARE) -> list[str]:
    """Plain and rewritten forms agree and the operator is there, the plain one is not."""
    plain = cell_of(expression)
    cell = rewritten(plain)
    for seed in (0, 1):
        values = data(seed)
        expected, got = run(plain, values)["value"], run(cell, values)["value"]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    found = names(cell)
    assert operator in found, found
    assert not forbidden & set(found), found
    return found


# -- masks ----------------------------------------------------------------------------------------


def rows(x: Any) -> Any:
    return torch.arange(x.q.shape[0])[:, None]


def cols(x: Any) -> Any:
    return torch.arange(x.q.shape[0])[None, :]


def ones(x: Any, dtype: Any = None) -> Any:
    return torch.ones(x.q.shape[0], x.q.shape[0], dtype=dtype)


def pairs(x: Any) -> Any:
    return x.q @ x.k.T


LOWER: dict[str, tuple[Expression, int]] = {
    "row >= col": (lambda x, p: torch.where(rows(x) >= cols(x), pairs(x), 0.0), 0),
    "row > col": (lambda x, p: torch.where(rows(x) > cols(x), pairs(x), 0.0), -1),
    "col <= row": (lambda x, p: torch.where(cols(x) <= rows(x), pairs(x), 0.0), 0),
    "col < row": (lambda x, p: torch.where(cols(x) < rows(x), pairs(x), 0.0), -1),
    "row - col >= 0": (lambda x, p: torch.where(rows(x) - cols(x) >= 0, pairs(x), 0.0), 0),
    "row - col > 1": (lambda x, p: torch.where(rows(x) - cols(x) > 1, pairs(x), 0.0), -2),
    "col + 1 <= row": (lambda x, p: torch.where(cols(x) + 1 <= rows(x), pairs(x), 0.0), -1),
    "not col > row": (lambda x, p: torch.where(~(cols(x) > rows(x)), pairs(x), 0.0), 0),
    "swapped branches": (lambda x, p: torch.where(cols(x) > rows(x), 0.0, pairs(x)), 0),
    "tril of boolean ones": (
        lambda x, p: torch.where(ones(x, torch.bool).tril(), pairs(x), 0.0),
        0,
    ),
    "triu of boolean ones": (
        lambda x, p: pairs(x).masked_fill(torch.triu(ones(x, torch.bool), 0), 0),
        -1,
    ),
    "triu of ones, bool": (
        lambda x, p: pairs(x).masked_fill(torch.triu(ones(x), 1).bool(), 0.0),
        0,
    ),
    "tril == 0": (lambda x, p: pairs(x).masked_fill(torch.tril(ones(x)) == 0, 0.0), 0),
    "tril > 0.5": (lambda x, p: torch.where(torch.tril(ones(x), -1) > 0.5, pairs(x), 0.0), -1),
    "ones_like tril > 0": (
        lambda x, p: torch.where(torch.ones_like(pairs(x)).tril() > 0, pairs(x), 0.0),
        0,
    ),
    "times tril of ones": (lambda x, p: pairs(x) * ones(x).tril(), 0),
    "ones times": (lambda x, p: torch.tril(ones(x), -1) * pairs(x), -1),
    "times float mask": (lambda x, p: pairs(x) * (rows(x) >= cols(x)).float(), 0),
    "times mask": (lambda x, p: pairs(x) * (rows(x) >= cols(x)), 0),
    "times mask to float32": (
        lambda x, p: (rows(x) > cols(x)).to(torch.float32) * pairs(x),
        -1,
    ),
    "1 - triu": (lambda x, p: pairs(x) * (1 - torch.triu(ones(x), 1)), 0),
    "tril less identity": (
        lambda x, p: pairs(x) * (ones(x).tril() - torch.eye(x.q.shape[0])),
        -1,
    ),
    "transposed mask": (lambda x, p: torch.where((rows(x) <= cols(x)).T, pairs(x), 0.0), 0),
    "transposed ones": (lambda x, p: pairs(x) * torch.triu(ones(x)).T, 0),
    "and": (
        lambda x, p: torch.where((rows(x) >= cols(x)) & (rows(x) > cols(x)), pairs(x), 0.0),
        -1,
    ),
    "not or": (
        lambda x, p: torch.where(~((rows(x) < cols(x)) | (rows(x) == cols(x))), pairs(x), 0.0),
        -1,
    ),
    "tril of tril": (lambda x, p: pairs(x).tril().tril(-1), -1),
    "where in tril": (
        lambda x, p: torch.where(rows(x) >= cols(x), pairs(x), -torch.inf).tril(-1),
        -1,
    ),
    "transposed": (lambda x, p: torch.triu(x.k @ x.q.T).T, 0),
}


@pytest.mark.parametrize("name", LOWER)
def test_masked_values_are_tril(name: str) -> None:
    expression, diagonal = LOWER[name]
    cell = rewritten(cell_of(expression))
    found = names(cell)
    if name != "not or":
        assert not {"where", "greater", "greater_equal", "tri_mask", "triu"} & set(found), found
        (node,) = [n for n in cell.calls if n.target is ops.tril]
        assert node.kwargs["diagonal"] == diagonal
    values = data()
    expected = (values["q"] @ values["k"].T).tril(diagonal)
    torch.testing.assert_close(run(cell, values)["value"], expected, rtol=0, atol=0)


# -- decays between pairs of tokens ---------------------------------------------------------------


def gap(b: Any) -> Any:
    return b[:, None] - b[None, :]


def sums(x: Any) -> tuple[Any, Any]:
    return x.g.cumsum(0), rows(x) >= cols(x)


MATRIX: dict[str, Expression] = {
    "tril exp": lambda x, p: torch.tril(torch.exp(gap(x.g.cumsum(0)))),
    "exp tril tril": lambda x, p: gap(x.g.cumsum(0)).tril().exp().tril(),
    "negated": lambda x, p: torch.exp(-(x.g.cumsum(0)[None, :] - x.g.cumsum(0)[:, None])).tril(),
    "where": lambda x, p: torch.where(sums(x)[1], gap(sums(x)[0]).exp(), 0.0),
    "exp where -inf": lambda x, p: torch.where(sums(x)[1], gap(sums(x)[0]), -torch.inf).exp(),
    "exp where large": lambda x, p: torch.where(sums(x)[1], gap(sums(x)[0]), -1e30).exp(),
    "masked_fill -inf": lambda x, p: (
        gap(x.g.cumsum(0)).masked_fill(~ones(x, torch.bool).tril(), float("-inf")).exp()
    ),
    "masked_fill triu": lambda x, p: (
        gap(x.g.cumsum(0)).masked_fill(torch.triu(ones(x), 1) == 1, -1e9).exp()
    ),
    "masked_fill 0 after": lambda x, p: gap(x.g.cumsum(0)).exp().masked_fill(rows(x) < cols(x), 0),
    "additive mask": lambda x, p: (gap(x.g.cumsum(0)) + ones(x).tril().log()).exp(),
    "additive where": lambda x, p: (
        gap(x.g.cumsum(0)) + torch.where(rows(x) >= cols(x), 0.0, -1e30)
    ).exp(),
    "ones before": lambda x, p: ones(x).tril() * gap(x.g.cumsum(0)).exp(),
    "masked gap, then mask": lambda x, p: (
        torch.where(sums(x)[1], gap(sums(x)[0]), 0.0).exp() * ones(x).tril()
    ),
    "factored": lambda x, p: torch.tril(
        x.g.cumsum(0).exp()[:, None] * (-x.g.cumsum(0)).exp()[None, :]
    ),
    "factored, divided": lambda x, p: torch.tril(
        x.g.cumsum(0).exp()[:, None] / x.g.cumsum(0).exp()[None, :]
    ),
    "outer": lambda x, p: torch.outer(x.g.cumsum(0).exp(), (-x.g.cumsum(0)).exp()).tril(),
    "scaled gate": lambda x, p: torch.exp(p.scale * gap(x.g.cumsum(0))).tril(),
    "gate times number": lambda x, p: torch.exp(0.5 * gap(x.g.cumsum(0))).tril(),
    "base two": lambda x, p: torch.exp2(gap(x.g.cumsum(0))).tril(),
    "unsqueezed": lambda x, p: (
        (x.g.cumsum(0).unsqueeze(1) - x.g.cumsum(-1).unsqueeze(0)).exp().tril()
    ),
    "through the end": lambda x, p: torch.tril(
        (x.g.cumsum(0) - x.g.sum()).exp()[:, None] * (x.g.sum() - x.g.cumsum(0)).exp()[None, :]
    ),
}


@pytest.mark.parametrize("name", MATRIX)
def test_decay_matrix(name: str) -> None:
    found = check(MATRIX[name], "decay_matrix", BARE - {"total"})
    assert "tril" not in found


STRICT: dict[str, Expression] = {
    "tril": lambda x, p: torch.tril(torch.exp(gap(x.g.cumsum(0))), -1),
    "where": lambda x, p: torch.where(rows(x) > cols(x), gap(x.g.cumsum(0)).exp(), 0.0),
    "exp where": lambda x, p: gap(x.g.cumsum(0)).masked_fill(rows(x) <= cols(x), -torch.inf).exp(),
    "both": lambda x, p: gap(x.g.cumsum(0)).tril(-1).exp().tril(-1),
    "exclusive": lambda x, p: torch.tril(
        ((x.g.cumsum(0) - x.g)[:, None] - x.g.cumsum(0)[None, :]).exp(), -1
    ),
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_decay_matrix(name: str) -> None:
    check(STRICT[name], "decay_matrix")
    (node,) = [n for n in rewritten(cell_of(STRICT[name])).calls if n.target is ops.decay_matrix]
    assert node.kwargs["strict"] is True


def test_second_diagonal_keeps_its_triangle() -> None:
    found = check(lambda x, p: torch.tril(gap(x.g.cumsum(0)).exp(), -2), "decay_matrix")
    assert "tril" in found


SCALAR_SCORES: dict[str, Expression] = {
    "product": lambda x, p: torch.tril(pairs(x) * gap(x.g.cumsum(0)).exp()),
    "product, scaled": lambda x, p: (p.scale * pairs(x) * gap(x.g.cumsum(0)).exp() / 3).tril(),
    "beta": lambda x, p: -torch.tril(x.beta[:, None] * pairs(x) * gap(x.g.cumsum(0)).exp(), -1),
    "masked product": lambda x, p: pairs(x) * gap(x.g.cumsum(0)).exp().tril(),
    "factored operands": lambda x, p: torch.tril(
        (x.q * x.g.cumsum(0).exp()[:, None]) @ (x.k * (-x.g.cumsum(0)).exp()[:, None]).mT
    ),
    "factored, divided": lambda x, p: torch.tril(
        (x.q * x.g.cumsum(0).exp()[:, None]) @ (x.k / x.g.cumsum(0).exp()[:, None]).mT, -1
    ),
    "factored outside": lambda x, p: torch.tril(
        x.g.cumsum(0).exp()[:, None] * pairs(x) * (-x.g.cumsum(0)).exp()[None, :]
    ),
    "einsum": lambda x, p: torch.einsum("ik,jk,ij->ij", x.q, x.k, gap(x.g.cumsum(0)).exp().tril()),
    "sum of products": lambda x, p: torch.tril(
        (x.q[:, None] * x.k[None] * gap(x.g.cumsum(0)).exp()[..., None]).sum(-1)
    ),
}


@pytest.mark.parametrize("name", SCALAR_SCORES)
def test_scalar_decay_of_scores(name: str) -> None:
    found = check(SCALAR_SCORES[name], "decay_matrix")
    assert "matmul" in found and "tril" not in found


def vector(x: Any) -> Any:
    return gap(x.gk.cumsum(0))


def mask3(x: Any) -> Any:
    return (rows(x) >= cols(x))[:, :, None]


SCORES: dict[str, Expression] = {
    "sum then tril": lambda x, p: (
        (x.q[:, None, :] * x.k[None, :, :] * vector(x).exp()).sum(-1).tril()
    ),
    "einsum then tril": lambda x, p: (
        torch.einsum("ik,jk,ijk->ij", x.q, x.k, vector(x).exp()).tril()
    ),
    "einsum of masked": lambda x, p: torch.einsum(
        "ik,jk,ijk->ij", x.q, x.k, torch.where(mask3(x), vector(x).exp(), 0.0)
    ),
    "einsum of -inf": lambda x, p: torch.einsum(
        "ik,jk,ijk->ij", x.q, x.k, vector(x).masked_fill(~mask3(x), -torch.inf).exp()
    ),
    "einsum transposed": lambda x, p: torch.einsum(
        "ci,di,icd->cd", x.q, x.k, vector(x).permute(2, 0, 1).exp()
    ).tril(),
    "positions in three dims": lambda x, p: torch.einsum(
        "ik,jk,ijk->ij", x.q, x.k, torch.where(
            torch.arange(x.q.shape[0])[:, None, None] >= torch.arange(x.q.shape[0])[None, :, None],
            vector(x), -torch.inf,
        ).exp(),
    ),
    "scaled": lambda x, p: p.scale * torch.tril(
        (x.q[:, None] * x.k[None] * vector(x).exp()).sum(-1) * x.beta[:, None]
    ),
    "factored": lambda x, p: torch.tril(
        (x.q * x.gk.cumsum(0).exp()) @ (x.k * (-x.gk.cumsum(0)).exp()).mT
    ),
    "factored, divided": lambda x, p: torch.tril(
        (x.q * p.scale * x.gk.cumsum(0).exp()) @ (x.k / x.gk.cumsum(0).exp()).T
    ),
    "factored, beta": lambda x, p: torch.where(
        rows(x) >= cols(x),
        (x.beta[:, None] * x.q * x.gk.cumsum(0).exp()) @ (x.k * torch.exp(-x.gk.cumsum(0))).T,
        0.0,
    ),
    "factored in the sum": lambda x, p: torch.tril(torch.einsum(
        "ik,jk->ij", x.q * x.gk.cumsum(0).exp(), x.k * (-x.gk.cumsum(0)).exp()
    )),
    "vector and scalar": lambda x, p: torch.tril(
        (x.q * (x.gk.cumsum(0) + x.g.cumsum(0)[:, None]).exp())
        @ (x.k * (-x.gk.cumsum(0) - x.g.cumsum(0)[:, None]).exp()).T
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_decay_scores(name: str) -> None:
    found = check(SCORES[name], "decay_scores")
    assert "tril" not in found


STRICT_SCORES: dict[str, Expression] = {
    "sum": lambda x, p: torch.tril((x.q[:, None] * x.k[None] * vector(x).exp()).sum(-1), -1),
    "factored": lambda x, p: torch.tril(
        (x.q * x.gk.cumsum(0).exp()) @ (x.k * (-x.gk.cumsum(0)).exp()).mT, -1
    ),
    "exclusive": lambda x, p: torch.tril(
        (x.q * (x.gk.cumsum(0) - x.gk).exp()) @ (x.k * (-x.gk.cumsum(0)).exp()).mT, -1
    ),
}


@pytest.mark.parametrize("name", STRICT_SCORES)
def test_strict_decay_scores(name: str) -> None:
    check(STRICT_SCORES[name], "decay_scores")
    cell = rewritten(cell_of(STRICT_SCORES[name]))
    (node,) = [n for n in cell.calls if n.target is ops.decay_scores]
    assert node.kwargs["strict"] is True
    assert (node.args[2] is node.args[3]) == (name != "exclusive")


def test_an_exclusive_sum_needs_the_strict_triangle() -> None:
    """With the diagonal, exp(-g) grows: no domain operator is exact for it, the spelling stays."""
    cell = rewritten(
        cell_of(
            lambda x, p: torch.tril(
                (x.q * (x.gk.cumsum(0) - x.gk).exp()) @ (x.k * (-x.gk.cumsum(0)).exp()).mT
            )
        )
    )
    assert "decay_scores" not in names(cell)


def test_one_gate_stays_one_node() -> None:
    cell = rewritten(cell_of(SCORES["factored"]))
    (node,) = [n for n in cell.calls if n.target is ops.decay_scores]
    assert node.args[2] is node.args[3]


# -- scan -----------------------------------------------------------------------------------------


def mask_scan(x: Any) -> Any:
    return (rows(x) >= cols(x))[:, :, None]


SCAN: dict[str, Expression] = {
    "einsum of masked": lambda x, p: torch.einsum(
        "ijd,jd->id", torch.where(mask_scan(x), gap(x.gd.cumsum(0)).exp(), 0.0), x.x
    ),
    "einsum of -inf": lambda x, p: torch.einsum(
        "ijd,jd->id", gap(x.gd.cumsum(0)).masked_fill(~mask_scan(x), -torch.inf).exp(), x.x
    ),
    "sum": lambda x, p: (
        torch.where(mask_scan(x), gap(x.gd.cumsum(0)), -torch.inf).exp() * x.x[None]
    ).sum(1),
    "weighted": lambda x, p: torch.einsum(
        "ijd,jd,id->id", gap(x.gd.cumsum(0)).masked_fill(~mask_scan(x), -torch.inf).exp(),
        x.x * x.beta[:, None], torch.sigmoid(x.x),
    ),
    "strict": lambda x, p: torch.einsum(
        "ijd,jd->id",
        torch.where((rows(x) > cols(x))[:, :, None], gap(x.gd.cumsum(0)), -torch.inf).exp(), x.x,
    ),
    "exclusive": lambda x, p: torch.einsum(
        "ijd,jd->id",
        torch.where(
            (rows(x) > cols(x))[:, :, None],
            (x.gd.cumsum(0) - x.gd)[:, None] - x.gd.cumsum(0)[None], -torch.inf,
        ).exp(), x.x,
    ),
    "scaled gate": lambda x, p: torch.einsum(
        "ijd,jd->id",
        torch.where(mask_scan(x), p.scale * gap(x.gd.cumsum(0)), -torch.inf).exp(), x.x,
    ),
    "factored": lambda x, p: x.gd.cumsum(0).exp() * (x.x * (-x.gd.cumsum(0)).exp()).cumsum(0),
    "factored, divided": lambda x, p: (
        (x.x / x.gd.cumsum(0).exp()).cumsum(0) * x.gd.cumsum(0).exp() * p.scale
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCAN)
def test_decay_scan(name: str) -> None:
    check(SCAN[name], "decay_scan")


def test_a_scan_needs_a_running_sum() -> None:
    """exp(b_r - b_s) with b that is no running sum has no gate to scan with."""
    cell = rewritten(
        cell_of(
            lambda x, p: torch.einsum(
                "ijd,jd->id", torch.where(mask_scan(x), gap(x.gd).exp(), 0.0), x.x
            )
        )
    )
    assert "decay_scan" not in names(cell)


def test_a_scalar_scan_is_a_matrix_product() -> None:
    found = check(
        lambda x, p: torch.einsum(
            "ij,jd->id", torch.where(rows(x) >= cols(x), gap(x.g.cumsum(0)), -torch.inf).exp(), x.x
        ),
        "decay_matrix",
    )
    assert "matmul" in found


# -- sums of products -----------------------------------------------------------------------------


def test_a_sum_of_products_is_a_matrix_product() -> None:
    found = check(lambda x, p: (x.q[:, None, :] * x.k[None, :, :]).sum(-1).tril(), "matmul")
    assert "unsqueeze" not in found
    found = check(lambda x, p: (x.k[:, :, None] * x.v[:, None, :]).sum(0), "matmul")
    assert "unsqueeze" not in found


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, p: torch.diag(x.beta) @ x.v,
        lambda x, p: (torch.eye(x.q.shape[0]) * x.g.exp()[None, :]) @ x.v,
        lambda x, p: x.v.T @ torch.diag(x.beta * p.scale),
        lambda x, p: -torch.eye(x.q.shape[0]) @ x.v,
    ],
)
def test_a_diagonal_matrix_scales(expression: Expression) -> None:
    check(expression, "mul", {"matmul", "eye"})


# -- triangular inverse ---------------------------------------------------------------------------


def lower(x: Any) -> Any:
    return (x.beta[:, None] * 0.1 * x.k @ x.k.T).tril(-1)


def eye(x: Any) -> Any:
    return torch.eye(x.k.shape[0])


INVERSE: dict[str, Expression] = {
    "eye + L": lambda x, p: torch.linalg.inv(eye(x) + lower(x)),
    "L + eye": lambda x, p: torch.inverse(lower(x) + eye(x)),
    "eye - L": lambda x, p: torch.linalg.inv(eye(x) - lower(x)),
    "two triangles": lambda x, p: torch.linalg.inv(eye(x) + lower(x) - pairs(x).tril(-2) * 0.1),
    "masked": lambda x, p: torch.linalg.inv(
        eye(x) + torch.where(rows(x) > cols(x), 0.1 * pairs(x), 0.0)
    ),
    "strict decay": lambda x, p: torch.linalg.inv(
        eye(x)
        + 0.1 * x.beta[:, None] * pairs(x) * F.decay_matrix(x.g.cumsum(0), x.g.cumsum(0), True)
    ),
    "plain decay": lambda x, p: torch.linalg.inv(
        eye(x) + torch.tril(0.1 * x.beta[:, None] * pairs(x) * gap(x.g.cumsum(0)).exp(), -1)
    ),
    "solve_triangular": lambda x, p: torch.linalg.solve_triangular(
        eye(x) + lower(x), x.v, upper=False
    ),
    "unitriangular": lambda x, p: torch.linalg.solve_triangular(
        lower(x), x.v, upper=False, unitriangular=True
    ),
    "solve": lambda x, p: torch.linalg.solve(eye(x) + lower(x), x.v),
    "tril argument": lambda x, p: F.unit_tril_inverse(lower(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", INVERSE)
def test_unit_triangular_inverse(name: str) -> None:
    found = check(INVERSE[name], "unit_tril_inverse", {"inverse", "eye", "exp"})
    assert "tril" not in found or name in ("two triangles", "eye - L")


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, p: torch.linalg.inv(eye(x) + x.k @ x.k.T),
        lambda x, p: torch.linalg.inv(2.0 * eye(x) + lower(x)),
        lambda x, p: torch.linalg.inv(lower(x)),
    ],
)
def test_other_inverses_are_refused(expression: Expression) -> None:
    spec = spec_of(expression)
    with pytest.raises(TraceError, match="unit lower triangular") as caught:
        compile_graphs(spec)
    message = str(caught.value)
    assert "unit_tril_inverse(A)" in message and "example.chunk_mode" in message
    assert "test_passes_domain.py" in message and "torch.linalg.inv(" in message


def test_no_inverse_no_refusal() -> None:
    expression: Expression = lambda x, p: tnf.softplus(x.q)  # noqa: E731
    refuse_inverses(rewritten(cell_of(expression)), spec_of(expression))
