"""`decay_scores` and its adjoints: pairs of tokens of a chunk under a vector decay.

Contract: checks, broadcasting and gradients; the sums themselves are in `halving`. The three
operators are closed under differentiation, so higher derivatives work too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexla_dist.spec.functional import halving
from flexla_dist.spec.functional.common import batch_to_front, expand_batch, require


def decay_scores(
    q: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, strict: bool = False
) -> Tensor:
    """Decayed scores, `sum_k q[r,k] k[s,k] exp(b_row[r,k] - b_col[s,k])` for r >= s, else 0.

    Exact for non-increasing gates without any bound on them: `b_row` and `b_col` are cumulative
    sums of a gate <= 0; with strict, `b_row` may be the exclusive sum. Memory `O(C K + C C)`.

    Args:
        q: rows, `[..., C, K]`.
        k: columns, `[..., C, K]`.
        b_row: cumulative log decays at the rows, `[..., C, K]`.
        b_col: cumulative log decays at the columns, `[..., C, K]`.
        strict: keep r > s instead of r >= s.

    Returns:
        `[..., C, C]` in the promoted dtype; float16 and bfloat16 are computed in float32.

    Raises:
        ArgumentError: shapes that do not fit.

    Source: the intra-chunk scores of GLA (arXiv 2312.06635) and KDA (arXiv 2510.26692). Gradients:
    `dq = decay_rows(dA, k, ...)`, `dk = decay_cols(dA, q, ...)`, `db_row = q dq`, `db_col = -k dk`.
    """
    if torch.overrides.has_torch_function((q, k, b_row, b_col)):
        return torch.overrides.handle_torch_function(
            decay_scores, (q, k, b_row, b_col), q, k, b_row, b_col, strict=strict
        )
    _require_rows("decay_scores", q=q, k=k, b_row=b_row, b_col=b_col)
    q, k, b_row, b_col = aligned("decay_scores", b_row, b_col, q=q, k=k)
    return _Scores.apply(q, k, b_row, b_col, strict)


def decay_rows(P: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, strict: bool = False) -> Tensor:
    """Decayed sum over columns, `sum_s P[r,s] k[s,k] exp(b_row[r,k] - b_col[s,k])` over r >= s.

    Args:
        P: weights, `[..., C, C]`; entries outside the region are ignored.
        k: columns, `[..., C, K]`.
        b_row: cumulative log decays at the rows, `[..., C, K]`, as in `decay_scores`.
        b_col: cumulative log decays at the columns, `[..., C, K]`.
        strict: keep r > s instead of r >= s.

    Returns:
        `[..., C, K]` in the promoted dtype.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    if torch.overrides.has_torch_function((P, k, b_row, b_col)):
        return torch.overrides.handle_torch_function(
            decay_rows, (P, k, b_row, b_col), P, k, b_row, b_col, strict=strict
        )
    _require_rows("decay_rows", k=k, b_row=b_row, b_col=b_col)
    _require_weights("decay_rows", P, k)
    P, k, b_row, b_col = aligned("decay_rows", b_row, b_col, P=P, k=k)
    return _Rows.apply(P, k, b_row, b_col, strict)


def decay_cols(P: Tensor, q: Tensor, b_row: Tensor, b_col: Tensor, strict: bool = False) -> Tensor:
    """Decayed sum over rows, `sum_r P[r,s] q[r,k] exp(b_row[r,k] - b_col[s,k])` over r >= s.

    Args:
        P: weights, `[..., C, C]`; entries outside the region are ignored.
        q: rows, `[..., C, K]`.
        b_row: cumulative log decays at the rows, `[..., C, K]`, as in `decay_scores`.
        b_col: cumulative log decays at the columns, `[..., C, K]`.
        strict: keep r > s instead of r >= s.

    Returns:
        `[..., C, K]` in the promoted dtype.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    if torch.overrides.has_torch_function((P, q, b_row, b_col)):
        return torch.overrides.handle_torch_function(
            decay_cols, (P, q, b_row, b_col), P, q, b_row, b_col, strict=strict
        )
    _require_rows("decay_cols", q=q, b_row=b_row, b_col=b_col)
    _require_weights("decay_cols", P, q)
    P, q, b_row, b_col = aligned("decay_cols", b_row, b_col, P=P, q=q)
    return _Cols.apply(P, q, b_row, b_col, strict)


def decay_rows_cols(
    P: Tensor, q: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, strict: bool = False
) -> tuple[Tensor, Tensor]:
    """`decay_rows(P, k, ...)` and `decay_cols(P, q, ...)` at once, the decays formed once.

    With `P = dA` these are the gradients `(dq, dk)` of `decay_scores(q, k, ...)`. Arguments, dtypes
    and errors as there; both results are `[..., C, K]`.
    """
    if torch.overrides.has_torch_function((P, q, k, b_row, b_col)):
        return torch.overrides.handle_torch_function(
            decay_rows_cols, (P, q, k, b_row, b_col), P, q, k, b_row, b_col, strict=strict
        )
    tensors = (P, q, k, b_row, b_col)
    if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
        return (
            decay_rows(P, k, b_row, b_col, strict),
            decay_cols(P, q, b_row, b_col, strict),
        )
    _require_rows("decay_rows_cols", q=q, k=k, b_row=b_row, b_col=b_col)
    _require_weights("decay_rows_cols", P, k)
    P, q, k, b_row, b_col = aligned("decay_rows_cols", b_row, b_col, P=P, q=q, k=k)
    return halving.both_sums(P, q, k, b_row, b_col, strict)


def _require_rows(name: str, **tensors: Tensor) -> None:
    shapes = {value.shape[-2:] for value in tensors.values()}
    dims = {value.ndim >= 2 for value in tensors.values()}
    require(len(shapes) == 1 and dims == {True}, name, "[..., C, K] each", **tensors)


def _require_weights(name: str, P: Tensor, rows: Tensor) -> None:
    tokens = rows.shape[-2]
    require(
        P.ndim >= 2 and P.shape[-2:] == (tokens, tokens), name, "P [..., C, C]", P=P, operand=rows
    )


def aligned(name: str, b_row: Tensor, b_col: Tensor, **tensors: Tensor) -> list[Tensor]:
    """Operands and gates with equal batch dims; one gate used twice stays one object."""
    if b_row is b_col:
        *others, b_row = expand_batch(name, 2, **tensors, b_row=b_row)
        return [*others, b_row, b_row]
    return expand_batch(name, 2, **tensors, b_row=b_row, b_col=b_col)


# -- gradients --------------------------------------------------------------------------------


class _PairSum(torch.autograd.Function):
    """What the three operators share: operands (x, y, b_row, b_col, strict) and the vmap rule."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.strict = inputs
        ctx.save_for_backward(*tensors)
        ctx.dtypes = tuple(value.dtype for value in tensors)

    @staticmethod
    def as_inputs(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the dtypes of the operands; strict has none."""
        return (*(x.to(d) for x, d in zip(gradients, ctx.dtypes, strict=True)), None)


def _mapped(operator: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    return operator(*batch_to_front(info.batch_size, in_dims[:-1], args[:-1]), args[-1]), 0


class _Scores(_PairSum):
    @staticmethod
    def forward(q: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, strict: bool) -> Tensor:
        return halving.scores(q, k, b_row, b_col, strict)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, b_row, b_col = ctx.saved_tensors
        dq, dk = decay_rows_cols(grad, q, k, b_row, b_col, ctx.strict)
        return _PairSum.as_inputs(ctx, dq, dk, q * dq, -k * dk)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _mapped(decay_scores, info, in_dims, args)


class _Rows(_PairSum):
    @staticmethod
    def forward(P: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, strict: bool) -> Tensor:
        return halving.row_sums(P, k, b_row, b_col, strict)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        P, k, b_row, b_col = ctx.saved_tensors
        rows = decay_rows(P, k, b_row, b_col, ctx.strict)
        dP = decay_scores(grad, k, b_row, b_col, ctx.strict)
        dk = decay_cols(P, grad, b_row, b_col, ctx.strict)
        return _PairSum.as_inputs(ctx, dP, dk, grad * rows, -k * dk)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _mapped(decay_rows, info, in_dims, args)


class _Cols(_PairSum):
    @staticmethod
    def forward(P: Tensor, q: Tensor, b_row: Tensor, b_col: Tensor, strict: bool) -> Tensor:
        return halving.col_sums(P, q, b_row, b_col, strict)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        P, q, b_row, b_col = ctx.saved_tensors
        cols = decay_cols(P, q, b_row, b_col, ctx.strict)
        dP = decay_scores(q, grad, b_row, b_col, ctx.strict)
        dq = decay_rows(P, grad, b_row, b_col, ctx.strict)
        return _PairSum.as_inputs(ctx, dP, dq, q * dq, -grad * cols)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return _mapped(decay_cols, info, in_dims, args)
