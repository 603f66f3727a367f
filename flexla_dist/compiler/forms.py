"""Values read as sums of products of other values, with the axis that every dim of them lies on.

Contract: reading only; nothing is added to a graph. A *frame* is a list of axes, numbered from 0; a
`View` places every dim of a node on an axis of the frame, at its `first` or `last` entry, or
nowhere (size one). Shape operators disappear in views, so `b[:, None] - b[None, :]` is `b` on axis
0 less `b` on axis 1. A `Form` is a sum of monomials of views with coefficients; what is not linear
is a view of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import dims_of
from flexla_dist.compiler.passes.simplify import constant_of
from flexla_dist.shapes import UNIT_DIM

Place = int | str | None
FIRST, LAST = "first", "last"


@dataclass(frozen=True)
class View:
    """A node with the place of each of its dims."""

    node: fx.Node
    at: tuple[Place, ...]

    @property
    def axes(self) -> frozenset[int]:
        """Axes of the frame along which the value changes."""
        return frozenset(a for a in self.at if isinstance(a, int))

    def moved(self, moves: dict[int, Place]) -> View:
        """The same value with axes renamed."""
        return View(self.node, tuple(moves.get(a, a) if isinstance(a, int) else a for a in self.at))


Monomial = tuple[View, ...]
Form = dict[Monomial, float]


@dataclass(frozen=True)
class Bound:
    """A triangular region: position on axis `hi` less position on axis `lo` is at least `gap`."""

    hi: Place
    lo: Place
    gap: int

    def moved(self, moves: dict[int, Place]) -> Bound:
        """The same region with axes renamed."""
        hi, lo = (moves.get(a, a) if isinstance(a, int) else a for a in (self.hi, self.lo))
        return Bound(hi, lo, self.gap)

    @property
    def complement(self) -> Bound:
        """Everything outside."""
        return Bound(self.lo, self.hi, 1 - self.gap)


def implied(bound: Bound, known: Iterable[Bound]) -> bool | None:
    """Whether the region holds, given others; None if it is open."""
    if bound.hi == bound.lo:
        return bound.gap <= 0
    for other in known:
        if (other.hi, other.lo) == (bound.hi, bound.lo) and other.gap >= bound.gap:
            return True
        if (other.hi, other.lo) == (bound.lo, bound.hi) and other.gap > -bound.gap:
            return False
    return None


# -- views ----------------------------------------------------------------------------------------


def whole(node: fx.Node) -> View:
    """A node whose dims lie on axes 0, 1, ... of its own frame."""
    return view(node, tuple(range(len(dims_of(node)))))


def view(node: fx.Node, at: tuple[Place, ...]) -> View:
    """A node placed; dims of size one lie nowhere."""
    dims = dims_of(node)
    return View(node, tuple(None if d == UNIT_DIM else a for d, a in zip(dims, at, strict=True)))


def strip(v: View, deep: bool = False) -> View:
    """The view without shape operators; `deep` also goes through `select` and `stop_gradient`."""
    while True:
        inner = _strip_once(v, deep)
        if inner is None:
            return v
        v = inner


def _strip_once(v: View, deep: bool) -> View | None:
    node, at = v.node, v.at
    if node.op != "call_function":
        return None
    if node.target is ops.expand:
        return view(node.args[1], at)
    if node.target is ops.stop_gradient and deep:
        return view(node.args[0], at)
    if node.target is ops.unsqueeze:
        cut = len(at) + node.kwargs["dim"]
        return view(node.args[0], at[:cut] + at[cut + 1 :])
    if node.target is ops.squeeze or (node.target is ops.select and deep):
        place = {0: FIRST, -1: LAST}[node.kwargs.get("index", 0)]
        cut = len(at) + 1 + node.kwargs["dim"]
        return view(node.args[0], (*at[:cut], place, *at[cut:]))
    if node.target is ops.permute:
        places: list[Place] = [None] * len(at)
        for i, source in enumerate(node.kwargs["order"]):
            places[source] = at[i]
        return view(node.args[0], tuple(places))
    return None


def operands(v: View) -> list[View | float]:
    """Operands of an elementwise node, placed like it; numbers as numbers."""
    return [view(x, v.at) if isinstance(x, fx.Node) else float(x) for x in v.node.args]


# -- masks ----------------------------------------------------------------------------------------


def triangle(mask: View) -> Bound | None:
    """The region of a mask made of `tri_mask`, if it is one."""
    mask = strip(mask)
    node = mask.node
    if node.target is ops.tri_mask:
        return Bound(mask.at[0], mask.at[1], -node.kwargs["diagonal"])
    if node.target is ops.logical_not:
        inner = triangle(view(node.args[0], mask.at))
        return None if inner is None else inner.complement
    return None


@dataclass(frozen=True)
class Selection:
    """`inside` in a triangular region, `outside` elsewhere."""

    bound: Bound
    inside: View | float
    outside: View | float


def selection(v: View) -> Selection | None:
    """`where` with a triangular mask, `tril` or `triu`, as one thing."""
    node = v.node
    if node.target is ops.tril:
        return Selection(Bound(v.at[0], v.at[1], -node.kwargs["diagonal"]), operands(v)[0], 0.0)
    if node.target is ops.triu:
        return Selection(Bound(v.at[1], v.at[0], node.kwargs["diagonal"]), operands(v)[0], 0.0)
    if node.target is ops.where:
        _, inside, outside = operands(v)
        bound = triangle(view(v.node.args[0], v.at))
        return None if bound is None else Selection(bound, inside, outside)
    return None


# -- forms ----------------------------------------------------------------------------------------


def form(x: View | float, deep: bool = False) -> Form:
    """The value as a sum of monomials; `()` is the constant monomial."""
    if not isinstance(x, View):
        return {(): x} if x else {}
    x = strip(x, deep)
    constant = constant_of(x.node)
    if constant is not None:
        return {(): constant} if constant else {}
    fn = x.node.target
    if fn is ops.neg:
        return scaled(form(operands(x)[0], deep), -1.0)
    if fn in (ops.add, ops.sub):
        a, b = (form(y, deep) for y in operands(x))
        return plus(a, b, -1.0 if fn is ops.sub else 1.0)
    if fn is ops.mul:
        a, b = (form(y, deep) for y in operands(x))
        if len(a) == 1 or len(b) == 1:
            return _times(a, b)
    if fn is ops.div:
        divisor = operands(x)[1]
        value = divisor if not isinstance(divisor, View) else constant_of(divisor.node)
        if value:
            return scaled(form(operands(x)[0], deep), 1.0 / value)
    return {(x,): 1.0}


def plus(a: Form, b: Form, factor: float = 1.0) -> Form:
    """a + factor * b, without terms that cancel."""
    out = dict(a)
    for monomial, value in b.items():
        total = out.get(monomial, 0.0) + factor * value
        if total:
            out[monomial] = total
        else:
            out.pop(monomial, None)
    return out


def scaled(a: Form, factor: float) -> Form:
    """factor * a."""
    return {m: factor * v for m, v in a.items()}


def _times(a: Form, b: Form) -> Form:
    out: Form = {}
    for m, v in a.items():
        for n, w in b.items():
            out = plus(out, {sort_monomial((*m, *n)): v * w})
    return out


def sort_monomial(views: Iterable[View]) -> Monomial:
    """Factors in a fixed order, so that equal products compare equal."""
    return tuple(sorted(views, key=lambda v: (v.node.name, str(v.at))))


def axes_of(monomial: Monomial) -> frozenset[int]:
    """Axes along which a monomial changes."""
    return frozenset().union(*(v.axes for v in monomial))


def moved(a: Form, moves: dict[int, Place]) -> Form:
    """The form with axes renamed."""
    return {sort_monomial(v.moved(moves) for v in m): value for m, value in a.items()}
