"""`decay_matrix`: ratios of a scalar decay between all pairs of tokens of a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.spec.functional.common import expand_batch, require


def decay_matrix(b_row: Tensor, b_col: Tensor, strict: bool = False) -> Tensor:
    """Decay from token s to token r, `exp(b_row[r] - b_col[s])` for r >= s, else 0.

    The masked exponents, which are positive, are cleared before `exp`, so neither value nor
    gradient overflows there.

    Args:
        b_row: log decays at the rows, `[..., C]`, usually the inclusive cumulative sum of the gate.
        b_col: log decays at the columns, `[..., C]`.
        strict: keep r > s instead of r >= s.

    Returns:
        `[..., C, C]` in the promoted dtype.

    Raises:
        ArgumentError: shapes that do not fit.

    Source: the factor `e^{b_r - b_s}` of Mamba2 and the gated delta rule in chunk form.
    """
    if torch.overrides.has_torch_function((b_row, b_col)):
        return torch.overrides.handle_torch_function(
            decay_matrix, (b_row, b_col), b_row, b_col, strict=strict
        )
    require(
        b_row.ndim > 0 and b_row.shape[-1:] == b_col.shape[-1:],
        "decay_matrix",
        "b_row [..., C] and b_col [..., C] with one C",
        b_row=b_row,
        b_col=b_col,
    )
    b_row, b_col = expand_batch("decay_matrix", 1, b_row=b_row, b_col=b_col)
    diagonal = -1 if strict else 0
    gap = (b_row.unsqueeze(-1) - b_col.unsqueeze(-2)).tril_(diagonal)
    return gap.exp().tril(diagonal)
