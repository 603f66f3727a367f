"""Sums over a dim of a product: scores with a decay, the scan within a chunk, or a matrix product.

Contract: `Contraction.read` takes a `total` or `matmul` node apart in a frame whose axes 0 and 1
stay and whose axis 2 is summed. `scores` and `scan` return the domain operator, or None where the
decay does not have the form that the operator is exact for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from flexla_dist.compiler.forms import Bound, Form, View, axes_of, form, moved, plus, scaled, view
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, dims_of
from flexla_dist.compiler.passes.products import (
    Emitter,
    Exponential,
    Product,
    factor,
    split_terms,
)
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims

SUMMED = 2
Factor = tuple[View, int]


def decays(exps: Sequence[Exponential], row: int, col: int) -> tuple[list[Exponential], Form]:
    """Those exponentials that together are a decay from `col` to `row`, and their exponent.

    One that reads both axes is a decay by itself; two that read one axis each are, when the same
    value appears in both with opposite signs: `exp(b_r) * exp(-b_s)`.
    """
    taken: list[Exponential] = []
    exponent: Form = {}
    sides: dict[int, list[Exponential]] = {row: [], col: []}
    for e in exps:
        along = e.axes & {row, col}
        if len(along) == 2 and _separable(e.exponent, row, col):
            taken.append(e)
            exponent = plus(exponent, e.exponent)
        elif len(along) == 1:
            sides[next(iter(along))].append(e)
    for a in sides[row]:
        for c in sides[col]:
            if c not in taken and _opposed(a.exponent, moved(c.exponent, {col: row})):
                taken += [a, c]
                exponent = plus(exponent, plus(a.exponent, c.exponent))
                break
    return taken, exponent


def _separable(exponent: Form, row: int, col: int) -> bool:
    sides = [axes_of(m) & {row, col} for m in exponent]
    return all(len(s) < 2 for s in sides) and {frozenset({row}), frozenset({col})} <= set(sides)


def _opposed(a: Form, c: Form) -> bool:
    return any(m and c.get(m, 0.0) == -value for m, value in a.items())


def required_gap(bounds: Iterable[Bound], row: int, col: int) -> int | None:
    """The gap of all regions together, `row - col >= gap`; None unless they are lower triangles."""
    gaps = []
    for bound in bounds:
        if (bound.hi, bound.lo) != (row, col):
            return None
        gaps.append(bound.gap)
    return max(gaps, default=None)


class Contraction:
    """A sum over axis 2 of a product in a frame of three axes."""

    def __init__(self, builder: Builder, node: fx.Node, product: Product, dims: Dims):
        self.b, self.node, self.product = builder, node, product
        self.emit = Emitter(builder, dims)
        self.dims = dims

    @classmethod
    def read(
        cls, builder: Builder, node: fx.Node, known: Sequence[Bound] = ()
    ) -> Contraction | None:
        """The contraction that a node is, or None."""
        if len(dims_of(node)) != 2 or UNIT_DIM in dims_of(node):
            return None
        if node.target is ops.matmul:
            a, c = node.args
            left, right = factor(view(a, (0, SUMMED)), known), factor(view(c, (SUMMED, 1)), known)
            product = Product(
                left.coefficient * right.coefficient,
                left.plain + right.plain,
                left.exps + right.exps,
                left.bounds + right.bounds,
            )
            summed = dims_of(a)[-1]
        elif node.target is ops.total:
            x, at = node.args[0], len(dims_of(node)) + 1 + node.kwargs["dim"]
            places = (*(0, 1)[:at], SUMMED, *(0, 1)[at:])
            product = factor(view(x, places), known)
            summed = dims_of(x)[at]
        else:
            return None
        if summed == UNIT_DIM:
            return None
        return cls(builder, node, product, (*dims_of(node), summed))

    # -- scores -------------------------------------------------------------------------------

    def scores(self, gap: int | None) -> fx.Node | None:
        """Decayed scores where `row - col >= gap`; None if there is no decay."""
        p = self.product
        if self.dims[:2] != (TOKEN_DIM, TOKEN_DIM) or self.dims[2] == TOKEN_DIM:
            return None
        own = required_gap(p.bounds, 0, 1)
        if own is None and p.bounds:
            return None
        gaps = [g for g in (gap, own) if g is not None]
        if not gaps or max(gaps) < 0:
            return None
        gap = max(gaps)
        taken, exponent = decays(p.exps, 0, 1)
        if not taken:
            return None
        sides = self._sides(p.plain, [e for e in p.exps if e not in taken])
        if sides is None:
            return None
        (rows, cols), outer = sides
        if any(SUMMED in axes_of(m) for m in exponent):
            out = self._vector_scores(rows, cols, exponent, gap)
        else:
            out = self._scalar_scores(rows, cols, exponent, gap)
        if out is None:
            return None
        if gap > 1:
            out = self.b.emit(ops.tril, out, diagonal=-gap)
        around = self.emit.product(outer.plain, outer.exps, (0, 1), p.coefficient)
        return out if around is None else self.b.emit(ops.mul, out, around)

    def _sides(
        self, plain: Sequence[Factor], exps: Sequence[Exponential]
    ) -> tuple[tuple[_Side, _Side], _Side] | None:
        """Factors of the rows, of the columns, and outside of the sum."""
        rows, cols, outer = _Side(), _Side(), _Side()
        for axes, item in _with_axes(plain, exps):
            if SUMMED not in axes:
                side = outer
            elif 1 not in axes:
                side = rows
            elif 0 not in axes:
                side = cols
            else:
                return None
            side.add(item)
        return (rows, cols), outer

    def _operand(self, side: _Side, axes: tuple[int, int]) -> fx.Node:
        node = self.emit.product(side.plain, side.exps, axes)
        return self.b.expand(1.0 if node is None else node, self.emit.named(axes))

    def _vector_scores(self, rows: _Side, cols: _Side, exponent: Form, gap: int) -> fx.Node | None:
        row_terms, col_terms = split_terms(exponent, 1)
        col_terms = moved(scaled(col_terms, -1.0), {1: 0})
        if not _same_gate(row_terms, col_terms, strict=gap > 0):
            return None
        operands = (
            self._operand(rows, (0, SUMMED)),
            self._operand(cols, (1, SUMMED)),
            self.emit.form(row_terms, (0, SUMMED)),
            self.emit.form(col_terms, (0, SUMMED)),
        )
        return self.b.emit(ops.decay_scores, *operands, strict=gap > 0)

    def _scalar_scores(self, rows: _Side, cols: _Side, exponent: Form, gap: int) -> fx.Node:
        pairs = self.b.matmul(self._operand(rows, (0, SUMMED)), self._operand(cols, (SUMMED, 1)))
        return self.b.emit(ops.mul, pairs, scalar_decay(self.emit, exponent, gap))

    # -- scan ---------------------------------------------------------------------------------

    def scan(self) -> fx.Node | None:
        """`sum_s exp(b_r - b_s) x_s` over s <= r, b a running sum: the recurrence of its steps."""
        if self.dims[2] != TOKEN_DIM or TOKEN_DIM not in self.dims[:2]:
            return None
        row = self.dims.index(TOKEN_DIM)
        if self.dims[1 - row] == TOKEN_DIM:
            return None
        p = self.product
        gap = required_gap(p.bounds, row, SUMMED)
        taken, exponent = decays(p.exps, row, SUMMED)
        if gap not in (0, 1) or not any(1 - row in axes_of(m) for m in exponent):
            return None
        outer, inner = _Side(), _Side()
        for axes, item in _with_axes(p.plain, [e for e in p.exps if e not in taken]):
            if {row, SUMMED} <= axes:
                return None
            (inner if SUMMED in axes else outer).add(item)
        scanned = self._scanned(inner, exponent, row, gap)
        if scanned is None:
            return None
        if row == 1:
            scanned = self.b.transpose(scanned)
        around = self.emit.product(outer.plain, outer.exps, (0, 1), p.coefficient)
        return scanned if around is None else self.b.emit(ops.mul, scanned, around)

    def _scanned(self, inner: _Side, exponent: Form, row: int, gap: int) -> fx.Node | None:
        row_terms, col_terms = split_terms(exponent, SUMMED)
        col_terms = moved(scaled(col_terms, -1.0), {SUMMED: row})
        steps = gate_steps(col_terms, row)
        exclusive = steps is not None and row_terms == plus(col_terms, steps, -1.0)
        if steps is None or not (row_terms == col_terms or (exclusive and gap == 1)):
            return None
        axes = (row, 1 - row)
        x = self.emit.product(inner.plain, inner.exps, (SUMMED, 1 - row))
        x = self.b.expand(1.0 if x is None else x, self.emit.named(axes))
        h = self.b.emit(ops.decay_scan, self.emit.form(steps, axes), x)
        if exclusive:
            return self.b.emit(ops.shift, h, dim=-2, by=1)
        return h if gap == 0 else self.b.emit(ops.sub, h, x)

    # -- matrix product -----------------------------------------------------------------------

    def product_of_matrices(self) -> fx.Node | None:
        """A sum of products without a decay: rows times columns, without a third dim."""
        p = self.product
        first, second, outer = _Side(), _Side(), _Side()
        for axes, item in _with_axes(p.plain, p.exps):
            if axes == {0, 1, SUMMED}:
                return None
            side = outer if SUMMED not in axes else second if 1 in axes else first
            side.add(item)
        if not any(0 in a for a in first.axes) or not any(1 in a for a in second.axes):
            return None
        left = self.emit.cut(self._operand(first, (0, SUMMED)), (0, SUMMED), p.bounds)
        right = self.emit.cut(self._operand(second, (SUMMED, 1)), (SUMMED, 1), p.bounds)
        out = self.emit.cut(self.b.matmul(left, right), (0, 1), p.bounds)
        around = self.emit.product(outer.plain, outer.exps, (0, 1), p.coefficient)
        return out if around is None else self.b.emit(ops.mul, out, around)


def _with_axes(
    plain: Iterable[Factor], exps: Iterable[Exponential]
) -> list[tuple[frozenset[int], Factor | Exponential]]:
    """Factors with the axes along which they change."""
    out: list[tuple[frozenset[int], Factor | Exponential]] = []
    out.extend((v.axes, (v, power)) for v, power in plain)
    out.extend((e.axes, e) for e in exps)
    return out


class _Side:
    """Factors that belong together."""

    def __init__(self) -> None:
        self.plain: list[Factor] = []
        self.exps: list[Exponential] = []

    def add(self, item: Factor | Exponential) -> None:
        if isinstance(item, Exponential):
            self.exps.append(item)
        else:
            self.plain.append(item)

    @property
    def axes(self) -> list[frozenset[int]]:
        return [v.axes for v, _ in self.plain] + [e.axes for e in self.exps]


def scalar_decay(emit: Emitter, exponent: Form, gap: int) -> fx.Node:
    """`exp` of a separable exponent on axes 0 and 1 as a domain operator."""
    row_terms, col_terms = split_terms(exponent, 1)
    col_terms = moved(scaled(col_terms, -1.0), {1: 0})
    rows, cols = emit.form(row_terms, (0,)), emit.form(col_terms, (0,))
    return emit.b.emit(ops.decay_matrix, rows, cols, strict=gap > 0)


def gate_steps(terms: Form, row: int) -> Form | None:
    """The gate g of b = cumsum(g), for a form that is a sum of such; None if it is not."""
    steps: Form = {}
    for monomial, value in terms.items():
        sums = [v for v in monomial if v.node.target is ops.cumsum]
        others = tuple(v for v in monomial if v not in sums)
        if len(sums) != 1 or any(row in v.axes for v in others):
            return None
        node, at = sums[0].node, sums[0].at
        if node.kwargs["reverse"] or at[len(at) + node.kwargs["dim"]] != row:
            return None
        inner = form(view(node.args[0], at))
        for m, w in inner.items():
            factors = tuple(sorted((*m, *others), key=lambda v: (v.node.name, str(v.at))))
            steps = plus(steps, {factors: value * w})
    return steps


def _same_gate(rows: Form, cols: Form, strict: bool) -> bool:
    """Whether rows and columns decay by one gate; the strict form may use the exclusive sum."""
    if rows == cols:
        return True
    steps = gate_steps(cols, 0)
    return strict and steps is not None and rows == plus(cols, steps, -1.0)
