"""Operators of the domain: decays between tokens of a chunk, triangular inverses."""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.compiler.ir.operators import dims as rules
from flexla_dist.compiler.ir.operators.registry import operator
from flexla_dist.spec import functional


@operator("domain", rules.decay_matrix)
def decay_matrix(b_row: Tensor, b_col: Tensor, *, strict: bool = False) -> Tensor:
    """exp(b_row[r] - b_col[s]) for r >= s (r > s when strict), else 0."""
    return functional.decay_matrix(b_row, b_col, strict)


@operator("domain", rules.scores, linear=(0, 1))
def decay_scores(
    q: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool = False
) -> Tensor:
    """Sum over K of q[r] k[s] exp(b_row[r] - b_col[s]) for r >= s (r > s when strict)."""
    return functional.decay_scores(q, k, b_row, b_col, strict)


@operator("domain", rules.weighted, linear=(0, 1))
def decay_rows(
    p: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool = False
) -> Tensor:
    """Sum over s of p[r, s] k[s] exp(b_row[r] - b_col[s]), the gradient of decay_scores in q."""
    return functional.decay_rows(p, k, b_row, b_col, strict)


@operator("domain", rules.weighted, linear=(0, 1))
def decay_cols(
    p: Tensor, q: Tensor, b_row: Tensor, b_col: Tensor, *, strict: bool = False
) -> Tensor:
    """Sum over r of p[r, s] q[r] exp(b_row[r] - b_col[s]), the gradient of decay_scores in k."""
    return functional.decay_cols(p, q, b_row, b_col, strict)


@operator("domain", rules.scan, linear=(1,))
def decay_scan(g: Tensor, x: Tensor) -> Tensor:
    """h_r = exp(g_r) h_{r-1} + x_r within the chunk, from zero."""
    return functional.decay_scan(g, x)


@operator("domain", rules.scan, linear=(1,))
def decay_scan_reverse(g: Tensor, x: Tensor) -> Tensor:
    """d_r = x_r + exp(g_{r+1}) d_{r+1} within the chunk, the transpose of decay_scan."""
    return functional.decay_scan_reverse(g, x)


@operator("domain", rules.square)
def unit_tril_inverse(x: Tensor) -> Tensor:
    """Inverse of the identity plus the strictly lower part of x."""
    return functional.unit_tril_inverse(x)


@operator("domain", rules.square)
def inverse(x: Tensor) -> Tensor:
    """Inverse of a general matrix; legal only before the rewrite to unit_tril_inverse."""
    return torch.linalg.inv(x)
