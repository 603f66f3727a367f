"""Spellings of reductions, views, indexing and triangles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import is_mask
from flexla_dist.compiler.trace.lowering.table import (
    LOWERINGS,
    axes_of,
    axis_of,
    check_dtype,
    lowering,
    value_of,
)
from flexla_dist.shapes import UNIT_DIM

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer


def reduced(t: Tracer, fn: Any, x: Any, dim: Any, keepdim: bool) -> Any:
    """A reduction over one dim, several, or all (None)."""
    x = value_of(t, x)
    for axis in axes_of(t, x, dim):
        node = t.emit(fn, x.node, dim=axis)
        if keepdim:
            node = t.emit(ops.unsqueeze, node, dim=axis)
            x = t.wrap(node)
        else:
            x = t.wrap(node)
    return x


@lowering("sum")
def _sum(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    check_dtype(t, dtype)
    return reduced(t, ops.total, x, dim, keepdim)


@lowering("mean")
def _mean(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    check_dtype(t, dtype)
    x = value_of(t, x)
    out = reduced(t, ops.total, x, dim, keepdim)
    for axis in axes_of(t, x, dim):
        if x.dims[axis] != UNIT_DIM:
            out = t.call("div", out, t.size(x.dims[axis]))
    return out


@lowering("amax")
def _amax(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return reduced(t, ops.amax, x, dim, keepdim)


@lowering("amin")
def _amin(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return t.call("neg", reduced(t, ops.amax, t.call("neg", x), dim, keepdim))


@lowering("cumsum")
def _cumsum(t: Tracer, x: Any, dim: int, *, dtype: Any = None) -> Any:
    check_dtype(t, dtype)
    x = value_of(t, x)
    return t.wrap(t.emit(ops.cumsum, x.node, dim=axis_of(t, x, dim), reverse=False))


class _Extremum(NamedTuple):
    """What `x.max(dim)` returns; positions are not known when compiling."""

    values: Any

    @property
    def indices(self) -> Any:
        raise self.values.tracer.error("the position of a maximum is not supported; use its value")


def _extremum(reduce: str, pairwise: str) -> Callable[..., Any]:
    def lower(
        t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None
    ) -> Any:
        if other is not None or hasattr(dim, "node"):
            return t.call(pairwise, x, dim if other is None else other)
        if dim is None:
            return t.call(reduce, x)
        return _Extremum(t.call(reduce, x, dim, keepdim))

    return lower


LOWERINGS["max"] = _extremum("amax", "maximum")
LOWERINGS["min"] = _extremum("amin", "minimum")


# -- shape ----------------------------------------------------------------------------------------


@lowering("unsqueeze")
def _unsqueeze(t: Tracer, x: Any, dim: int) -> Any:
    rank = len(x.dims) + 1
    return t.wrap(t.emit(ops.unsqueeze, x.node, dim=dim - rank if dim >= 0 else dim))


@lowering("squeeze")
def _squeeze(t: Tracer, x: Any, dim: Any = None) -> Any:
    axes = [a for a, d in enumerate(x.dims) if d == UNIT_DIM] if dim is None else [dim]
    for axis in sorted(axis_of(t, x, a) for a in axes):
        x = t.wrap(t.emit(ops.squeeze, x.node, dim=axis))
    return x


@lowering("mT")
def _mt(t: Tracer, x: Any) -> Any:
    if len(x.dims) < 2:
        raise t.error(f"a transpose needs two dims, got {len(x.dims)}")
    return t.call("transpose", x, -2, -1)


@lowering("transpose")
def _transpose(t: Tracer, x: Any, dim0: int, dim1: int) -> Any:
    order = list(range(-len(x.dims), 0))
    a, b = axis_of(t, x, dim0), axis_of(t, x, dim1)
    order[a], order[b] = order[b], order[a]
    return t.wrap(t.emit(ops.permute, x.node, order=tuple(order)))


@lowering("permute")
def _permute(t: Tracer, x: Any, *dims: Any) -> Any:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    return t.wrap(t.emit(ops.permute, x.node, order=tuple(axis_of(t, x, d) for d in order)))


@lowering("expand", "broadcast_to")
def _expand(t: Tracer, x: Any, *sizes: Any) -> Any:
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    rank = len(given)
    x = t.wrap(t.builder.lift(x.node, rank))
    dims = []
    for at, size in enumerate(given):
        keep = not hasattr(size, "name") and size == -1
        dims.append(x.dims[at] if keep else t.dim_named(size))
    return t.wrap(t.emit(ops.expand, t.builder.sizes, x.node, dims=tuple(dims)))


@lowering("expand_as")
def _expand_as(t: Tracer, x: Any, other: Any) -> Any:
    return t.call("expand", x, *other.shape)


@lowering("size")
def _size(t: Tracer, x: Any, dim: Any = None) -> Any:
    return x.shape if dim is None else x.shape[axis_of(t, x, dim)]


@lowering("dim")
def _dim(t: Tracer, x: Any) -> Any:
    return len(x.dims)


@lowering("select")
def _select(t: Tracer, x: Any, dim: int, index: Any) -> Any:
    return _pick(t, x, axis_of(t, x, dim), index)


def _pick(t: Tracer, x: Any, axis: int, index: Any) -> Any:
    if isinstance(index, bool) or not isinstance(index, int) or hasattr(index, "name"):
        raise t.error(f"index {index!r}; an index into a chunk must be a constant such as 0 or -1")
    if index not in (0, -1):
        raise t.error(
            f"index {index}: only the first (0) and the last (-1) entry of a dim exist "
            "for every size"
        )
    return t.wrap(t.emit(ops.select, x.node, dim=axis, index=int(index)))


@lowering("getitem")
def _getitem(t: Tracer, x: Any, index: Any) -> Any:
    entries = list(index) if isinstance(index, tuple) else [index]
    kept = sum(1 for e in entries if e is not None and e is not Ellipsis)
    if kept > len(x.dims):
        raise t.error(f"{kept} indices into a value with {len(x.dims)} dims")
    if Ellipsis in [e for e in entries if e is None or e is Ellipsis]:
        at = next(i for i, e in enumerate(entries) if e is Ellipsis)
        fill = [slice(None)] * (len(x.dims) - kept)
        entries = entries[:at] + fill + entries[at + 1 :]
    else:
        entries += [slice(None)] * (len(x.dims) - kept)
    return _apply_index(t, x, entries)


def _edge(entry: slice) -> int | None:
    """`x[-1:]` and `x[:1]` keep the last or first entry as a dim of size one."""
    if entry == slice(-1, None):
        return -1
    return 0 if entry in (slice(None, 1), slice(0, 1)) else None


def _apply_index(t: Tracer, x: Any, entries: list[Any]) -> Any:
    at = 0
    for entry in entries:
        if entry is None:
            x = t.call("unsqueeze", x, at)
            at += 1
        elif isinstance(entry, slice):
            edge = _edge(entry)
            if edge is not None:
                x = t.call("unsqueeze", _pick(t, x, at - len(x.dims), edge), at)
            elif entry != slice(None):
                raise t.error(
                    "a partial slice of a dim; stages work on whole dims. For the previous token "
                    "use an exclusive sum (b - g) or a state"
                )
            at += 1
        else:
            x = _pick(t, x, at - len(x.dims), entry)
    return x


def _triangular(lower: bool) -> Callable[..., Any]:
    def lower_it(t: Tracer, x: Any, diagonal: int = 0) -> Any:
        if isinstance(diagonal, bool) or not isinstance(diagonal, int) or hasattr(diagonal, "name"):
            raise t.error("the diagonal of tril and triu must be a constant")
        if not is_mask(x.node):
            return t.wrap(t.emit(ops.tril if lower else ops.triu, x.node, diagonal=diagonal))
        below = t.emit(
            ops.tri_mask, t.builder.sizes, dim=x.dims[-1], diagonal=diagonal - (not lower)
        )
        keep = below if lower else t.emit(ops.logical_not, below)
        return t.wrap(t.emit(ops.logical_and, x.node, keep))

    return lower_it


LOWERINGS["tril"], LOWERINGS["triu"] = _triangular(True), _triangular(False)
