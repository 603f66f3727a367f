"""The triangular inverse and the product policy, in the interpreter, against float64."""

import pytest
import torch

from flexla_dist.spec import functional as F

from . import device_kernels as kernels
from .device_cases import close, normal, unwritten


def correlated(C: int) -> torch.Tensor:
    """Delta-rule matrices: keys equal with beta 1 and 2, near-equal, random; and zero."""
    base = normal(1, 64)
    near = base + 0.1 * normal(C, 64, seed=1)
    free = normal(C, 64, seed=2)
    near, free = (keys / keys.norm(dim=-1, keepdim=True) for keys in (near, free))
    ones = torch.ones(C, C)
    return torch.stack([ones, 2 * ones, near @ near.mT, free @ free.mT, 0 * ones])


@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_inverse_of_correlated_keys(C: int) -> None:
    L = correlated(C)
    out = unwritten(*L.shape)
    kernels.inverse[(len(L),)](L, out, C, "ieee")
    close(out, F.unit_tril_inverse(L.double()))
    assert not out.triu(1).any()


def test_inverse_ignores_the_diagonal_and_above() -> None:
    C = 32
    L = 0.3 * normal(2, C, C)
    want = F.unit_tril_inverse(L.double())
    L[:, torch.ones(C, C, dtype=torch.bool).triu()] = float("nan")
    out = unwritten(2, C, C)
    kernels.inverse[(2,)](L, out, C, "ieee")
    close(out, want)


@pytest.mark.parametrize("exact", [True, False])
def test_products(exact: bool) -> None:
    M, D, N = 16, 32, 64
    a, b = normal(2, M, D), normal(2, D, N, seed=1)
    out = unwritten(2, M, N)
    kernels.product[(2,)](a, b, out, M, D, N, exact, "ieee")
    close(out, a.double() @ b.double())
