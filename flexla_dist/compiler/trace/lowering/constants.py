"""Spellings of constants whose sizes come from `x.shape`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.trace.lowering.table import LOWERINGS, check_dtype, lowering

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer


def _sizes_of(t: Tracer, given: tuple[Any, ...]) -> tuple[str, ...]:
    sizes = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
    return tuple(t.dim_named(size) for size in sizes)


def _constant(t: Tracer, dims: tuple[str, ...], value: Any, dtype: Any, like: Any = None) -> Any:
    """A constant; without a dtype one of `like`, of a truth value or of a number."""
    number = t.operand(value)
    if not isinstance(number, float):
        raise t.error("a constant made of a value of the chunk; expand the value instead")
    truth = like.dtype is torch.bool if like is not None else isinstance(value, bool)
    if dtype is torch.bool or (dtype is None and truth):
        node = t.builder.expand(1.0 if number else 0.0, dims)
        return t.wrap(t.emit(ops.greater, node, 0.5))
    check_dtype(t, dtype, whole=number.is_integer())
    return t.wrap(t.builder.expand(number, dims))


def _factory(value: float) -> Callable[..., Any]:
    def lower(t: Tracer, *sizes: Any, dtype: Any = None, device: Any = None) -> Any:
        return _constant(t, _sizes_of(t, sizes), value, dtype)

    return lower


def _factory_like(value: float) -> Callable[..., Any]:
    def lower(t: Tracer, x: Any, *, dtype: Any = None, device: Any = None) -> Any:
        return _constant(t, x.dims, value, dtype, x)

    return lower


LOWERINGS["ones"], LOWERINGS["zeros"] = _factory(1.0), _factory(0.0)
LOWERINGS["ones_like"], LOWERINGS["zeros_like"] = _factory_like(1.0), _factory_like(0.0)


@lowering("full")
def _full(t: Tracer, sizes: Any, value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _constant(t, _sizes_of(t, (sizes,)), value, dtype)


def _new(value: float) -> Callable[..., Any]:
    def lower(t: Tracer, x: Any, *sizes: Any, dtype: Any = None, device: Any = None) -> Any:
        return _constant(t, _sizes_of(t, sizes), value, dtype, x)

    return lower


LOWERINGS["new_ones"], LOWERINGS["new_zeros"] = _new(1.0), _new(0.0)


@lowering("new_full")
def _new_full(
    t: Tracer, x: Any, sizes: Any, value: Any, *, dtype: Any = None, device: Any = None
) -> Any:
    return _constant(t, _sizes_of(t, (sizes,)), value, dtype, x)


@lowering("full_like")
def _full_like(t: Tracer, x: Any, value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _constant(t, x.dims, value, dtype, x)


@lowering("eye")
def _eye(t: Tracer, n: Any, m: Any = None, *, dtype: Any = None, device: Any = None) -> Any:
    if m is not None and t.dim_named(m) != t.dim_named(n):
        raise t.error("eye of two different dims; the identity is square")
    check_dtype(t, dtype, whole=True)
    node = t.emit(ops.eye, t.builder.sizes, dim=t.dim_named(n))
    return t.wrap(t.emit(ops.greater, node, 0.5) if dtype is torch.bool else node)


@lowering("arange")
def _arange(
    t: Tracer, first: Any, end: Any = None, *, dtype: Any = None, device: Any = None
) -> Any:
    if end is not None and not (type(first) is int and first == 0):
        raise t.error("arange from another start than 0; add the start: torch.arange(C) + 1")
    check_dtype(t, dtype, whole=dtype is not torch.bool)
    n = first if end is None else end
    return t.wrap(t.emit(ops.iota, t.builder.sizes, dim=t.dim_named(n)))


@lowering("tensor", "as_tensor")
def _tensor(t: Tracer, value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    if isinstance(value, bool | int | float):
        return _constant(t, (), value, dtype)
    raise t.error("torch.tensor of more than one number; declare it in `params` or `scalars`")
