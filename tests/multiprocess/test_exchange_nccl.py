"""The same exchanges over NCCL, between two GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexla_dist.comm import RankMismatch, StateExchanger, Tag, TagMismatch, plan_tails, zero_state
from flexla_dist.comm.element import Element, element_tensors, with_tensors
from flexla_dist.testing.elements import ELEMENT_KINDS, random_element, serial_scan
from flexla_dist.testing.ranks import run_ranks

STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather", "auto")


def on_device(element: Element) -> Element:
    return with_tensors(element, [t.cuda() for t in element_tensors(element)], element.reset)


def scan_on_gpus(rank: int, size: int) -> float:
    torch.cuda.set_device(rank)
    worst = 0.0
    for strategy in STRATEGIES:
        exchanger = StateExchanger(None, strategy, node_size=1, timeout=30.0)
        for step, kind in enumerate(ELEMENT_KINDS):
            for reset in range(-1, size):
                g = torch.Generator().manual_seed(step)
                elements = [random_element(kind, g) for _ in range(size)]
                elements = [replace(e, reset=i == reset) for i, e in enumerate(elements)]
                mine = on_device(elements[rank])
                for reverse in (False, True):
                    scan = exchanger.suffix if reverse else exchanger.prefix
                    found = scan(mine, (True,) * (size - 1), Tag(step), zero_state(mine))
                    expected = serial_scan(elements, (True,) * (size - 1), reverse)[rank]
                    for a, b in zip(found, expected, strict=True):
                        assert a.is_cuda
                        same = torch.where(b.isfinite(), a.cpu() - b, torch.zeros_like(b))
                        assert torch.equal(a.cpu().isfinite(), b.isfinite())
                        worst = max(worst, same.abs().max().item())
        exchanger.flush()
    plan = plan_tails((2,) * size, (0,) * size, 3)
    rows = torch.full((1, 2, 4), float(rank), device="cuda")
    halo = exchanger.transfer(rows, plan, Tag())
    assert halo[0, 1:, 0].tolist() == [max(rank - 1, 0)] * 2
    grad = exchanger.transfer_adjoint(torch.ones_like(halo), plan, Tag())
    assert grad.sum().item() == (8 if rank + 1 < size else 0)
    with pytest.raises(RankMismatch, match="value 0=1 on rank 1"):
        exchanger.agree("rank", (rank,))
    return worst


def wrong_tag_on_gpus(rank: int, size: int) -> str:
    torch.cuda.set_device(rank)
    exchanger = StateExchanger(None, "log_scan", timeout=30.0)
    mine = on_device(random_element("scalar", torch.Generator().manual_seed(0)))
    try:
        exchanger.prefix(mine, (True,), Tag(layer=rank), zero_state(mine))
        exchanger.flush()
    except TagMismatch as error:
        return str(error)
    return "nothing received"


@pytest.mark.multigpu
def test_scans_over_nccl() -> None:
    assert max(run_ranks(scan_on_gpus, 2, backend="nccl")) <= 1e-11


@pytest.mark.multigpu
def test_wrong_tag_is_found_later_without_a_stall() -> None:
    first, second = run_ranks(wrong_tag_on_gpus, 2, backend="nccl")
    assert first == "nothing received" and "layer 0" in second and "layer 1" in second


@pytest.mark.multigpu
def test_gloo_stages_device_tensors_through_the_host() -> None:
    assert max(run_ranks(scan_on_gpus, 2, backend="gloo")) <= 1e-11
