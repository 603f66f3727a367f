"""Dims of a result from the dims of the operands.

Contract: a rule gets the dims of the tensor operands and the attributes; it raises ShapeRuleError
in the words of the glossary. Dims are counted from the end.
"""

from __future__ import annotations

from typing import Any

from flexla_dist.compiler.ir.operators.registry import ShapeRuleError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims, format_dims


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
            raise ShapeRuleError(
                f"{shown} do not broadcast: {' against '.join(sorted(named))}{_column(operands)}"
            )
        out.append(named.pop() if named else UNIT_DIM)
    return tuple(out)


def _column(operands: tuple[Dims, ...]) -> str:
    """The fix where a vector lies along the last dim and belongs along the first."""
    for row in operands:
        others = [dims for dims in operands if dims is not row]
        if len(row) == 2 and row[0] == UNIT_DIM and all(row[1] == dims[0] for dims in others):
            return (
                f". Dims are matched from the last one: give [{row[1]}] as x[:, None], which is "
                f"[{row[1]}, 1]"
            )
    return ""


def same(x: Dims, **_: Any) -> Dims:
    """Dims of the operand."""
    return x


def elementwise(*operands: Dims, **_: Any) -> Dims:
    """Dims of all operands, broadcast."""
    return broadcast_dims(*operands)


def drop(x: Dims, *, dim: int) -> Dims:
    """Without one dim."""
    check_axis(x, dim)
    at = len(x) + dim
    return x[:at] + x[at + 1 :]


def check_axis(x: Dims, dim: int) -> None:
    """Raise unless the dim exists."""
    if not -len(x) <= dim < 0:
        raise ShapeRuleError(f"dim {dim} does not exist in {format_dims(x)}")


def along(x: Dims, *, dim: int, **_: Any) -> Dims:
    """Dims of the operand, which has the dim."""
    check_axis(x, dim)
    return x


def matmul(a: Dims, b: Dims) -> Dims:
    """`[A, B] @ [B, D]`."""
    if len(a) != 2 or len(b) != 2:
        raise ShapeRuleError(f"matmul of {format_dims(a)} and {format_dims(b)}: ranks must be 2")
    if a[1] != b[0]:
        raise ShapeRuleError(
            f"matmul of {format_dims(a)} and {format_dims(b)} contracts {a[1]} with {b[0]}"
        )
    return (a[0], b[1])


def square(x: Dims, **_: Any) -> Dims:
    """A square matrix."""
    if len(x) != 2 or x[0] != x[1]:
        raise ShapeRuleError(f"expected a square matrix such as [C, C], got {format_dims(x)}")
    return x


def _token_pair(*operands: Dims) -> Dims:
    if any(not dims or dims[0] != TOKEN_DIM for dims in operands):
        shown = ", ".join(format_dims(dims) for dims in operands)
        raise ShapeRuleError(f"expected operands with the token dim C first, got {shown}")
    return (TOKEN_DIM, TOKEN_DIM)


def scores(q: Dims, k: Dims, b_row: Dims, b_col: Dims, **_: Any) -> Dims:
    """q, k and gates `[C, K]` to `[C, C]`."""
    if len(q) != 2 or not q == k == b_row == b_col:
        shown = ", ".join(format_dims(dims) for dims in (q, k, b_row, b_col))
        raise ShapeRuleError(f"q, k, b_row, b_col must all be [C, K], got {shown}")
    return _token_pair(q, k)


def weighted(p: Dims, x: Dims, b_row: Dims, b_col: Dims, **_: Any) -> Dims:
    """Weights `[C, C]` and rows `[C, K]` to `[C, K]`."""
    if len(x) != 2 or not x == b_row == b_col or p != (x[0], x[0]):
        raise ShapeRuleError("weights must be [C, C] and the other operands [C, K]")
    return x


def decay_matrix(b_row: Dims, b_col: Dims, **_: Any) -> Dims:
    """Gates `[C]` to `[C, C]`."""
    if len(b_row) != 1 or b_row != b_col:
        shown = f"{format_dims(b_row)} and {format_dims(b_col)}"
        raise ShapeRuleError(f"b_row and b_col must both be [C], got {shown}")
    return _token_pair(b_row, b_col)


def scan(g: Dims, x: Dims) -> Dims:
    """Gates and inputs `[C, D]`."""
    if len(g) != 2 or g != x or g[0] != TOKEN_DIM:
        raise ShapeRuleError(
            f"g and x must both be [C, D], got {format_dims(g)} and {format_dims(x)}"
        )
    return x


def unsqueeze(x: Dims, *, dim: int) -> Dims:
    """With a dim of size one more."""
    at = len(x) + 1 + dim
    if not 0 <= at <= len(x):
        raise ShapeRuleError(f"unsqueeze at {dim} of {format_dims(x)}")
    return (*x[:at], UNIT_DIM, *x[at:])


def squeeze(x: Dims, *, dim: int) -> Dims:
    """With a dim of size one less."""
    check_axis(x, dim)
    if x[dim] != UNIT_DIM:
        raise ShapeRuleError(f"squeeze of dim {x[dim]} in {format_dims(x)}; its size is not one")
    return drop(x, dim=dim)


def permute(x: Dims, *, order: tuple[int, ...]) -> Dims:
    """Dims in another order."""
    if sorted(order) != list(range(-len(x), 0)):
        raise ShapeRuleError(f"order {order} is no permutation of {format_dims(x)}")
    return tuple(x[at] for at in order)


def expand(_: Dims, x: Dims, *, dims: Dims) -> Dims:
    """The dims asked for, if broadcasting gives them."""
    if broadcast_dims(x, dims) != dims:
        raise ShapeRuleError(f"{format_dims(x)} does not expand to {format_dims(dims)}")
    return dims
