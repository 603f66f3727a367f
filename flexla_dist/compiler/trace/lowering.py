"""How torch spellings become operators: one table, a function per spelling.

Contract: every entry takes the tracer and the user's arguments and returns traced values. What is not in the
table is refused by name. Several spellings of one thing lower to the same nodes, so that later rules see one
form only: matrix-vector products become matrix products, `softmax` its stable form, masks `tri_mask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import is_mask
from flexla_dist.shapes import UNIT_DIM

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer

LOWERINGS: dict[str, Callable[..., Any]] = {}
_HIDDEN = {"getitem", "mT", "detach", "clone", "contiguous", "float", "to", "double", "type_as"}


def supported_names() -> list[str]:
    """Spellings that may be used inside a callable."""
    return sorted(set(LOWERINGS) - _HIDDEN)


def lowering(*names: str) -> Callable[[Any], Any]:
    """Register a function for one or more spellings."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            LOWERINGS[name] = fn
        return fn

    return register


def _axis(t: Tracer, x: Any, dim: Any) -> int:
    rank = len(x.dims)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise t.error(f"dim {dim!r} does not exist in a value with {rank} dims")
    return int(dim) - rank if dim >= 0 else int(dim)


def _value(t: Tracer, x: Any) -> Any:
    """The argument as a traced value; a number becomes a constant."""
    operand = t.operand(x)
    if isinstance(operand, float):
        operand = t.builder.expand(operand, ())
    return t.wrap(operand)


# -- elementwise ----------------------------------------------------------------------------------


def _unary(fn: Callable[..., Any]) -> Callable[..., Any]:
    def lower(t: Tracer, x: Any) -> Any:
        return t.wrap(t.emit(fn, _value(t, x).node))

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


def _ordered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Commutative operators keep a number as their second operand."""

    def lower(t: Tracer, a: Any, b: Any, *, alpha: float = 1.0) -> Any:
        x, y = t.operand(a), t.operand(b)
        if alpha != 1.0:
            y = y * alpha if isinstance(y, float) else t.emit(ops.mul, y, float(alpha))
        if isinstance(x, float):
            x, y = y, x
        if isinstance(x, float):
            x = t.builder.expand(x, ())
        return t.wrap(t.emit(fn, x, y))

    return lower


LOWERINGS["add"], LOWERINGS["mul"] = _ordered(ops.add), _ordered(ops.mul)


@lowering("ne")
def _ne(t: Tracer, a: Any, b: Any) -> Any:
    return t.wrap(t.emit(ops.logical_not, t.call("eq", a, b).node))


@lowering("pow")
def _pow(t: Tracer, x: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int | float) or isinstance(exponent, bool):
        log = t.call("log", x)
        return t.call("exp", t.call("mul", log, exponent))
    if exponent == 2:
        return t.call("mul", x, x)
    return t.wrap(t.emit(ops.power, _value(t, x).node, exponent=float(exponent)))


@lowering("square")
def _square(t: Tracer, x: Any) -> Any:
    return t.call("mul", x, x)


@lowering("reciprocal")
def _reciprocal(t: Tracer, x: Any) -> Any:
    return t.call("div", 1.0, x)


@lowering("softplus")
def _softplus(t: Tracer, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    if beta == 1.0:
        return t.wrap(t.emit(ops.softplus, _value(t, x).node))
    return t.call("div", t.call("softplus", t.call("mul", x, beta)), beta)


@lowering("silu")
def _silu(t: Tracer, x: Any, inplace: bool = False) -> Any:
    return t.call("mul", x, t.call("sigmoid", x))


@lowering("relu")
def _relu(t: Tracer, x: Any, inplace: bool = False) -> Any:
    return t.call("maximum", x, 0.0)


@lowering("elu")
def _elu(t: Tracer, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
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


@lowering("clone", "contiguous", "float", "double", "to", "type_as")
def _unchanged(t: Tracer, x: Any, *_: Any, **__: Any) -> Any:
    """The compiler alone decides types and storage; decays are always kept in full precision."""
    return x


@lowering("softmax")
def _softmax(t: Tracer, x: Any, dim: int, dtype: Any = None) -> Any:
    peak = t.call("amax", x, dim=dim, keepdim=True).detach()
    weights = t.call("exp", t.call("sub", x, peak))
    return t.call("div", weights, t.call("sum", weights, dim=dim, keepdim=True))


# -- reductions -----------------------------------------------------------------------------------


def _reduced(t: Tracer, fn: Any, x: Any, dim: Any, keepdim: bool) -> Any:
    x = _value(t, x)
    given = range(-len(x.dims), 0) if dim is None else dim
    axes = given if isinstance(given, list | tuple | range) else (given,)
    for axis in sorted((_axis(t, x, a) for a in axes)):
        node = t.emit(fn, x.node, dim=axis)
        if keepdim:
            node = t.emit(ops.unsqueeze, node, dim=axis)
            x = t.wrap(node)
        else:
            x = t.wrap(node)
    return x


@lowering("sum")
def _sum(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _reduced(t, ops.total, x, dim, keepdim)


@lowering("mean")
def _mean(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = _value(t, x)
    given = range(-len(x.dims), 0) if dim is None else dim
    axes = given if isinstance(given, list | tuple | range) else (given,)
    out = _reduced(t, ops.total, x, dim, keepdim)
    for axis in axes:
        out = t.call("div", out, t.size(x.dims[_axis(t, x, axis)]))
    return out


@lowering("amax")
def _amax(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _reduced(t, ops.amax, x, dim, keepdim)


@lowering("amin")
def _amin(t: Tracer, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return t.call("neg", _reduced(t, ops.amax, t.call("neg", x), dim, keepdim))


@lowering("cumsum")
def _cumsum(t: Tracer, x: Any, dim: int, *, dtype: Any = None) -> Any:
    x = _value(t, x)
    return t.wrap(t.emit(ops.cumsum, x.node, dim=_axis(t, x, dim), reverse=False))


@lowering("flip")
def _flip(t: Tracer, x: Any, *dims: Any) -> Any:
    raise t.error("flip is not supported; a reversed sum is x.sum(0) - x.cumsum(0) + x")


# -- shape ----------------------------------------------------------------------------------------


@lowering("unsqueeze")
def _unsqueeze(t: Tracer, x: Any, dim: int) -> Any:
    rank = len(x.dims) + 1
    return t.wrap(t.emit(ops.unsqueeze, x.node, dim=dim - rank if dim >= 0 else dim))


@lowering("squeeze")
def _squeeze(t: Tracer, x: Any, dim: Any = None) -> Any:
    axes = [a for a, d in enumerate(x.dims) if d == UNIT_DIM] if dim is None else [dim]
    for axis in sorted((_axis(t, x, a) for a in axes)):
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
    a, b = _axis(t, x, dim0), _axis(t, x, dim1)
    order[a], order[b] = order[b], order[a]
    return t.wrap(t.emit(ops.permute, x.node, order=tuple(order)))


@lowering("permute")
def _permute(t: Tracer, x: Any, *dims: Any) -> Any:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    return t.wrap(t.emit(ops.permute, x.node, order=tuple(_axis(t, x, d) for d in order)))


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
    return x.shape if dim is None else x.shape[_axis(t, x, dim)]


@lowering("dim")
def _dim(t: Tracer, x: Any) -> Any:
    return len(x.dims)


@lowering("select")
def _select(t: Tracer, x: Any, dim: int, index: Any) -> Any:
    return _pick(t, x, _axis(t, x, dim), index)


def _pick(t: Tracer, x: Any, axis: int, index: Any) -> Any:
    if isinstance(index, bool) or not isinstance(index, int) or hasattr(index, "name"):
        raise t.error(f"index {index!r}; an index into a chunk must be a constant such as 0 or -1")
    if index not in (0, -1):
        raise t.error(
            f"index {index}: only the first (0) and the last (-1) entry of a dim exist for every size"
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


def _apply_index(t: Tracer, x: Any, entries: list[Any]) -> Any:
    at = 0
    for entry in entries:
        if entry is None:
            x = t.call("unsqueeze", x, at)
            at += 1
        elif isinstance(entry, slice):
            if entry != slice(None):
                raise t.error(
                    "a partial slice of a dim; stages work on whole dims. For the previous token use "
                    "an exclusive sum (b - g) or a state"
                )
            at += 1
        else:
            x = _pick(t, x, at - len(x.dims), entry)
    return x


@lowering("tril", "triu")
def _triangle(t: Tracer, x: Any, diagonal: int = 0) -> Any:
    raise t.error("internal: triangle without a name")


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


# -- products -------------------------------------------------------------------------------------


@lowering("matmul")
def _matmul(t: Tracer, a: Any, b: Any) -> Any:
    a, b = _value(t, a), _value(t, b)
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
        raise t.error(f"einsum {equation!r}: write it with '->', without '...', one term an operand")
    for term, x in zip(terms, operands, strict=True):
        if len(term) != len(x.dims) or len(set(term)) != len(term):
            raise t.error(f"einsum {equation!r}: term {term!r} does not fit {len(x.dims)} dims")
    if len(terms) == 2 and _is_matrix_product(terms, out):
        return _einsum_matmul(t, terms, out, operands)
    letters = out + "".join(sorted(set("".join(terms)) - set(out)))
    product = None
    for term, x in zip(terms, operands, strict=True):
        aligned = _align_letters(t, x, term, letters)
        product = aligned if product is None else t.call("mul", product, aligned)
    return _reduced(t, ops.total, product, list(range(len(out), len(letters))) or [], False)


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


@lowering("solve_triangular")
def _solve_triangular(
    t: Tracer, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if upper or not left:
        raise t.error("solve_triangular: only lower triangular systems from the left (upper=False)")
    if unitriangular:
        return t.call("matmul", t.call("unit_tril_inverse", a), b)
    return t.call("matmul", t.call("inverse", t.call("tril", a)), b)


# -- domain operators and constants ---------------------------------------------------------------


@lowering("decay_matrix")
def _decay_matrix(t: Tracer, b_row: Any, b_col: Any, strict: bool = False) -> Any:
    return t.wrap(t.emit(ops.decay_matrix, b_row.node, b_col.node, strict=bool(strict)))


@lowering("decay_scores")
def _decay_scores(
    t: Tracer, q: Any, k: Any, b_row: Any, b_col: Any, strict: bool = False
) -> Any:
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


def _sizes_of(t: Tracer, given: tuple[Any, ...]) -> tuple[str, ...]:
    sizes = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
    return tuple(t.dim_named(size) for size in sizes)


def _constant(t: Tracer, dims: tuple[str, ...], value: float, dtype: Any) -> Any:
    node = t.builder.expand(float(value), dims)
    if dtype is torch.bool:
        node = t.emit(ops.greater, node, 0.5)
    return t.wrap(node)


@lowering("ones", "zeros")
def _filled(t: Tracer, *_: Any, **__: Any) -> Any:
    raise t.error("internal: constant without a value")


def _factory(value: float) -> Callable[..., Any]:
    def lower(t: Tracer, *sizes: Any, dtype: Any = None, device: Any = None) -> Any:
        return _constant(t, _sizes_of(t, sizes), value, dtype)

    return lower


def _factory_like(value: float) -> Callable[..., Any]:
    def lower(t: Tracer, x: Any, *, dtype: Any = None, device: Any = None) -> Any:
        return _constant(t, x.dims, value, dtype)

    return lower


LOWERINGS["ones"], LOWERINGS["zeros"] = _factory(1.0), _factory(0.0)
LOWERINGS["ones_like"], LOWERINGS["zeros_like"] = _factory_like(1.0), _factory_like(0.0)


@lowering("full")
def _full(t: Tracer, sizes: Any, value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return _constant(t, _sizes_of(t, (sizes,)), value, dtype)


@lowering("eye")
def _eye(t: Tracer, n: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return t.wrap(t.emit(ops.eye, t.builder.sizes, dim=t.dim_named(n)))


@lowering("arange")
def _arange(t: Tracer, n: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return t.wrap(t.emit(ops.iota, t.builder.sizes, dim=t.dim_named(n)))


@lowering("tensor", "as_tensor")
def _tensor(t: Tracer, value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    if isinstance(value, bool | int | float):
        return t.wrap(t.builder.expand(float(value), ()))
    raise t.error("torch.tensor of more than one number; declare it in `params` or `scalars`")
