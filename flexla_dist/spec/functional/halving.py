"""Recursive halving: sums over pairs of tokens of a chunk under a vector decay.

A chunk is cut in blocks of 2h tokens. Inside a block the later h tokens meet the earlier h; with
the gate `m = b_col` at the last earlier token as reference,

    exp(b_row[r] - b_col[s]) = exp(b_row[r] - m) * exp(m - b_col[s]),

and for non-increasing gates both exponents are non-positive whatever the decay. So one level is a
batched matrix product of scaled rows and scaled columns, h = C/2, C/4, ..., 1, and the diagonal
remains. Nothing of size [C, C, K] is formed.

Contract: operands have equal batch dims and are not differentiated here; gates are [..., C, K].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexla_dist.spec.functional.common import (
    common_dtype,
    compute_dtype,
    diagonal_blocks,
    padded_length,
)


class _Problem:
    """Operands as `[batch, C', ...]` in the compute dtype, C' the padded power of two.

    Gates are padded by their last token, so that no exponent turns positive; all else by zeros.
    The result is in `dtype`; float64 gates are subtracted in float64 even where it is narrower.
    """

    def __init__(self, b_row: Tensor, b_col: Tensor, *operands: Tensor, dtype: torch.dtype | None):
        self.dtype = common_dtype(b_row, b_col, *operands) if dtype is None else dtype
        self.compute = compute_dtype(self.dtype)
        self.lead, self.tokens = b_row.shape[:-2], b_row.shape[-2]
        self.size = padded_length(self.tokens)
        self.same_gate = b_row is b_col
        self.b_row = self._gate(b_row)
        self.b_col = self.b_row if self.same_gate else self._gate(b_col)

    def _flat(self, x: Tensor) -> Tensor:
        return x.to(self.compute).reshape(-1, *x.shape[-2:])

    def _gate(self, b: Tensor) -> Tensor:
        b = b.reshape(-1, *b.shape[-2:]) if b.dtype == torch.float64 else self._flat(b)
        extra = self.size - self.tokens
        return torch.cat((b, b[:, -1:].expand(-1, extra, -1)), 1) if extra else b

    def rows(self, x: Tensor) -> Tensor:
        """`[..., C, K]` as `[batch, C', K]`."""
        return pad(self._flat(x), (0, 0, 0, self.size - self.tokens))

    def weights(self, x: Tensor) -> Tensor:
        """`[..., C, C]` as `[batch, C', C']`."""
        extra = self.size - self.tokens
        return pad(self._flat(x), (0, extra, 0, extra))

    def restore(self, x: Tensor) -> Tensor:
        """`[batch, C', D]` as `[..., C, D]` in the promoted dtype."""
        x = x[:, : self.tokens].to(self.dtype)
        return x.reshape(*self.lead, *x.shape[1:])

    def on_diagonal(self, x: Tensor) -> Tensor:
        """`x * exp(b_row - b_col)`."""
        return x if self.same_gate else x * self.decay(self.b_row - self.b_col)

    def decay(self, exponent: Tensor) -> Tensor:
        """exp of a difference of gates, in place where it can be."""
        return exponent.to(self.compute).exp_()


class _Level(NamedTuple):
    """Decay factors of one halving level, `[batch, blocks, half, K]`; no col_decay means 1."""

    half: int
    row_decay: Tensor
    col_decay: Tensor | None

    def scale_later(self, x: Tensor) -> Tensor:
        """Later rows of `[batch, C', K]` carried back to the reference gate."""
        return later(x, self.half) * self.row_decay

    def scale_earlier(self, x: Tensor) -> Tensor:
        """Earlier rows of `[batch, C', K]` carried on to the reference gate."""
        x = earlier(x, self.half)
        return x if self.col_decay is None else x * self.col_decay


def earlier(x: Tensor, half: int) -> Tensor:
    """View of the earlier half of every block of `[batch, C', K]`: `[batch, blocks, half, K]`."""
    return x.unflatten(-2, (-1, 2, half))[:, :, 0]


def later(x: Tensor, half: int) -> Tensor:
    """View of the later half of every block."""
    return x.unflatten(-2, (-1, 2, half))[:, :, 1]


def corner(matrix: Tensor, half: int) -> Tensor:
    """View of the later-by-earlier corners of the blocks on the diagonal of `[batch, C', C']`."""
    return diagonal_blocks(matrix, 2 * half)[..., half:, :half]


def _levels(problem: _Problem) -> Iterator[_Level]:
    half = problem.size // 2
    while half >= 1:
        rows, cols = later(problem.b_row, half), earlier(problem.b_col, half)
        reference = cols[..., half - 1 :, :]
        col_decay = problem.decay(reference - cols) if half > 1 else None
        yield _Level(half, problem.decay(rows - reference), col_decay)
        half //= 2


def scores(
    q: Tensor,
    k: Tensor,
    b_row: Tensor,
    b_col: Tensor,
    strict: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sum_k q[r,k] k[s,k] exp(b_row[r,k] - b_col[s,k])` on the region, 0 elsewhere."""
    problem = _Problem(b_row, b_col, q, k, dtype=dtype)
    q, k = problem.rows(q), problem.rows(k)
    out = q.new_zeros(q.shape[0], problem.size, problem.size)
    for level in _levels(problem):
        row = level.row_decay.mul_(later(q, level.half))  # the level is used once: in place
        col = earlier(k, level.half)
        if level.col_decay is not None:
            col = level.col_decay.mul_(col)
        block = (row * col).sum(-1)[..., None] if level.half == 1 else row @ col.mT
        corner(out, level.half).copy_(block)
    if not strict:
        out.diagonal(dim1=-2, dim2=-1).copy_(problem.on_diagonal(q * k).sum(-1))
    return problem.restore(out[..., : problem.tokens])


def row_sums(
    P: Tensor,
    k: Tensor,
    b_row: Tensor,
    b_col: Tensor,
    strict: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sum_s P[r,s] k[s,k] exp(b_row[r,k] - b_col[s,k])` over the region."""
    problem = _Problem(b_row, b_col, P, k, dtype=dtype)
    P, k = problem.weights(P), problem.rows(k)
    out = _diagonal_part(problem, P, k, strict)
    for level in _levels(problem):
        _add_rows(out, level, corner(P, level.half), k)
    return problem.restore(out)


def col_sums(
    P: Tensor,
    q: Tensor,
    b_row: Tensor,
    b_col: Tensor,
    strict: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sum_r P[r,s] q[r,k] exp(b_row[r,k] - b_col[s,k])` over the region."""
    problem = _Problem(b_row, b_col, P, q, dtype=dtype)
    P, q = problem.weights(P), problem.rows(q)
    out = _diagonal_part(problem, P, q, strict)
    for level in _levels(problem):
        _add_cols(out, level, corner(P, level.half), q)
    return problem.restore(out)


def both_sums(
    P: Tensor, q: Tensor, k: Tensor, b_row: Tensor, b_col: Tensor, strict: bool
) -> tuple[Tensor, Tensor]:
    """`row_sums` with k and `col_sums` with q, the decay factors formed once."""
    problem = _Problem(b_row, b_col, P, q, k, dtype=None)
    P, q, k = problem.weights(P), problem.rows(q), problem.rows(k)
    rows = _diagonal_part(problem, P, k, strict)
    cols = _diagonal_part(problem, P, q, strict)
    for level in _levels(problem):
        block = corner(P, level.half).contiguous()
        _add_rows(rows, level, block, k)
        _add_cols(cols, level, block, q)
    return problem.restore(rows), problem.restore(cols)


def _diagonal_part(problem: _Problem, P: Tensor, x: Tensor, strict: bool) -> Tensor:
    if strict:
        return torch.zeros_like(x)
    return problem.on_diagonal(P.diagonal(dim1=-2, dim2=-1)[..., None] * x)


def _product(block: Tensor, x: Tensor) -> Tensor:
    return block * x if block.shape[-1] == 1 else block @ x


def _add_rows(out: Tensor, level: _Level, block: Tensor, k: Tensor) -> None:
    later(out, level.half).addcmul_(_product(block, level.scale_earlier(k)), level.row_decay)


def _add_cols(out: Tensor, level: _Level, block: Tensor, q: Tensor) -> None:
    total = _product(block.mT, level.scale_later(q))
    if level.col_decay is None:
        earlier(out, level.half).add_(total)
    else:
        earlier(out, level.half).addcmul_(total, level.col_decay)
