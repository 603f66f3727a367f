"""Operators that keep exponents in float64 while all else is in the compute dtype.

Contract: made by `flexla_dist.compiler.precision` alone, after differentiation. A wide value is
float64 whatever the compute dtype; `narrow` brings it back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.compiler.ir.operators import dims as rules
from flexla_dist.compiler.ir.operators.registry import Sizes, operator
from flexla_dist.spec.functional import halving
from flexla_dist.spec.functional.scores import aligned

WIDE = torch.float64


@operator("cast", rules.same)
def widen(x: Tensor) -> Tensor:
    """x in float64."""
    return x.to(WIDE)


@operator("cast", lambda _, x: x)
def narrow(sizes: Sizes, x: Tensor) -> Tensor:
    """x in the compute dtype."""
    return x.to(sizes.dtype)


@operator("cast", rules.drop)
def wide_total(x: Tensor, *, dim: int) -> Tensor:
    """Sum over a dim in float64."""
    return x.sum(dim, dtype=WIDE)


@operator("cast", lambda _, b_row, b_col, **__: rules.decay_matrix(b_row, b_col))
def wide_decay_matrix(sizes: Sizes, b_row: Tensor, b_col: Tensor, *, strict: bool) -> Tensor:
    """`decay_matrix` of wide gates, in the compute dtype."""
    diagonal = -1 if strict else 0
    gap = (b_row.unsqueeze(-1) - b_col.unsqueeze(-2)).to(sizes.dtype)
    return gap.tril_(diagonal).exp_().tril_(diagonal)


@operator("cast", rules.scores)
def wide_decay_scores(
    q: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool
) -> Tensor:
    """`decay_scores` of wide gates, in the dtype of q."""
    q, k, b_row, b_col = aligned("decay_scores", b_row, b_col, q=q, k=k)
    return halving.scores(q, k, b_row, b_col, strict, q.dtype)


@operator("cast", rules.weighted)
def wide_decay_rows(p: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool) -> Tensor:
    """`decay_rows` of wide gates, in the dtype of p."""
    p, k, b_row, b_col = aligned("decay_rows", b_row, b_col, p=p, k=k)
    return halving.row_sums(p, k, b_row, b_col, strict, p.dtype)


@operator("cast", rules.weighted)
def wide_decay_cols(p: Tensor, q: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool) -> Tensor:
    """`decay_cols` of wide gates, in the dtype of p."""
    p, q, b_row, b_col = aligned("decay_cols", b_row, b_col, p=p, q=q)
    return halving.col_sums(p, q, b_row, b_col, strict, p.dtype)
