"""Spellings of products, triangular systems and domain operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.trace.lowering.movement import reduced
from flexla_dist.compiler.trace.lowering.table import LOWERINGS, lowering, value_of

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer


@lowering("matmul")
def _matmul(t: Tracer, a: Any, b: Any) -> Any:
    a, b = value_of(t, a), value_of(t, b)
    if len(a.dims) == 1 and len(b.dims) == 1:
        return t.call("sum", t.call("mul", a, b), 0)
    if len(a.dims) == 1:
        return t.call("matmul", a[None, :], b).squeeze(0)
    if len(b.dims) == 1:
        return t.call("matmul", a, b[:, None]).squeeze(-1)
    return t.wrap(t.emit(ops.matmul, a.node, b.node))


@lowering("dot", "inner")
def _dot(t: Tracer, a: Any, b: Any) -> Any:
    return t.call("matmul", a, b)


@lowering("outer", "ger")
def _outer(t: Tracer, a: Any, b: Any) -> Any:
    return t.call("mul", a[:, None], b[None, :])


@lowering("einsum")
def _einsum(t: Tracer, equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or len(terms) != len(operands):
        raise t.error(
            f"einsum {equation!r}: write it with '->', without '...', one term an operand"
        )
    for term, x in zip(terms, operands, strict=True):
        if len(term) != len(x.dims) or len(set(term)) != len(term):
            raise t.error(f"einsum {equation!r}: term {term!r} does not fit {len(x.dims)} dims")
    if len(set(out)) != len(out) or not set(out) <= set("".join(terms)):
        raise t.error(
            f"einsum {equation!r}: the result {out!r} may have each letter once, of those that the "
            "operands have"
        )
    if len(terms) == 2 and _is_matrix_product(terms, out):
        return _einsum_matmul(t, terms, out, operands)
    letters = out + "".join(sorted(set("".join(terms)) - set(out)))
    product = None
    for term, x in zip(terms, operands, strict=True):
        aligned = _align_letters(t, x, term, letters)
        product = aligned if product is None else t.call("mul", product, aligned)
    summed = list(range(len(out), len(letters)))
    return reduced(t, ops.total, product, summed, False) if summed else product


def _is_matrix_product(terms: list[str], out: str) -> bool:
    a, b = terms
    shared = set(a) & set(b)
    return len(a) == len(b) == len(out) == 2 and len(shared) == 1 and not shared & set(out)


def _einsum_matmul(t: Tracer, terms: list[str], out: str, operands: tuple[Any, ...]) -> Any:
    (a, b), (x, y) = terms, operands
    inner = (set(a) & set(b)).pop()
    x = x if a[1] == inner else x.mT
    y = y if b[0] == inner else y.mT
    product = t.call("matmul", x, y)
    return product if a.replace(inner, "") == out[0] else product.mT


def _align_letters(t: Tracer, x: Any, term: str, letters: str) -> Any:
    order = [term.index(letter) for letter in letters if letter in term]
    if order != sorted(order):
        x = t.call("permute", x, *order)
    for at, letter in enumerate(letters):
        if letter not in term:
            x = t.call("unsqueeze", x, at)
    return x


@lowering("inverse")
def _inverse(t: Tracer, x: Any) -> Any:
    return t.wrap(t.emit(ops.inverse, x.node))


@lowering("solve")
def _solve(t: Tracer, a: Any, b: Any, *, left: bool = True) -> Any:
    if not left:
        raise t.error("solve: only systems from the left")
    return t.call("matmul", t.call("inverse", a), b)


@lowering("diag", "diag_embed")
def _diag(t: Tracer, x: Any) -> Any:
    if len(x.dims) != 1:
        raise t.error(f"{len(x.dims)} dims; diag makes a matrix of a vector")
    eye = t.wrap(t.emit(ops.eye, t.builder.sizes, dim=x.dims[0]))
    return t.call("mul", eye, x[:, None])


@lowering("solve_triangular")
def _solve_triangular(
    t: Tracer, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if upper or not left:
        raise t.error("solve_triangular: only lower triangular systems from the left (upper=False)")
    if unitriangular:
        return t.call("matmul", t.call("unit_tril_inverse", a), b)
    return t.call("matmul", t.call("inverse", t.call("tril", a)), b)


# -- domain operators -----------------------------------------------------------------------------


@lowering("decay_matrix")
def _decay_matrix(t: Tracer, b_row: Any, b_col: Any, strict: bool = False) -> Any:
    return t.wrap(t.emit(ops.decay_matrix, b_row.node, b_col.node, strict=bool(strict)))


@lowering("decay_scores")
def _decay_scores(t: Tracer, q: Any, k: Any, b_row: Any, b_col: Any, strict: bool = False) -> Any:
    nodes = [t.operand(x) for x in (q, k, b_row, b_col)]
    return t.wrap(t.emit(ops.decay_scores, *nodes, strict=bool(strict)))


def _weighted(fn: Callable[..., Any]) -> Callable[..., Any]:
    def lower(t: Tracer, p: Any, x: Any, b_row: Any, b_col: Any, strict: bool = False) -> Any:
        nodes = [t.operand(value) for value in (p, x, b_row, b_col)]
        return t.wrap(t.emit(fn, *nodes, strict=bool(strict)))

    return lower


LOWERINGS["decay_rows"] = _weighted(ops.decay_rows)
LOWERINGS["decay_cols"] = _weighted(ops.decay_cols)


@lowering("decay_scan")
def _decay_scan(t: Tracer, g: Any, x: Any) -> Any:
    return t.wrap(t.emit(ops.decay_scan, t.operand(g), t.operand(x)))


@lowering("unit_tril_inverse")
def _unit_tril_inverse(t: Tracer, x: Any) -> Any:
    return t.wrap(t.emit(ops.unit_tril_inverse, t.operand(x)))
