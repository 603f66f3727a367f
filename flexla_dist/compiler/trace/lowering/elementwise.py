"""Spellings of arithmetic, functions, comparisons and selections."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import is_mask
from flexla_dist.compiler.trace.lowering.table import (
    LOWERINGS,
    axis_of,
    check_dtype,
    is_traced,
    lowering,
    value_of,
)

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer


def _unary(fn: Callable[..., Any]) -> Callable[..., Any]:
    def lower(t: Tracer, x: Any) -> Any:
        return t.wrap(t.emit(fn, value_of(t, x).node))

    return lower


for _name, _fn in {
    "exp": ops.exp,
    "expm1": ops.expm1,
    "log": ops.log,
    "log1p": ops.log1p,
    "sigmoid": ops.sigmoid,
    "logsigmoid": ops.logsigmoid,
    "tanh": ops.tanh,
    "sqrt": ops.sqrt,
    "rsqrt": ops.rsqrt,
    "neg": ops.neg,
    "abs": ops.absolute,
    "sign": ops.sign,
    "sin": ops.sin,
    "cos": ops.cos,
    "detach": ops.stop_gradient,
    "logical_not": ops.logical_not,
}.items():
    LOWERINGS[_name] = _unary(_fn)


def _binary(fn: Callable[..., Any], swap: bool = False) -> Callable[..., Any]:
    def lower(t: Tracer, a: Any, b: Any) -> Any:
        x, y = (t.operand(b), t.operand(a)) if swap else (t.operand(a), t.operand(b))
        if isinstance(x, float) and isinstance(y, float):
            x = t.builder.expand(x, ())
        return t.wrap(t.emit(fn, x, y))

    return lower


for _name, _fn, _swap in (
    ("sub", ops.sub, False),
    ("rsub", ops.sub, True),
    ("div", ops.div, False),
    ("maximum", ops.maximum, False),
    ("minimum", ops.minimum, False),
    ("ge", ops.greater_equal, False),
    ("gt", ops.greater, False),
    ("le", ops.greater_equal, True),
    ("lt", ops.greater, True),
    ("eq", ops.equal, False),
    ("logical_and", ops.logical_and, False),
    ("logical_or", ops.logical_or, False),
):
    LOWERINGS[_name] = _binary(_fn, _swap)


_OF_MASKS = {ops.add: ops.logical_or, ops.mul: ops.logical_and}


def _ordered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Commutative operators keep a number as their second operand."""

    def lower(t: Tracer, a: Any, b: Any, *, alpha: float = 1.0) -> Any:
        x, y = t.operand(a), t.operand(b)
        if is_mask(x) and is_mask(y) and alpha == 1.0:
            return t.wrap(t.emit(_OF_MASKS[fn], x, y))
        if alpha != 1.0:
            y = y * alpha if isinstance(y, float) else t.emit(ops.mul, y, float(alpha))
        if isinstance(x, float):
            x, y = y, x
        if isinstance(x, float):
            x = t.builder.expand(x, ())
        return t.wrap(t.emit(fn, x, y))

    return lower


LOWERINGS["add"], LOWERINGS["mul"] = _ordered(ops.add), _ordered(ops.mul)


@lowering("logical_xor")
def _xor(t: Tracer, a: Any, b: Any) -> Any:
    both = t.call("logical_and", a, b)
    return t.call("logical_and", t.call("logical_or", a, b), t.call("logical_not", both))


@lowering("ne")
def _ne(t: Tracer, a: Any, b: Any) -> Any:
    return t.wrap(t.emit(ops.logical_not, t.call("eq", a, b).node))


@lowering("exp2")
def _exp2(t: Tracer, x: Any) -> Any:
    return t.call("exp", t.call("mul", x, math.log(2.0)))


@lowering("log2")
def _log2(t: Tracer, x: Any) -> Any:
    return t.call("mul", t.call("log", x), 1.0 / math.log(2.0))


@lowering("square")
def _square(t: Tracer, x: Any) -> Any:
    return t.call("mul", x, x)


@lowering("reciprocal")
def _reciprocal(t: Tracer, x: Any) -> Any:
    return t.call("div", 1.0, x)


_EXACT = 20.0  # above it softplus(x) is x, in every type


@lowering("softplus")
def _softplus(t: Tracer, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = value_of(t, x) if beta == 1.0 else t.call("mul", x, beta)
    soft = t.wrap(t.emit(ops.softplus, scaled.node))
    soft = soft if beta == 1.0 else t.call("div", soft, beta)
    if threshold >= _EXACT:
        return soft
    return t.call("where", t.call("gt", scaled, threshold), x, soft)


def _out_of_place(t: Tracer, inplace: bool) -> None:
    if inplace:
        raise t.error("inplace=True is not supported; use the returned value")


@lowering("silu")
def _silu(t: Tracer, x: Any, inplace: bool = False) -> Any:
    _out_of_place(t, inplace)
    return t.call("mul", x, t.call("sigmoid", x))


@lowering("relu")
def _relu(t: Tracer, x: Any, inplace: bool = False) -> Any:
    _out_of_place(t, inplace)
    return t.call("maximum", x, 0.0)


@lowering("elu")
def _elu(t: Tracer, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    _out_of_place(t, inplace)
    negative = t.call("mul", t.call("expm1", t.call("minimum", x, 0.0)), alpha)
    return t.call("where", t.call("gt", x, 0.0), x, negative)


@lowering("clamp")
def _clamp(t: Tracer, x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = t.call("maximum", x, min)
    return x if max is None else t.call("minimum", x, max)


@lowering("clamp_min")
def _clamp_min(t: Tracer, x: Any, min: Any) -> Any:
    return t.call("maximum", x, min)


@lowering("clamp_max")
def _clamp_max(t: Tracer, x: Any, max: Any) -> Any:
    return t.call("minimum", x, max)


@lowering("where")
def _where(t: Tracer, mask: Any, a: Any, b: Any) -> Any:
    mask, a, b = t.operand(mask), t.operand(a), t.operand(b)
    if not is_mask(mask):
        raise t.error("where: the first argument must be a comparison or a mask")
    if isinstance(a, float) and isinstance(b, float):
        a = t.builder.expand(a, mask.meta["dims"])  # type: ignore[union-attr]
    return t.wrap(t.emit(ops.where, mask, a, b))


@lowering("masked_fill")
def _masked_fill(t: Tracer, x: Any, mask: Any, value: Any) -> Any:
    return t.call("where", mask, value, x)


@lowering("clone", "contiguous")
def _unchanged(t: Tracer, x: Any, *_: Any, **__: Any) -> Any:
    """The compiler alone decides about storage."""
    return x


@lowering("float", "double", "to", "type_as")
def _converted(t: Tracer, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The compiler decides types, decays keep full precision; masks become numbers."""
    given = [*args, *kwargs.values()]
    if any(a is torch.bool or (is_traced(a) and is_mask(a.node)) for a in given):
        return t.call("bool", x)
    for dtype in given:
        if isinstance(dtype, torch.dtype):
            check_dtype(t, dtype, whole=is_mask(x.node))
    return t.wrap(t.as_number(t.operand(x)))


@lowering("bool")
def _bool(t: Tracer, x: Any) -> Any:
    return x if is_mask(x.node) else t.call("ne", x, 0.0)


@lowering("normalize")
def _normalize(
    t: Tracer, x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    """Clamped before the root, whose slope at zero is infinite."""
    if p != 2.0:
        raise t.error(f"normalize with p={p}; only the Euclidean norm, p=2, is supported")
    squares = t.call("sum", t.call("mul", x, x), dim=dim, keepdim=True)
    return t.call("mul", x, t.call("rsqrt", t.call("maximum", squares, eps * eps)))


@lowering("softmax")
def _softmax(t: Tracer, x: Any, dim: int, dtype: Any = None) -> Any:
    check_dtype(t, dtype)
    dim = axis_of(t, value_of(t, x), dim)
    peak = t.call("amax", x, dim=dim, keepdim=True).detach()
    weights = t.call("exp", t.call("sub", x, peak))
    return t.call("div", weights, t.call("sum", weights, dim=dim, keepdim=True))
