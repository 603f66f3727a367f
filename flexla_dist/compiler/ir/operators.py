"""The closed set of operators that graphs consist of, each with its meaning on tensors.

Contract: an operator works on the trailing dims of its operands and ignores any number of leading dims
(batch, head, chunk), so one graph serves a single chunk and a million of them. Static attributes are
keyword-only; operands are positional nodes or numbers. `dims` gives the dims of the result from those of
the operands; it raises ShapeRuleError in the words of the glossary. Dims are counted from the end.

Elementwise operands have the same rank (the builder inserts `unsqueeze`), a dim is equal or `1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as tnf
from torch import Tensor

from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims, format_dims
from flexla_dist.spec import functional

DimsRule = Callable[..., Dims]
Number = int | float


class ShapeRuleError(ValueError):
    """Operands do not fit the operator; the tracer adds stage and source line."""


@dataclass(frozen=True)
class Sizes:
    """Run-time sizes of the named dims with the device and dtype of constants."""

    dims: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype

    def of(self, dims: Dims) -> tuple[int, ...]:
        """Sizes of `dims`; the dim `1` has size one."""
        return tuple(1 if dim == UNIT_DIM else self.dims[dim] for dim in dims)


@dataclass(frozen=True)
class Operator:
    """What the compiler knows of one operator, keyed by the function that computes it."""

    name: str
    kind: str  # elementwise | reduce | shape | contract | mask | domain | source
    dims: DimsRule
    linear: tuple[int, ...] = ()  # operands in which the result is linear, each alone


OPERATORS: dict[Callable[..., Any], Operator] = {}


def operator(kind: str, dims: DimsRule, linear: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Register the decorated function as an operator of the graphs."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[fn] = Operator(fn.__name__, kind, dims, linear)
        return fn

    return register


def operator_named(name: str) -> Callable[..., Any]:
    """The operator's function by name, for printing tools and tests."""
    for fn, info in OPERATORS.items():
        if info.name == name:
            return fn
    raise KeyError(name)


# -- dims rules -----------------------------------------------------------------------------------


def broadcast_dims(*operands: Dims) -> Dims:
    """Dims of an elementwise result; operands have one rank."""
    ranks = {len(dims) for dims in operands}
    if len(ranks) != 1:
        raise ShapeRuleError(f"operands have ranks {sorted(ranks)}")
    out = []
    for column in zip(*operands, strict=True):
        named = {dim for dim in column if dim != UNIT_DIM}
        if len(named) > 1:
            shown = " and ".join(format_dims(dims) for dims in operands)
            raise ShapeRuleError(f"{shown} do not broadcast: {' against '.join(sorted(named))}")
        out.append(named.pop() if named else UNIT_DIM)
    return tuple(out)


def _same(x: Dims, **_: Any) -> Dims:
    return x


def _elementwise(*operands: Dims, **_: Any) -> Dims:
    return broadcast_dims(*operands)


def _drop(x: Dims, *, dim: int) -> Dims:
    _check_axis(x, dim)
    at = len(x) + dim
    return x[:at] + x[at + 1 :]


def _check_axis(x: Dims, dim: int) -> None:
    if not -len(x) <= dim < 0:
        raise ShapeRuleError(f"dim {dim} does not exist in {format_dims(x)}")


def _along(x: Dims, *, dim: int, **_: Any) -> Dims:
    _check_axis(x, dim)
    return x


def _matmul(a: Dims, b: Dims) -> Dims:
    if len(a) != 2 or len(b) != 2:
        raise ShapeRuleError(f"matmul of {format_dims(a)} and {format_dims(b)}: ranks must be 2")
    if a[1] != b[0]:
        raise ShapeRuleError(
            f"matmul of {format_dims(a)} and {format_dims(b)} contracts {a[1]} with {b[0]}"
        )
    return (a[0], b[1])


def _square(x: Dims, **_: Any) -> Dims:
    if len(x) != 2 or x[0] != x[1]:
        raise ShapeRuleError(f"expected a square matrix such as [C, C], got {format_dims(x)}")
    return x


def _token_pair(*operands: Dims) -> Dims:
    if any(not dims or dims[0] != TOKEN_DIM for dims in operands):
        shown = ", ".join(format_dims(dims) for dims in operands)
        raise ShapeRuleError(f"expected operands with the token dim C first, got {shown}")
    return (TOKEN_DIM, TOKEN_DIM)


def _scores(q: Dims, k: Dims, b_row: Dims, b_col: Dims, **_: Any) -> Dims:
    if len(q) != 2 or not q == k == b_row == b_col:
        shown = ", ".join(format_dims(dims) for dims in (q, k, b_row, b_col))
        raise ShapeRuleError(f"q, k, b_row, b_col must all be [C, K], got {shown}")
    return _token_pair(q, k)


def _weighted(p: Dims, x: Dims, b_row: Dims, b_col: Dims, **_: Any) -> Dims:
    if len(x) != 2 or not x == b_row == b_col or p != (x[0], x[0]):
        raise ShapeRuleError("weights must be [C, C] and the other operands [C, K]")
    return x


def _decay_matrix(b_row: Dims, b_col: Dims, **_: Any) -> Dims:
    if len(b_row) != 1 or b_row != b_col:
        shown = f"{format_dims(b_row)} and {format_dims(b_col)}"
        raise ShapeRuleError(f"b_row and b_col must both be [C], got {shown}")
    return _token_pair(b_row, b_col)


def _scan(g: Dims, x: Dims) -> Dims:
    if len(g) != 2 or g != x or g[0] != TOKEN_DIM:
        raise ShapeRuleError(
            f"g and x must both be [C, D], got {format_dims(g)} and {format_dims(x)}"
        )
    return x


# -- elementwise ----------------------------------------------------------------------------------


@operator("elementwise", _elementwise, linear=(0, 1))
def add(a: Tensor, b: Tensor | Number) -> Tensor:
    """a + b."""
    return a + b


@operator("elementwise", _elementwise, linear=(0, 1))
def sub(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a - b."""
    return a - b  # type: ignore[return-value]


@operator("elementwise", _elementwise, linear=(0, 1))
def mul(a: Tensor, b: Tensor | Number) -> Tensor:
    """a * b."""
    return a * b


@operator("elementwise", _elementwise, linear=(0,))
def div(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a / b."""
    return a / b  # type: ignore[return-value]


@operator("elementwise", _elementwise)
def maximum(a: Tensor, b: Tensor | Number) -> Tensor:
    """The larger of two values; the gradient goes to the first on ties."""
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp_min(b)


@operator("elementwise", _elementwise)
def minimum(a: Tensor, b: Tensor | Number) -> Tensor:
    """The smaller of two values; the gradient goes to the first on ties."""
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp_max(b)


@operator("elementwise", _same)
def power(x: Tensor, *, exponent: float) -> Tensor:
    """x to a constant power."""
    return x**exponent


@operator("elementwise", _same, linear=(0,))
def neg(x: Tensor) -> Tensor:
    """-x."""
    return -x


@operator("elementwise", _same)
def exp(x: Tensor) -> Tensor:
    """e to the x."""
    return torch.exp(x)


@operator("elementwise", _same)
def expm1(x: Tensor) -> Tensor:
    """e to the x, less one, exact near zero."""
    return torch.expm1(x)


@operator("elementwise", _same)
def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return torch.log(x)


@operator("elementwise", _same)
def log1p(x: Tensor) -> Tensor:
    """log(1 + x)."""
    return torch.log1p(x)


@operator("elementwise", _same)
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return torch.sigmoid(x)


@operator("elementwise", _same)
def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), a log-decay."""
    return tnf.logsigmoid(x)


@operator("elementwise", _same)
def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return tnf.softplus(x)


@operator("elementwise", _same)
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)


@operator("elementwise", _same)
def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return torch.sqrt(x)


@operator("elementwise", _same)
def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return torch.rsqrt(x)


@operator("elementwise", _same)
def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return torch.abs(x)


@operator("elementwise", _same)
def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; no gradient."""
    return torch.sign(x)


@operator("elementwise", _same)
def sin(x: Tensor) -> Tensor:
    """Sine."""
    return torch.sin(x)


@operator("elementwise", _same)
def cos(x: Tensor) -> Tensor:
    """Cosine."""
    return torch.cos(x)


@operator("elementwise", _same)
def stop_gradient(x: Tensor) -> Tensor:
    """x, seen as a constant by differentiation."""
    return x


# -- masks ----------------------------------------------------------------------------------------


@operator("mask", _elementwise)
def greater_equal(a: Tensor, b: Tensor | Number) -> Tensor:
    """a >= b."""
    return torch.ge(a, b)


@operator("mask", _elementwise)
def greater(a: Tensor, b: Tensor | Number) -> Tensor:
    """a > b."""
    return torch.gt(a, b)


@operator("mask", _elementwise)
def equal(a: Tensor, b: Tensor | Number) -> Tensor:
    """a == b."""
    return torch.eq(a, b)


@operator("mask", _same)
def logical_not(a: Tensor) -> Tensor:
    """not a."""
    return torch.logical_not(a)


@operator("mask", _elementwise)
def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """a and b."""
    return torch.logical_and(a, b)


@operator("mask", _elementwise)
def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """a or b."""
    return torch.logical_or(a, b)


@operator("elementwise", _elementwise, linear=(1, 2))
def where(mask: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a where the mask holds, else b; a selection, so NaN in the other branch does not leak."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = torch.tensor(a, dtype=torch.get_default_dtype(), device=mask.device)
    return torch.where(mask, a, b)


# -- shape ----------------------------------------------------------------------------------------


def _unsqueeze(x: Dims, *, dim: int) -> Dims:
    at = len(x) + 1 + dim
    if not 0 <= at <= len(x):
        raise ShapeRuleError(f"unsqueeze at {dim} of {format_dims(x)}")
    return x[:at] + (UNIT_DIM,) + x[at:]


def _squeeze(x: Dims, *, dim: int) -> Dims:
    _check_axis(x, dim)
    if x[dim] != UNIT_DIM:
        raise ShapeRuleError(f"squeeze of dim {x[dim]} in {format_dims(x)}; its size is not one")
    return _drop(x, dim=dim)


def _permute(x: Dims, *, order: tuple[int, ...]) -> Dims:
    if sorted(order) != list(range(-len(x), 0)):
        raise ShapeRuleError(f"order {order} is no permutation of {format_dims(x)}")
    return tuple(x[at] for at in order)


def _expand(_: Dims, x: Dims, *, dims: Dims) -> Dims:
    if broadcast_dims(x, dims) != dims:
        raise ShapeRuleError(f"{format_dims(x)} does not expand to {format_dims(dims)}")
    return dims


@operator("shape", _unsqueeze, linear=(0,))
def unsqueeze(x: Tensor, *, dim: int) -> Tensor:
    """Insert a dim of size one at `dim` of the result."""
    return x.unsqueeze(dim)


@operator("shape", _squeeze, linear=(0,))
def squeeze(x: Tensor, *, dim: int) -> Tensor:
    """Remove a dim of size one."""
    return x.squeeze(dim)


@operator("shape", _permute, linear=(0,))
def permute(x: Tensor, *, order: tuple[int, ...]) -> Tensor:
    """Reorder the trailing dims; `order` holds negative positions."""
    rank = len(order)
    lead = x.dim() - rank
    return x.permute(*range(lead), *(x.dim() + at for at in order))


@operator("shape", _expand, linear=(1,))
def expand(sizes: Sizes, x: Tensor, *, dims: Dims) -> Tensor:
    """Broadcast to `dims` explicitly."""
    rank = len(dims)
    return x.expand(*x.shape[: x.dim() - rank], *sizes.of(dims))


@operator("shape", lambda x, *, dim, index: _drop(x, dim=dim), linear=(0,))
def select(x: Tensor, *, dim: int, index: int) -> Tensor:
    """The entry at a constant position of a dim."""
    return x.select(dim, index)


@operator("shape", lambda _, x, *, dims, dim, index: dims, linear=(1,))
def place(sizes: Sizes, x: Tensor, *, dims: Dims, dim: int, index: int) -> Tensor:
    """Zeros of `dims` with x at a constant position of `dim`; the transpose of `select`."""
    lead = x.dim() - (len(dims) - 1)
    out = x.new_zeros(*x.shape[:lead], *sizes.of(dims))
    out.select(dim, index).copy_(x)
    return out


@operator("shape", _along, linear=(0,))
def shift(x: Tensor, *, dim: int, by: int) -> Tensor:
    """Move entries `by` places along a dim, zeros shifted in."""
    out = torch.zeros_like(x)
    size = x.shape[dim]
    if by >= 0:
        out.narrow(dim, min(by, size), max(size - by, 0)).copy_(x.narrow(dim, 0, max(size - by, 0)))
    else:
        out.narrow(dim, 0, max(size + by, 0)).copy_(
            x.narrow(dim, min(-by, size), max(size + by, 0))
        )
    return out


@operator("shape", _square, linear=(0,))
def tril(x: Tensor, *, diagonal: int) -> Tensor:
    """Lower triangle up to a diagonal, zeros above."""
    return torch.tril(x, diagonal)


@operator("shape", _square, linear=(0,))
def triu(x: Tensor, *, diagonal: int) -> Tensor:
    """Upper triangle from a diagonal, zeros below."""
    return torch.triu(x, diagonal)


# -- reductions, contractions ---------------------------------------------------------------------


@operator("reduce", _drop, linear=(0,))
def total(x: Tensor, *, dim: int) -> Tensor:
    """Sum over a dim."""
    return x.sum(dim)


@operator("reduce", _drop)
def amax(x: Tensor, *, dim: int) -> Tensor:
    """Maximum over a dim; the gradient is shared equally by ties."""
    return x.amax(dim)


@operator("reduce", _along, linear=(0,))
def cumsum(x: Tensor, *, dim: int, reverse: bool = False) -> Tensor:
    """Running sum along a dim, from the end when `reverse`."""
    if reverse:
        return x.flip(dim).cumsum(dim).flip(dim)
    return x.cumsum(dim)


@operator("contract", _matmul, linear=(0, 1))
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of the trailing two dims."""
    return a @ b


# -- domain operators -----------------------------------------------------------------------------


@operator("domain", _decay_matrix)
def decay_matrix(b_row: Tensor, b_col: Tensor, *, strict: bool = False) -> Tensor:
    """exp(b_row[r] - b_col[s]) for r >= s (r > s when strict), else 0."""
    return functional.decay_matrix(b_row, b_col, strict)


@operator("domain", _scores, linear=(0, 1))
def decay_scores(
    q: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool = False
) -> Tensor:
    """Sum over K of q[r] k[s] exp(b_row[r] - b_col[s]) for r >= s (r > s when strict)."""
    return functional.decay_scores(q, k, b_row, b_col, strict)


@operator("domain", _weighted, linear=(0, 1))
def decay_rows(
    p: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool = False
) -> Tensor:
    """Sum over s of p[r, s] k[s] exp(b_row[r] - b_col[s]), the gradient of decay_scores in q."""
    return functional.decay_rows(p, k, b_row, b_col, strict)


@operator("domain", _weighted, linear=(0, 1))
def decay_cols(
    p: Tensor, q: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool = False
) -> Tensor:
    """Sum over r of p[r, s] q[r] exp(b_row[r] - b_col[s]), the gradient of decay_scores in k."""
    return functional.decay_cols(p, q, b_row, b_col, strict)


@operator("domain", _scan, linear=(1,))
def decay_scan(g: Tensor, x: Tensor) -> Tensor:
    """h_r = exp(g_r) h_{r-1} + x_r within the chunk, from zero."""
    return functional.decay_scan(g, x)


@operator("domain", _scan, linear=(1,))
def decay_scan_reverse(g: Tensor, x: Tensor) -> Tensor:
    """d_r = x_r + exp(g_{r+1}) d_{r+1} within the chunk, the transpose of decay_scan."""
    return functional.decay_scan_reverse(g, x)


@operator("domain", _square)
def unit_tril_inverse(x: Tensor) -> Tensor:
    """Inverse of the identity plus the strictly lower part of x."""
    return functional.unit_tril_inverse(x)


@operator("domain", _square)
def inverse(x: Tensor) -> Tensor:
    """Inverse of a general matrix; legal only before the rewrite to unit_tril_inverse."""
    return torch.linalg.inv(x)


# -- sources --------------------------------------------------------------------------------------


@operator("source", lambda _, *, dims, value: dims)
def full(sizes: Sizes, *, dims: Dims, value: float) -> Tensor:
    """A constant tensor."""
    return torch.full(sizes.of(dims), value, dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim: (dim, dim))
def eye(sizes: Sizes, *, dim: str) -> Tensor:
    """The identity matrix."""
    return torch.eye(sizes.of((dim,))[0], dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim: (dim,))
def iota(sizes: Sizes, *, dim: str) -> Tensor:
    """0, 1, 2, ... along a dim."""
    return torch.arange(sizes.of((dim,))[0], dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim: ())
def size(sizes: Sizes, *, dim: str) -> Tensor:
    """The size of a dim as a number."""
    return torch.full((), sizes.of((dim,))[0], dtype=sizes.dtype, device=sizes.device)


@operator("source", lambda _, *, dim, diagonal: (dim, dim))
def tri_mask(sizes: Sizes, *, dim: str, diagonal: int) -> Tensor:
    """True at row r, column s where s <= r + diagonal."""
    n = sizes.of((dim,))[0]
    return torch.ones(n, n, dtype=torch.bool, device=sizes.device).tril(diagonal)
