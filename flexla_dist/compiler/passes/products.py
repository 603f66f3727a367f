"""A value taken apart into the factors of a product, and put together again from some of them.

Contract: `factor` reads; `Emitter` adds nodes. A product is `coefficient * plain * exps`, zero
outside of its triangular regions. Exponentials keep both their exponent as a form and the view they
came from, so that what no rule claims is emitted as the user wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from flexla_dist.compiler.forms import (
    Bound,
    Form,
    View,
    form,
    implied,
    operands,
    scaled,
    selection,
    strip,
)
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, dims_of
from flexla_dist.compiler.passes.simplify import constant_of
from flexla_dist.shapes import Dims


@dataclass(frozen=True)
class Exponential:
    """exp of `exponent`; `power` -1 when it divided. `view` is the `exp` node as written."""

    view: View
    power: int
    exponent: Form

    @property
    def axes(self) -> frozenset[int]:
        """Axes along which it changes."""
        return self.view.axes


@dataclass
class Product:
    """coefficient * plain * exps inside of the regions `bounds`, zero outside."""

    coefficient: float = 1.0
    plain: list[tuple[View, int]] = field(default_factory=list)
    exps: list[Exponential] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)


def factor(v: View | float, known: Sequence[Bound] = ()) -> Product:
    """Factors of a value that is looked at inside of the regions `known` only."""
    product = Product()
    _factor(v, 1, tuple(known), product)
    return product


def _factor(v: View | float, power: int, known: tuple[Bound, ...], out: Product) -> None:
    if isinstance(v, View):
        v = strip(v)
    constant = v if isinstance(v, float) else constant_of(v.node)
    if constant is not None and (constant != 0.0 or power > 0):
        out.coefficient *= constant**power
        return
    assert isinstance(v, View)
    fn = v.node.target
    if fn is ops.mul:
        for x in operands(v):
            _factor(x, power, known, out)
    elif fn is ops.div:
        a, b = operands(v)
        _factor(a, power, known, out)
        _factor(b, -power, known, out)
    elif fn is ops.neg:
        out.coefficient = -out.coefficient
        _factor(operands(v)[0], power, known, out)
    elif fn is ops.exp:
        _factor_exp(v, power, known, out)
    elif not _factor_selection(v, power, known, out):
        out.plain.append((v, power))


def _factor_exp(v: View, power: int, known: tuple[Bound, ...], out: Product) -> None:
    """Exponents that the region leaves open are masked by a value whose exp is zero."""
    exponent = operands(v)[0]
    found = selection(strip(exponent)) if isinstance(exponent, View) else None
    if found is not None:
        inside = implied(found.bound, known)
        if inside is not None:
            exponent = found.inside if inside else found.outside
        elif power > 0 and vanishes(found.outside):
            out.bounds.append(found.bound)
            exponent = found.inside
        elif power > 0 and vanishes(found.inside):
            out.bounds.append(found.bound.complement)
            exponent = found.outside
    out.exps.append(Exponential(v, power, scaled(form(exponent), float(power))))


def vanishes(x: View | float) -> bool:
    """Whether exp of a constant is exactly zero."""
    value = x if isinstance(x, float) else constant_of(x.node)
    return value is not None and value < 0 and math.exp(value) == 0.0


def _factor_selection(v: View, power: int, known: tuple[Bound, ...], out: Product) -> bool:
    found = selection(v)
    if found is None or power < 0:
        return False
    inside = implied(found.bound, known)
    if inside is not None:
        _factor(found.inside if inside else found.outside, power, known, out)
        return True
    for zero, kept, bound in (
        (found.outside, found.inside, found.bound),
        (found.inside, found.outside, found.bound.complement),
    ):
        if (zero if isinstance(zero, float) else constant_of(zero.node)) == 0.0:
            out.bounds.append(bound)
            _factor(kept, power, (*known, bound), out)
            return True
    return False


class Emitter:
    """Adds views, forms and products to a graph, laid out along chosen axes.

    `dims` names the axes of the frame; a node for the axes (0, 2) has the dims `dims[0], dims[2]`,
    or `1` where the value does not change.
    """

    def __init__(self, builder: Builder, dims: Dims):
        self.b, self.dims = builder, dims

    def named(self, axes: Iterable[int]) -> Dims:
        """Dims of the axes."""
        return tuple(self.dims[a] for a in axes)

    def view(self, v: View, axes: Sequence[int]) -> fx.Node:
        """The value with its dims in the order of `axes`."""
        node, at = v.node, list(v.at)
        for i in reversed(range(len(at))):
            if at[i] is None:
                node = self.b.emit(ops.squeeze, node, dim=i - len(at))
                del at[i]
        order = sorted(range(len(at)), key=lambda i: axes.index(at[i]))
        if order != list(range(len(at))):
            node = self.b.emit(ops.permute, node, order=tuple(i - len(at) for i in order))
        for i, axis in enumerate(axes):
            if axis not in at:
                node = self.b.emit(ops.unsqueeze, node, dim=i - len(dims_of(node)) - 1)
        return node

    def form(self, terms: Form, axes: Sequence[int]) -> fx.Node:
        """A sum of monomials, expanded to all of the axes."""
        total: fx.Node | None = None
        for monomial, value in terms.items():
            node, value = self._monomial(monomial, value, axes)
            if total is None:
                total = self._times(node, value)
            elif value == -1.0:
                total = self.b.emit(ops.sub, total, node)
            else:
                total = self.b.emit(ops.add, total, self._times(node, value))
        return self.b.expand(0.0 if total is None else total, self.named(axes))

    def _monomial(
        self, monomial: Sequence[View], value: float, axes: Sequence[int]
    ) -> tuple[fx.Node, float]:
        if not monomial:
            return self.b.expand(value, self.named(axes)), 1.0
        node = self.view(monomial[0], axes)
        for v in monomial[1:]:
            node = self.b.emit(ops.mul, node, self.view(v, axes))
        return node, value

    def _times(self, node: fx.Node, value: float) -> fx.Node:
        if value == 1.0:
            return node
        return self.b.emit(ops.neg, node) if value == -1.0 else self.b.emit(ops.mul, node, value)

    def product(
        self,
        plain: Iterable[tuple[View, int]],
        exps: Iterable[Exponential],
        axes: Sequence[int],
        coefficient: float = 1.0,
    ) -> fx.Node | None:
        """The product of factors as written, or None for one."""
        out: fx.Node | None = None
        factors = [*plain, *((e.view, e.power) for e in exps)]
        for v, power in sorted(factors, key=lambda item: -item[1]):
            node = self.view(v, axes)
            if out is None:
                out = node if power > 0 else self.b.emit(ops.div, 1.0, node)
            else:
                out = self.b.emit(ops.mul if power > 0 else ops.div, out, node)
        if coefficient == 1.0:
            return out
        if out is None:
            return self.b.expand(coefficient, ("1",) * len(axes))
        return self._times(out, coefficient)

    def cut(self, node: fx.Node, axes: Sequence[int], bounds: Iterable[Bound]) -> fx.Node:
        """A matrix over two axes, zero outside of the regions that lie on them."""
        for bound in bounds:
            if (bound.hi, bound.lo) == tuple(axes):
                node = self.b.expand(node, self.named(axes))
                node = self.b.emit(ops.tril, node, diagonal=-bound.gap)
            elif (bound.lo, bound.hi) == tuple(axes):
                node = self.b.expand(node, self.named(axes))
                node = self.b.emit(ops.triu, node, diagonal=bound.gap)
        return node


def split_terms(exponent: Form, axis: int) -> tuple[Form, Form]:
    """Terms without the axis, and terms with it."""
    without: Form = {}
    along: Form = {}
    for monomial, value in exponent.items():
        has = any(axis in v.axes for v in monomial)
        (along if has else without)[monomial] = value
    return without, along
