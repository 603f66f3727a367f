"""Rows of a chunk and recurrences over its tokens, in the interpreter, against float64."""

import pytest
import torch

from flexla_dist.spec import functional as F

from . import device_kernels as kernels
from .device_cases import GATES, close, gates, normal, unwritten

CASES = len(GATES)


@pytest.mark.parametrize(("C", "K"), [(16, 16), (64, 16), (32, 32)])
@pytest.mark.parametrize("reverse", [False, True])
def test_decay_scan(C: int, K: int, reverse: bool) -> None:
    g, x = gates(C, K), normal(CASES, C, K)
    out = unwritten(CASES, C, K)
    kernels.scan[(CASES,)](g, x, out, C, K, reverse)
    reference = F.decay_scan_reverse if reverse else F.decay_scan
    close(out, reference(g.double(), x.double()))


@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum(reverse: bool) -> None:
    C, K = 64, 32
    x = normal(2, C, K)
    out = unwritten(2, C, K)
    kernels.running_sum[(2,)](x, out, C, K, reverse)
    want = x.double().flip(1).cumsum(1).flip(1) if reverse else x.double().cumsum(1)
    close(out, want)


def moved(x: torch.Tensor, by: int) -> torch.Tensor:
    """x[r - by] along dim 1, zero where there is none."""
    out = torch.zeros_like(x)
    if by == 1:
        out[:, 1:] = x[:, :-1]
    else:
        out[:, :-1] = x[:, 1:]
    return out


@pytest.mark.parametrize(("index", "by"), [(0, 1), (-1, -1), (5, 1)])
def test_rows_of_a_block(index: int, by: int) -> None:
    C, K = 32, 16
    x = normal(2, C, K)
    row, placed, shifted = unwritten(2, K), unwritten(2, C, K), unwritten(2, C, K)
    kernels.rows[(2,)](x, row, placed, shifted, C, K, index, by)
    want = torch.zeros_like(x)
    want[:, index] = x[:, index]
    assert torch.equal(row, x[:, index])
    assert torch.equal(placed, want)
    assert torch.equal(shifted, moved(x, by))


@pytest.mark.parametrize(("index", "by"), [(0, 1), (-1, -1)])
def test_entries_of_a_vector(index: int, by: int) -> None:
    C = 64
    x = normal(2, C)
    entry, placed, shifted = unwritten(2), unwritten(2, C), unwritten(2, C)
    kernels.entries[(2,)](x, entry, placed, shifted, C, index, by)
    want = torch.zeros_like(x)
    want[:, index] = x[:, index]
    assert torch.equal(entry, x[:, index])
    assert torch.equal(placed, want)
    assert torch.equal(shifted, moved(x, by))


def test_a_row_is_selected_not_multiplied() -> None:
    C, K = 16, 16
    x = normal(1, C, K)
    x[:, 3] = float("nan")
    row, placed, shifted = unwritten(1, K), unwritten(1, C, K), unwritten(1, C, K)
    kernels.rows[(1,)](x, row, placed, shifted, C, K, 0, 1)
    assert torch.equal(row, x[:, 0])
    assert placed.isfinite().all()
    assert shifted.isnan().sum() == K
