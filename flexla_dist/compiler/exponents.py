"""Upper bounds of exponents: what a difference of running sums or of a value and its maximum is at
most.

Contract: `Prover.upper(form, dims, known)` returns a number that the form never exceeds in the
region `known`, `inf` if none is found. Three facts carry it. A running sum of steps of one sign is
monotone, so a combination of its values at several places is bounded by the order of the places. A
maximum is at least each of its arguments. A selection is one of its branches, with its region
known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from torch import fx

from flexla_dist.compiler.forms import (
    FIRST,
    LAST,
    Bound,
    Form,
    Monomial,
    Place,
    View,
    form,
    implied,
    operands,
    plus,
    scaled,
    selection,
    sort_monomial,
    view,
)
from flexla_dist.compiler.intervals import ALL, Interval, times
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import dims_of
from flexla_dist.compiler.passes.padding import is_valid_mask
from flexla_dist.compiler.trace.stages import SHIFT
from flexla_dist.shapes import Dims

STEP = "step"  # the place that a running sum sums over
BUDGET = 3000
MAX_PLACES = 6
Position = tuple[Place, int]  # a place and an offset of 0 or -1
Groups = dict[Monomial, dict[Position, float]]


class Prover:
    """Bounds forms of one cell; the shift of log-scaled states undoes at most `log_decay`."""

    def __init__(self, intervals: Mapping[fx.Node, Interval], log_decay: Form | None = None):
        self.intervals = intervals
        self.log_decay = log_decay
        self.budget = 0

    def upper(self, exponent: Form, dims: Dims, known: Sequence[Bound] = ()) -> float:
        """A number that the form does not exceed; axes of the frame have the names `dims`."""
        self.budget = BUDGET
        return self._upper(exponent, dims, tuple(known))

    def _upper(self, exponent: Form, dims: Dims, known: tuple[Bound, ...]) -> float:
        self.budget -= 1
        constant = exponent.get((), 0.0)
        if self.budget < 0 or math.isnan(constant) or constant == math.inf:
            return math.inf
        if constant == -math.inf or not exponent:
            return constant if exponent else 0.0
        exponent = self._unshifted(exponent)
        for monomial, value in exponent.items():
            if len(monomial) == 1:
                found = self._by_cases(exponent, monomial, value, dims, known)
                if found is not None:
                    return found
        best = self._direct(exponent, known)
        for monomial, value in exponent.items():
            if best <= 0.0:
                break
            if len(monomial) == 1:
                for choice in self._choices(monomial[0], value, dims):
                    rest = plus(exponent, {monomial: value}, -1.0)
                    replaced = plus(rest, scaled(form(choice, deep=True), value))
                    best = min(best, self._upper(replaced, dims, known))
        return best

    def _unshifted(self, exponent: Form) -> Form:
        """`log_decay + m - m'` of log-scaled states is at most zero: m' >= m + log_decay."""
        for monomial, value in exponent.items():
            is_shift = len(monomial) == 1 and monomial[0].node.meta.get("key") == SHIFT
            if is_shift and value == 1.0 and self.log_decay is not None:
                return plus(plus(exponent, {monomial: 1.0}, -1.0), self.log_decay, -1.0)
        return exponent

    # -- cases and choices --------------------------------------------------------------------

    def _by_cases(
        self,
        exponent: Form,
        monomial: Monomial,
        value: float,
        dims: Dims,
        known: tuple[Bound, ...],
    ) -> float | None:
        """The worst branch of a selection, or of a maximum that is added; None if it is neither."""
        v = monomial[0]
        rest = plus(exponent, {monomial: value}, -1.0)

        def branch(x: View | float, region: tuple[Bound, ...]) -> float:
            return self._upper(plus(rest, scaled(form(x, deep=True), value)), dims, region)

        found = selection(v)
        if found is not None:
            inside = implied(found.bound, known)
            if inside is not None:
                return branch(found.inside if inside else found.outside, known)
            return max(
                branch(found.inside, (*known, found.bound)),
                branch(found.outside, (*known, found.bound.complement)),
            )
        fn = v.node.target
        if fn is ops.where and not is_valid_mask(v.node.args[0]):
            return max(branch(x, known) for x in operands(v)[1:])
        if fn is (ops.maximum if value > 0 else ops.minimum):
            return max(branch(x, known) for x in operands(v))
        return None

    def _choices(self, v: View, value: float, dims: Dims) -> list[View | float]:
        """Values no greater than a subtracted maximum (no less than an added minimum)."""
        fn = v.node.target
        if fn is (ops.minimum if value > 0 else ops.maximum):
            return operands(v)
        if fn is ops.absolute and value < 0:
            return [operands(v)[0]]
        if fn is not ops.amax or value > 0:
            return []
        x = v.node.args[0]
        at = len(dims_of(x)) + v.node.kwargs["dim"]
        places: list[Place] = [a for a, dim in enumerate(dims) if dim == dims_of(x)[at]]
        return [view(x, (*v.at[:at], place, *v.at[at:])) for place in (*places, FIRST, LAST)]

    # -- running sums and intervals -----------------------------------------------------------

    def _direct(self, exponent: Form, known: tuple[Bound, ...]) -> float:
        """Bound without substitutions."""
        groups, plain = self.grouped(exponent)
        total = 0.0
        for step, places in groups.items():
            sign = self.step_sign(step)
            if sign == 0 or not ordered({p: -sign * c for p, c in places.items()}, known):
                return math.inf
        for monomial, value in plain.items():
            total += value if not monomial else self._scaled_high(monomial, value)
        return total

    def step_sign(self, step: Monomial) -> int:
        """Sign of the steps of a running sum: -1, 1, or 0 if unknown."""
        low, high = self._range(step)
        return -1 if high <= 0.0 else 1 if low >= 0.0 else 0

    def _range(self, monomial: Monomial) -> Interval:
        out: Interval = (1.0, 1.0)
        for v, copies in _counted(monomial):
            own = self.intervals.get(v.node, ALL)
            if copies % 2 == 0:
                own = (0.0, math.inf)
            out = times(out, own)
        return out

    def _scaled_high(self, monomial: Monomial, value: float) -> float:
        return times(self._range(monomial), (value, value))[1]

    def grouped(self, exponent: Form) -> tuple[Groups, Form]:
        """Terms as running sums by their step, and what is left."""
        groups: Groups = {}
        plain: Form = {}
        for monomial, value in exponent.items():
            if not self._accumulate(groups, monomial, value):
                plain[monomial] = value
        for monomial in list(plain):
            for step in groups:
                place = _step_place(monomial, step)
                if place is not None:
                    _put(groups[step], (place, 0), plain[monomial])
                    _put(groups[step], (place, -1), -plain.pop(monomial))
                    break
        return {step: places for step, places in groups.items() if places}, plain

    def _accumulate(self, groups: Groups, monomial: Monomial, value: float) -> bool:
        for i, v in enumerate(monomial):
            if v.node.target not in (ops.cumsum, ops.total):
                continue
            others = monomial[:i] + monomial[i + 1 :]
            at = list(v.at)
            if v.node.target is ops.total:
                dim = len(at) + 1 + v.node.kwargs["dim"]
                at.insert(dim, STEP)
                positions: list[tuple[Position, float]] = [((LAST, 0), 1.0)]
            else:
                dim = len(at) + v.node.kwargs["dim"]
                place, at[dim] = at[dim], STEP
                positions = [((place, 0), 1.0)]
                if v.node.kwargs["reverse"]:
                    positions = [((LAST, 0), 1.0), ((place, -1), -1.0)]
            inner = form(view(v.node.args[0], tuple(at)), deep=True)
            for step, weight in inner.items():
                places = groups.setdefault(sort_monomial((*step, *others)), {})
                for position, sign in positions:
                    _put(places, position, value * weight * sign)
            return True
        return False


def _counted(monomial: Monomial) -> list[tuple[View, int]]:
    return [(v, monomial.count(v)) for v in dict.fromkeys(monomial)]


def _put(places: dict[Position, float], position: Position, value: float) -> None:
    """Add to the weight at a position; before the first step a running sum is zero."""
    if position == (FIRST, -1):
        return
    total = places.get(position, 0.0) + value
    if total:
        places[position] = total
    else:
        places.pop(position, None)


def _step_place(monomial: Monomial, step: Monomial) -> Place:
    """The place at which a monomial is one step of a running sum; None if it is not."""
    places = {a for v in monomial for a in v.at if a is not None}
    for place in sorted(places, key=str):
        marked = sort_monomial(
            View(v.node, tuple(STEP if a == place else a for a in v.at)) for v in monomial
        )
        if marked == step:
            return place
    return None


# -- order of places ------------------------------------------------------------------------------


def ordered(weights: Mapping[Position, float], known: Sequence[Bound]) -> bool:
    """Whether `sum weights[p] * P[p] <= 0` for every P that starts at zero and never increases.

    P[p] is the sum of steps up to p, so a step counts with the weights of all positions at or after
    it; the sum is not positive if no such partial sum is negative, in every possible order of the
    positions.
    """
    positions = list(weights)
    if len(positions) > MAX_PLACES:
        return False
    for order in itertools.permutations(positions):
        pairs = itertools.combinations(order, 2)
        if any(_after(b, a, known) and not _after(a, b, known) for a, b in pairs):
            continue
        partial = 0.0
        for position in order:
            partial += weights[position]
            if partial < -1e-12:
                return False
    return True


def _after(a: Position, b: Position, known: Sequence[Bound]) -> bool:
    """Whether position a is known to be at or after position b."""
    (place_a, off_a), (place_b, off_b) = a, b
    if place_a in (place_b, LAST) or place_b == FIRST:
        return off_a >= off_b
    return any((k.hi, k.lo) == (place_a, place_b) and k.gap + off_a - off_b >= 0 for k in known)
