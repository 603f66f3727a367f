"""Spellings of powers.

A constant exponent is one operator. An exponent that is a value is `exp(e * log(x))`, which is a
number only where x is positive; so x must be seen to be no less than zero, and zero has its own
branch with torch's values and gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import fx

from flexla_dist.compiler.intervals import Interval, interval
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.passes.simplify import constant_of
from flexla_dist.compiler.trace.lowering.table import lowering, value_of

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer


_LEAST, _MOST = -3, 4  # whole powers that are products in kernels, their gradients too
_LARGE = 1024


@lowering("pow")
def _pow(t: Tracer, x: Any, exponent: Any) -> Any:
    base, power = t.as_number(t.operand(x)), t.as_number(t.operand(exponent))
    number = constant_of(power)
    if number is not None:
        base = value_of(t, x) if isinstance(base, float) else t.wrap(base)
        return _constant_power(t, base, number)
    power = t.wrap(power)
    fixed = constant_of(base)
    if fixed is not None:
        return _of_number(t, fixed, power)
    if _least(t, base) < 0.0:
        raise t.error(
            "a power whose base may be negative and whose exponent is a value: it is a number only "
            "for whole exponents, which is not known when compiling. Write the exponent as a "
            "constant (x ** 2), make the base positive (x.abs() ** e), or, for a base that you "
            "know to be positive, torch.exp(e * torch.log(x))"
        )
    return _of_value(t, t.wrap(base), power)


def _constant_power(t: Tracer, x: Any, power: float) -> Any:
    """Whole powers are products: nothing is a number where a logarithm of x is none."""
    if power == 0.0:
        return t.wrap(t.builder.expand(1.0, x.dims))
    if power == 1.0:
        return x
    if power == 2.0:
        return t.call("mul", x, x)
    if not power.is_integer() or _LEAST <= power <= _MOST or abs(power) > _LARGE:
        return t.wrap(t.emit(ops.power, x.node, exponent=power))
    if power < 0.0:
        return t.call("div", 1.0, _constant_power(t, x, -power))
    half = _constant_power(t, x, power // 2.0)
    square = t.call("mul", half, half)
    return t.call("mul", square, x) if power % 2.0 else square


def _of_number(t: Tracer, base: float, power: Any) -> Any:
    if base > 0.0:
        return t.call("exp", t.call("mul", power, math.log(base)))
    if base == 0.0:
        rest = t.call("where", power > 0.0, 0.0, math.inf)
        return t.call("where", t.call("eq", power, 0.0), 1.0, rest)
    raise t.error(
        f"{base:g} ** a value: a negative number to a power is a number only for whole exponents, "
        "which is not known when compiling. Multiply a power of the absolute value with a sign"
    )


def _of_value(t: Tracer, x: Any, power: Any) -> Any:
    zero = t.call("eq", x, 0.0)
    inside = t.call("exp", t.call("mul", power, t.call("log", t.call("where", zero, 1.0, x))))
    return t.call("where", zero, _at_zero(t, x, zero, power), inside)


def _at_zero(t: Tracer, x: Any, zero: Any, power: Any) -> Any:
    """0, 1 or infinity; written with x, whose slope at zero is that of the power."""
    root, pole = zero & (power > 0.0) & (power < 1.0), zero & (power < 0.0)
    root_of = t.call("where", root, x, 1.0).sqrt()
    pole_of = t.call("where", pole, x, 1.0).rsqrt()
    steep = t.call("where", root, root_of, t.call("where", pole, pole_of, 1.0))
    flat = t.call("where", power > 1.0, 0.0, x)
    return t.call("where", t.call("ge", power, 1.0), flat, steep)


def _least(t: Tracer, node: fx.Node) -> float:
    """The least value that a node can have, as far as intervals tell."""
    known: dict[fx.Node, Interval] = {}
    for earlier in t.builder.graph.nodes:
        known[earlier] = interval(earlier, known)
        if earlier is node:
            break
    return known[node][0]
