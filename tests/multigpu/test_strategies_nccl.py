"""Every host strategy over NCCL on all GPUs of this host, links measured, times predicted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from flexla_dist.comm import StateExchanger, Tag, plan_tails, zero_state
from flexla_dist.comm.element import Element, element_tensors, with_tensors
from flexla_dist.testing.elements import random_element, serial_scan
from flexla_dist.testing.ranks import run_ranks

# Longer than the ranks may take: the limit of a test ends all tests.
pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]
STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather", "auto")
KINDS = ("scalar", "dense")


def on_device(element: Element) -> Element:
    return with_tensors(element, [t.cuda() for t in element_tensors(element)], element.reset)


def scan_all(rank: int, size: int, first: str, folder: str) -> float:
    """Largest error of all strategies, `first` being the first thing that the group does."""
    os.environ["XDG_CACHE_HOME"] = folder
    torch.cuda.set_device(rank)
    base = StateExchanger(None, timeout=60.0, node_size=2)
    crossings = [(True,) * (size - 1), (False, *(True,) * (size - 2))]
    names = sorted(STRATEGIES, key=lambda name: name != first)
    worst = 0.0
    for strategy in names:
        for crossing in crossings:
            for step, kind in enumerate(KINDS):
                g = torch.Generator().manual_seed(step)
                elements = [random_element(kind, g) for _ in range(size)]
                mine = on_device(elements[rank])
                for reverse in (False, True):
                    user = base.using(strategy)
                    scan = user.suffix if reverse else user.prefix
                    found = scan(mine, crossing, Tag(step), zero_state(mine))
                    expected = serial_scan(elements, crossing, reverse)[rank]
                    pairs = zip(found, expected, strict=True)
                    worst = max([worst, *((a.cpu() - b).abs().max().item() for a, b in pairs)])
    base.flush()
    return worst


@pytest.mark.parametrize("first", STRATEGIES)
def test_strategies_between_all_gpus(first: str, tmp_path: Path) -> None:
    size = torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl"
    errors = run_ranks(scan_all, size, first, str(tmp_path), backend=backend, timeout=120)
    assert max(errors) < 1e-10


def rows_first(rank: int, size: int) -> float:
    """Rows from several ranks as the first thing that the group does, then a broadcast."""
    torch.cuda.set_device(rank)
    exchanger = StateExchanger(None, timeout=60.0)
    plan = plan_tails((1,) * size, (0,) * size, 2)
    halo = exchanger.transfer(torch.full((1, 1, 2), rank + 1.0, device="cuda"), plan, Tag())
    grad = exchanger.transfer_adjoint(torch.ones_like(halo), plan, Tag())
    sent = exchanger.broadcast((torch.full((1,), float(rank), device="cuda"),), size - 1, Tag())[0]
    exchanger.flush()
    expected = torch.tensor([max(rank - 1, 0), rank], dtype=torch.float32)
    wrong = (halo[0, :, 0].cpu() - expected).abs().max().item()
    wrong += abs(grad.sum().item() - 2 * min(2, size - 1 - rank))
    return wrong + abs(sent.item() - (size - 1))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_rows_between_all_gpus(backend: str) -> None:
    assert max(run_ranks(rows_first, torch.cuda.device_count(), backend=backend, timeout=120)) == 0


def survey(rank: int, size: int, folder: str) -> tuple:
    os.environ["XDG_CACHE_HOME"] = folder
    torch.cuda.set_device(rank)
    exchanger = StateExchanger(None, timeout=60.0)
    found = exchanger.survey(torch.device("cuda", rank))
    exchanger.flush()
    return found.topology, found.links, found.rates


def test_links_between_gpus(tmp_path: Path) -> None:
    size = torch.cuda.device_count()
    found = run_ranks(survey, size, str(tmp_path), backend="cpu:gloo,cuda:nccl", timeout=120)
    topology, links, rates = found[0]
    assert all(other == found[0] for other in found)
    assert topology.device == "cuda" and topology.runs == (size,)
    link = links[topology.inside]
    assert link.measured and 1e-6 < link.alpha < 1e-2 and 1e9 < 1 / link.beta < 1e12
    assert rates.measured and rates.programs > 1
