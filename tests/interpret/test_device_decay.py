"""Pair sums under a decay, in the interpreter, against the torch operators in float64."""

import pytest
import torch

from flexla_dist.spec import functional as F

from . import device_kernels as kernels
from .device_cases import GATES, close, gates, normal, unwritten

SIZES = [(16, 16), (32, 64), (64, 16), (64, 128)]
CASES = len(GATES)


def operands(C: int, K: int, strict: bool) -> tuple[torch.Tensor, ...]:
    """q, k, b_row, b_col, p; a strict sum reads the row gates before the token, as RWKV6 does."""
    g = gates(C, K)
    b = g.cumsum(1)
    q, k = normal(CASES, C, K), normal(CASES, C, K, seed=1)
    return q, k, b - g if strict else b, b, normal(CASES, C, C, seed=2)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("C", "K"), SIZES)
def test_decay_scores(C: int, K: int, strict: bool) -> None:
    q, k, b_row, b_col, _ = operands(C, K, strict)
    out = unwritten(CASES, C, C)
    kernels.scores[(CASES,)](q, k, b_row, b_col, out, C, K, strict, not strict, "ieee")
    want = F.decay_scores(q.double(), k.double(), b_row.double(), b_col.double(), strict)
    close(out, want)
    assert not out.triu(0 if strict else 1).any()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("C", "K"), SIZES)
@pytest.mark.parametrize("rows", [True, False])
def test_decay_rows_and_cols(C: int, K: int, strict: bool, rows: bool) -> None:
    x, _, b_row, b_col, p = operands(C, K, strict)
    p[:, torch.ones(C, C, dtype=torch.bool).triu(0 if strict else 1)] = float("inf")  # not read
    out = unwritten(CASES, C, K)
    kernels.pair_sums[(CASES,)](p, x, b_row, b_col, out, C, K, strict, not strict, "ieee", rows)
    reference = F.decay_rows if rows else F.decay_cols
    p = p.nan_to_num(posinf=0.0)
    close(out, reference(p.double(), x.double(), b_row.double(), b_col.double(), strict))


@pytest.mark.parametrize("strict", [False, True])
def test_decay_rows_cols_equals_the_two(strict: bool) -> None:
    C, K = 32, 32
    q, k, b_row, b_col, p = operands(C, K, strict)
    out_rows, out_cols = unwritten(CASES, C, K), unwritten(CASES, C, K)
    inputs = (p, q, k, b_row, b_col)
    kernels.both_sums[(CASES,)](*inputs, out_rows, out_cols, C, K, strict, not strict, "ieee")
    rows, cols = F.decay_rows_cols(*(x.double() for x in inputs), strict)
    close(out_rows, rows)
    close(out_cols, cols)


def test_every_number_of_levels() -> None:
    """Gates that first fit in blocks of 64, 32, ..., 1 tokens."""
    C, K = 64, 16
    steps = torch.tensor([0.2, 0.4, 0.8, 1.6, 3.2, 7.0, 30.0])
    b = (-steps[:, None, None] * (1 + 0.1 * normal(len(steps), C, K))).cumsum(1)
    q, k = normal(len(steps), C, K, seed=1), normal(len(steps), C, K, seed=2)
    out = unwritten(len(steps), C, C)
    kernels.scores[(len(steps),)](q, k, b, b, out, C, K, False, True, "ieee")
    close(out, F.decay_scores(q.double(), k.double(), b.double(), b.double()))


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_gates_need_not_start_at_zero(offset: float) -> None:
    C, K = 32, 16
    b = gates(C, K).cumsum(1) + offset
    q, k = normal(CASES, C, K), normal(CASES, C, K, seed=1)
    out = unwritten(CASES, C, C)
    kernels.scores[(CASES,)](q, k, b, b, out, C, K, False, True, "ieee")
    close(out, F.decay_scores(q.double(), k.double(), b.double(), b.double()))


def test_a_gate_that_is_not_a_number_is_not_hidden() -> None:
    C, K = 16, 16
    b = gates(C, K)[1:2].cumsum(1)
    b[0, 5, 3] = float("nan")
    q, k = normal(1, C, K), normal(1, C, K, seed=1)
    out = unwritten(1, C, C)
    kernels.scores[(1,)](q, k, b, b, out, C, K, False, True, "ieee")
    assert out[0, 5, :6].isnan().all() and out[0, 5:, 5].isnan().all()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("C", [16, 64])
def test_decay_matrix(C: int, strict: bool) -> None:
    b = gates(C).cumsum(1)
    out = unwritten(CASES, C, C)
    kernels.ratios[(CASES,)](b, b, out, C, strict)
    close(out, F.decay_matrix(b.double(), b.double(), strict))


def test_a_decay_of_a_million_is_zero_not_nan() -> None:
    C, K = 16, 16
    b = (-1e6 * torch.ones(1, C, K)).cumsum(1)
    q, k = normal(1, C, K), normal(1, C, K, seed=1)
    out = unwritten(1, C, C)
    kernels.scores[(1,)](q, k, b, b, out, C, K, False, True, "ieee")
    close(out, torch.diag_embed((q.double() * k).sum(-1)))
