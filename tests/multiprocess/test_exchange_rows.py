"""Boundary rows and their gradients, gathers, broadcasts and agreement on real ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flexla_dist.comm import RankMismatch, StateExchanger, Tag, plan_tails
from flexla_dist.testing.ranks import run_ranks

LENGTHS = {
    2: [(4, 5), (0, 3), (3, 0), (1, 1)],
    3: [(4, 1, 6), (2, 0, 3), (0, 0, 4), (1, 1, 1)],
    5: [(3, 1, 0, 1, 4), (2, 2, 2, 2, 2), (5, 0, 0, 0, 1)],
}


def starts_of(lengths, cu_seqlens):
    """For every rank the begin of the document that holds its first token."""
    starts, begin = [], 0
    for length in lengths:
        starts.append(max(c for c in cu_seqlens if c <= begin))
        begin += length
    return starts


def full_convolution(x, weight, cu_seqlens):
    """Causal convolution over each document by itself; x [B, T, D], weight [W, D]."""
    taps = len(weight)
    parts = []
    for low, high in pairwise(cu_seqlens):
        padded = torch.nn.functional.pad(x[:, low:high], (0, 0, taps - 1, 0))
        windows = [weight[i] * padded[:, i : i + high - low] for i in range(taps)]
        parts.append(sum(windows))
    return torch.cat(parts, 1)


def shard_convolution(halo, x, weight, begin, cu_seqlens):
    """The same on one shard, from its halo; tokens of other documents are masked."""
    taps = len(weight)
    joined = torch.cat([halo, x], 1)
    out = x - x
    for token in range(x.shape[1]):
        low = max(c for c in cu_seqlens if c <= begin + token)
        for i in range(taps):
            if begin + token - (taps - 1 - i) >= low:
                out[:, token] += weight[i] * joined[:, token + i]
    return out


def convolve_all_cases(rank: int, size: int) -> float:
    exchanger = StateExchanger(None, timeout=30.0)
    worst, step = 0.0, 0
    for lengths in LENGTHS[size]:
        total, begin = sum(lengths), sum(lengths[:rank])
        cuts = {(0, total), (0, lengths[0], total), (0, max(total - 1, 0), total)}
        for cu_seqlens in sorted(tuple(sorted(set(c))) for c in cuts):
            for taps in (1, 2, 4):
                g = torch.Generator().manual_seed(step)
                x = torch.randn(2, total, 3, dtype=torch.float64, generator=g)
                weight = torch.randn(taps, 3, dtype=torch.float64, generator=g)
                upstream = torch.randn(2, total, 3, dtype=torch.float64, generator=g)
                x.requires_grad_()
                expected = full_convolution(x, weight, cu_seqlens)
                [grad] = torch.autograd.grad(expected, x, upstream)
                own = slice(begin, begin + lengths[rank])
                plan = plan_tails(lengths, starts_of(lengths, cu_seqlens), taps - 1)
                mine = x.detach()[:, own]
                halo = exchanger.transfer(mine, plan, Tag(step))
                assert halo.shape == (2, taps - 1, 3)
                halo.requires_grad_()
                mine.requires_grad_()
                out = shard_convolution(halo, mine, weight, begin, cu_seqlens)
                grads = torch.autograd.grad(
                    out, (halo, mine), upstream[:, own], allow_unused=True, materialize_grads=True
                )
                back = exchanger.transfer_adjoint(grads[0], plan, Tag(step, direction="backward"))
                assert back.shape == mine.shape
                for a, b in ((out, expected[:, own]), (grads[1] + back, grad[:, own])):
                    if a.numel():
                        worst = max(worst, (a - b).abs().max().item())
                step += 1
    return worst


@pytest.mark.parametrize("size", [2, 3, 5])
def test_convolution_over_shards_equals_the_whole(size: int) -> None:
    assert max(run_ranks(convolve_all_cases, size)) <= 1e-12


def move_along_other_dims(rank: int, size: int) -> list:
    exchanger = StateExchanger(None)
    lengths = (2, 1, 3)
    tokens = torch.arange(6.0).split(lengths)
    plan = plan_tails(lengths, (0, 0, 1), 3)
    mine = tokens[rank][None, None].expand(2, 3, -1)
    halo = exchanger.transfer(mine.to(torch.bfloat16), plan, Tag(), dim=-1)
    assert halo.dtype == torch.bfloat16 and halo.shape == (2, 3, 3)
    back = exchanger.transfer_adjoint(torch.ones_like(halo), plan, Tag(), dim=-1)
    whole = exchanger.gather_rows(mine, lengths, Tag(), dim=2)
    assert torch.equal(whole, torch.arange(6.0).expand(2, 3, 6))
    with pytest.raises(ValueError, match="this rank holds 4 rows"):
        exchanger.transfer(torch.zeros(1, 4, 1), plan, Tag())
    return [halo[0, 0].tolist(), back[0, 0].tolist()]


def test_rows_along_any_dim_and_dtype() -> None:
    assert run_ranks(move_along_other_dims, 3) == [
        [[0, 0, 0], [1, 2]],
        [[0, 0, 1], [1]],
        [[0, 1, 2], [0, 0, 0]],
    ]


def reduce_and_broadcast(rank: int, size: int) -> tuple:
    exchanger = StateExchanger(None)
    values = torch.full((2, 2), float(rank))
    sent = exchanger.broadcast((values, torch.tensor([rank])), 1, Tag())
    assert [t.flatten()[0].item() for t in sent] == [1, 1]
    total = exchanger.all_reduce_sum(values, Tag())
    assert torch.equal(total, torch.full((2, 2), float(sum(range(size)))))
    exchanger.flush()
    largest = exchanger.all_reduce_max("lengths", (rank, -rank))
    return largest, exchanger.gather_integers("lengths", (rank * 10,))


def test_reductions_and_broadcast() -> None:
    assert run_ranks(reduce_and_broadcast, 3) == [([2, 0], [[0], [10], [20]])] * 3


def agree_on_plans(rank: int, size: int) -> str:
    exchanger = StateExchanger(None)
    exchanger.agree("plan", (4, "gla", 0))
    exchanger.agree("empty", ())
    shape = (4, "gla", 7 if rank == 1 else 8)
    with pytest.raises(RankMismatch) as caught:
        exchanger.agree("plan", shape, fields=("heads", "spec", "tokens"))
    with pytest.raises(ValueError):
        exchanger.agree("plan", (rank,))
    with pytest.raises(RankMismatch, match="nothing"):
        exchanger.agree("plan", (1,) * (1 + rank))
    with pytest.raises(ValueError, match="field names"):
        exchanger.agree("plan", (1,), fields=())
    exchanger.agree("plan", (4, "gla", 0))
    return str(caught.value)


def test_disagreement_names_field_values_and_ranks() -> None:
    first, *others = run_ranks(agree_on_plans, 3)
    assert others == [first] * 2
    assert "tokens=8 on rank 0, rank 2; tokens=7 on rank 1" in first
    assert "heads" not in first and "ranks disagree in plan" in first
