"""Domain operators against dense float64 formulas: steep gates, odd lengths, gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from flexla_dist.errors import ArgumentError
from flexla_dist.spec import functional as F

SIZES = [1, 2, 3, 5, 16, 23, 64]
GATES = ["none", "mild", "steep", "mixed"]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gate(kind: str, *shape: int, seed: int = 7) -> torch.Tensor:
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double()
    scale = {"none": 0.0, "mild": 0.1, "steep": 60.0}.get(kind)
    return -uniform * scale if scale is not None else -(uniform**8) * 400


def region(size: int, strict: bool) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril(-1 if strict else 0)


def dense_decay(b_row: torch.Tensor, b_col: torch.Tensor, strict: bool) -> torch.Tensor:
    """exp(b_row[r] - b_col[s]) as [..., C, C, K]."""
    gap = b_row.unsqueeze(-2) - b_col.unsqueeze(-3)
    mask = region(b_row.shape[-2], strict).unsqueeze(-1)
    return torch.where(mask, gap, torch.full_like(gap, -torch.inf)).exp()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def gates(kind: str, exclusive: bool, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = gate(kind, *shape)
    b = g.cumsum(-2)
    return (b - g if exclusive else b), b


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", GATES)
def test_vector_decay_sums_equal_the_dense_formula(kind: str, size: int, strict: bool) -> None:
    b_row, b_col = gates(kind, strict, 2, 3, size, 5)
    q, k, P = rand(2, 3, size, 5), rand(2, 3, size, 5, seed=1), rand(2, 3, size, size, seed=2)
    decay = dense_decay(b_row, b_col, strict)
    scores = torch.einsum("...rk,...sk,...rsk->...rs", q, k, decay)
    rows = torch.einsum("...rs,...sk,...rsk->...rk", P, k, decay)
    cols = torch.einsum("...rs,...rk,...rsk->...sk", P, q, decay)
    got = F.decay_scores(q, k, b_row, b_col, strict)
    torch.testing.assert_close(got, scores, rtol=1e-12, atol=1e-13)
    assert not got[..., ~region(size, strict)].any()
    torch.testing.assert_close(F.decay_rows(P, k, b_row, b_col, strict), rows)
    torch.testing.assert_close(F.decay_cols(P, q, b_row, b_col, strict), cols)
    both = F.decay_rows_cols(P, q, k, b_row, b_col, strict)
    torch.testing.assert_close(both, (rows, cols), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", GATES)
def test_float32_scores_are_accurate(kind: str) -> None:
    _, b = gates(kind, False, 4, 64, 32)
    q, k = rand(4, 64, 32), rand(4, 64, 32, seed=1)
    b = b.float()
    want = torch.einsum(
        "...rk,...sk,...rsk->...rs", q, k, dense_decay(b.double(), b.double(), False)
    )
    got = F.decay_scores(q.float(), k.float(), b, b)
    assert got.dtype == torch.float32
    assert relative(got, want) < 1e-6


def test_low_precision_operands_compute_in_float32() -> None:
    _, b = gates("mild", False, 2, 16, 8)
    q = rand(2, 16, 8, dtype=torch.bfloat16)
    got = F.decay_scores(q, q, b.float(), b.float())
    assert got.dtype == torch.float32
    assert F.decay_scores(q, q, b.bfloat16(), b.bfloat16()).dtype == torch.bfloat16
    assert F.decay_matrix(b[..., 0].bfloat16(), b[..., 0].bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_decay_matrix_and_its_gradient_survive_steep_gates(size: int, strict: bool) -> None:
    g = gate("steep", 3, size, 1).requires_grad_()
    b = g.cumsum(-2)[..., 0]
    got = F.decay_matrix(b, b, strict)
    want = dense_decay(b[..., None], b[..., None], strict)[..., 0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    got.sum().backward()
    assert g.grad is not None and g.grad.isfinite().all()


def scan_by_loop(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h, out = torch.zeros_like(x[..., 0, :]), []
    for r in range(x.shape[-2]):
        h = g[..., r, :].exp() * h + x[..., r, :]
        out.append(h)
    return torch.stack(out, -2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", GATES)
def test_decay_scan_equals_the_loop(kind: str, size: int) -> None:
    g, x = gate(kind, 2, size, 4), rand(2, size, 4)
    torch.testing.assert_close(F.decay_scan(g, x), scan_by_loop(g, x))
    later = torch.cat((g[..., 1:, :], torch.zeros_like(g[..., :1, :])), -2)
    want = scan_by_loop(later.flip(-2), x.flip(-2)).flip(-2)
    torch.testing.assert_close(F.decay_scan_reverse(g, x), want)


def test_decay_scan_resets_at_minus_infinity() -> None:
    g = torch.zeros(6, 1)
    g[3] = -torch.inf
    assert F.decay_scan(g, torch.ones(6, 1)).flatten().tolist() == [1, 2, 3, 1, 2, 3]
    assert F.decay_scan_reverse(g, torch.ones(6, 1)).flatten().tolist() == [3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize("size", SIZES)
def test_unit_tril_inverse(size: int) -> None:
    L = rand(3, 2, size, size) / size**0.5  # what is on and above the diagonal is ignored
    eye = torch.eye(size, dtype=L.dtype)
    want = torch.linalg.inv(eye + L.tril(-1))
    torch.testing.assert_close(F.unit_tril_inverse(L), want, rtol=1e-11, atol=1e-12)
    assert relative(F.unit_tril_inverse(L.float()), want) < 2e-6


def test_unit_tril_inverse_of_repeated_keys_keeps_its_digits() -> None:
    """Equal keys and beta = 1 give the all-ones L: its powers are huge, its inverse is not."""
    L = torch.ones(64, 64)
    got = F.unit_tril_inverse(L)
    want = torch.eye(64) - torch.diag(torch.ones(63), -1)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_gradients_of_the_pair_sums(size: int, strict: bool) -> None:
    b_row, b_col = (leaf(b) for b in gates("mild", strict, 2, size, 3))
    q, k = leaf(rand(2, size, 3)), leaf(rand(2, size, 3, seed=1))
    P = leaf(rand(2, size, size, seed=2))
    for operator, args in (
        (F.decay_scores, (q, k, b_row, b_col)),
        (F.decay_rows, (P, k, b_row, b_col)),
        (F.decay_cols, (P, q, b_row, b_col)),
        (F.decay_rows_cols, (P, q, k, b_row, b_col)),
        (F.decay_matrix, (leaf(b_row[..., 0]), leaf(b_col[..., 0]))),
    ):
        assert gradcheck(lambda *a, f=operator: f(*a, strict), args)
        if size == 4:
            assert gradgradcheck(lambda *a, f=operator: f(*a, strict), args)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_gradients_of_scan_and_inverse(size: int) -> None:
    g, x, L = leaf(gate("mild", 2, size, 3)), leaf(rand(2, size, 3)), leaf(rand(2, size, size))
    assert gradcheck(F.decay_scan, (g, x))
    assert gradcheck(F.decay_scan_reverse, (g, x))
    assert gradcheck(F.unit_tril_inverse, (L,))
    assert gradgradcheck(F.decay_scan, (g, x))
    assert gradgradcheck(F.unit_tril_inverse, (L,))


def test_one_gate_used_twice_gets_both_gradients() -> None:
    b = leaf(gates("mild", False, 2, 5, 3)[1])
    q, k = rand(2, 5, 3), rand(2, 5, 3, seed=1)
    assert gradcheck(lambda b: F.decay_scores(q, k, b, b), (b,))


def test_gradients_keep_the_dtype_of_their_operand() -> None:
    b = leaf(gates("mild", False, 2, 8, 4)[1].float())
    q = leaf(rand(2, 8, 4, dtype=torch.bfloat16))
    F.decay_scores(q, q, b, b).sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.bfloat16
    assert b.grad is not None and b.grad.dtype == torch.float32


def test_leading_dims_broadcast_and_map() -> None:
    b = gates("mild", False, 8, 4)[1]
    q, k = rand(3, 2, 8, 4), rand(2, 8, 4, seed=1)
    want = torch.stack([F.decay_scores(row[1], k[1], b, b) for row in q])
    torch.testing.assert_close(F.decay_scores(q, k, b, b)[:, 1], want)
    mapped = torch.vmap(torch.vmap(F.decay_scores, (0, 0, None, None)), (0, None, None, None))
    torch.testing.assert_close(mapped(q, k, b, b), F.decay_scores(q, k, b, b))
    L = rand(3, 8, 8)
    torch.testing.assert_close(torch.vmap(F.unit_tril_inverse)(L), F.unit_tril_inverse(L))
    torch.testing.assert_close(torch.vmap(F.decay_scan, (0, None))(k, b), F.decay_scan(k, b))


class Proxy:
    """Records which operator was called, as a tracer does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func, len(args), kwargs


def test_operators_are_seen_by_torch_function() -> None:
    p, t = Proxy(), torch.zeros(4, 4)
    assert F.decay_matrix(p, t[0]) == (F.decay_matrix, 2, {"strict": False})
    assert F.decay_scores(t, p, t, t, strict=True) == (F.decay_scores, 4, {"strict": True})
    assert F.decay_rows(t, t, p, t)[0] is F.decay_rows
    assert F.decay_cols(t, t, t, p)[0] is F.decay_cols
    assert F.decay_rows_cols(p, t, t, t, t)[0] is F.decay_rows_cols
    assert F.decay_scan(t, p)[0] is F.decay_scan
    assert F.decay_scan_reverse(t, p)[0] is F.decay_scan_reverse
    assert F.unit_tril_inverse(p)[0] is F.unit_tril_inverse


def test_wrong_shapes_are_named() -> None:
    t = torch.zeros
    with pytest.raises(ArgumentError, match=r"decay_matrix: .*b_col \[5\]"):
        F.decay_matrix(t(4), t(5))
    with pytest.raises(ArgumentError, match=r"decay_scores: .*k \[4, 3\]"):
        F.decay_scores(t(4, 2), t(4, 3), t(4, 2), t(4, 2))
    with pytest.raises(ArgumentError, match=r"decay_scores: .*leading dims that broadcast"):
        F.decay_scores(t(2, 4, 2), t(3, 4, 2), t(4, 2), t(4, 2))
    with pytest.raises(ArgumentError, match=r"decay_rows: expected P \[..., C, C\]"):
        F.decay_rows(t(4, 3), t(4, 2), t(4, 2), t(4, 2))
    with pytest.raises(ArgumentError, match="decay_scan"):
        F.decay_scan(t(4, 3), t(4, 2))
    with pytest.raises(ArgumentError, match=r"unit_tril_inverse: expected L \[..., C, C\]"):
        F.unit_tril_inverse(t(4, 3))
