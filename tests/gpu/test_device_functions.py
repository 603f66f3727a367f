"""The device functions on a GPU, under every dot policy, against the torch operators in float64."""

import pytest
import torch
from torch import Tensor

from flexla_dist.spec import functional as F

pytest.importorskip("triton")

from tests.interpret import device_kernels as kernels
from tests.interpret.device_cases import GATES, close, gates, normal, unwritten

pytestmark = pytest.mark.gpu
MODES = {"bf16": 5e-3, "fp16": 2e-3, "tf32x3": 3e-6, "ieee": 1e-6}
CASES = len(GATES)


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cuda() for tensor in tensors]


def rounded(x: Tensor, mode: str) -> Tensor:
    """Values that the operands of a policy can hold, so that only products and factors round."""
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode, torch.float32)).float()


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("C", "K"), [(16, 64), (32, 16), (64, 64)])
@pytest.mark.parametrize("mode", MODES)
def test_pair_sums(mode: str, C: int, K: int, strict: bool, warps: int) -> None:
    g = gates(C, K)
    b = g.cumsum(1)
    q, k, p = (
        rounded(normal(CASES, C, width, seed=seed), mode) for seed, width in enumerate((K, K, C))
    )
    inputs = (p, q, k, b - g if strict else b, b)
    want = [x.double() for x in inputs]
    p, q, k, b_row, b_col = on_gpu(*inputs)
    out, rows, cols = on_gpu(unwritten(CASES, C, C), *(unwritten(CASES, C, K) for _ in range(2)))
    options = (C, K, strict, not strict, mode)
    kernels.scores[(CASES,)](q, k, b_row, b_col, out, *options, num_warps=warps)
    close(out.cpu(), F.decay_scores(*want[1:], strict), MODES[mode])
    want_rows, want_cols = F.decay_rows_cols(*want, strict)
    kernels.both_sums[(CASES,)](p, q, k, b_row, b_col, rows, cols, *options, num_warps=warps)
    close(rows.cpu(), want_rows, MODES[mode])
    close(cols.cpu(), want_cols, MODES[mode])
    for by_rows, x, wanted in ((True, k, want_rows), (False, q, want_cols)):
        rows.fill_(float("nan"))
        kernels.pair_sums[(CASES,)](p, x, b_row, b_col, rows, *options, by_rows, num_warps=warps)
        close(rows.cpu(), wanted, MODES[mode])


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_inverse(C: int, warps: int) -> None:
    keys = normal(C, 64, seed=2)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    ones = torch.ones(C, C)
    L = torch.stack([ones, 2 * ones, keys @ keys.mT, 0.2 * normal(C, C)])
    out = unwritten(*L.shape).cuda()
    kernels.inverse[(len(L),)](L.cuda(), out, C, "bf16", num_warps=warps)
    close(out.cpu(), F.unit_tril_inverse(L.double()), 2e-6)
    assert not out.triu(1).any()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_products(mode: str, exact: bool) -> None:
    M, D, N = 64, 32, 128
    a, b = (rounded(x, mode) for x in (normal(2, M, D), normal(2, D, N, seed=1)))
    out = unwritten(2, M, N).cuda()
    kernels.product[(2,)](*on_gpu(a, b), out, M, D, N, exact, mode)
    close(out.cpu(), a.double() @ b.double(), 2e-6)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("C", "K"), [(16, 16), (64, 64), (64, 128)])
def test_scans(C: int, K: int, reverse: bool, warps: int) -> None:
    g, x = gates(C, K), normal(CASES, C, K)
    out = unwritten(CASES, C, K).cuda()
    kernels.scan[(CASES,)](*on_gpu(g, x), out, C, K, reverse, num_warps=warps)
    reference = F.decay_scan_reverse if reverse else F.decay_scan
    close(out.cpu(), reference(g.double(), x.double()))
    kernels.running_sum[(CASES,)](x.cuda(), out, C, K, reverse, num_warps=warps)
    want = x.double().flip(1).cumsum(1).flip(1) if reverse else x.double().cumsum(1)
    close(out.cpu(), want)


@pytest.mark.parametrize(("index", "by"), [(0, 1), (-1, -1), (5, 1)])
def test_rows(index: int, by: int) -> None:
    C, K = 64, 64
    x = normal(2, C, K)
    row, placed, shifted = on_gpu(unwritten(2, K), unwritten(2, C, K), unwritten(2, C, K))
    kernels.rows[(2,)](x.cuda(), row, placed, shifted, C, K, index, by)
    want = torch.zeros_like(x)
    want[:, index] = x[:, index]
    assert torch.equal(row.cpu(), x[:, index])
    assert torch.equal(placed.cpu(), want)
    moved = x.roll(by, 1)
    moved[:, 0 if by == 1 else -1] = 0
    assert torch.equal(shifted.cpu(), moved)


def test_the_same_input_gives_the_same_bits() -> None:
    C, K = 64, 64
    q, k, b = on_gpu(normal(CASES, C, K), normal(CASES, C, K, seed=1), gates(C, K).cumsum(1))
    results = []
    for _ in range(2):
        out = unwritten(CASES, C, C).cuda()
        kernels.scores[(CASES,)](q, k, b, b, out, C, K, False, True, "bf16")
        results.append(out)
    assert torch.equal(*results)
