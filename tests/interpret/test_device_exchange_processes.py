"""The exchange kernel across real processes: shared memory, interpreted kernels."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.comm.device_exchange import DeviceExchanger, Span, SpanState
from flexla_dist.comm.errors import ExchangeTimeout, TagMismatch
from flexla_dist.comm.heaps import make_heap
from flexla_dist.comm.tag import Tag
from flexla_dist.testing.ranks import run_ranks

from . import device_exchange_cases as cases

LATE_SECONDS = 0.6


def make(strategy: str, size: int, timeout: float) -> DeviceExchanger:
    """An exchanger over shared memory."""
    nodes = tuple((rank + 1) // 2 for rank in range(size))
    return DeviceExchanger(make_heap(None, "cpu", "posix_shm"), strategy, nodes, timeout)


def scan_kinds(rank: int, size: int, strategy: str, kinds: tuple[str, ...]) -> float:
    group = make(strategy, size, 60.0)
    g = torch.Generator().manual_seed(size)
    worst = 0.0
    for kind in kinds:
        sizes = cases.Sizes(H=1)
        spans = [cases.random_span(kind, 1, sizes, g) for _ in range(size)]
        spans[0] = cases.random_span(kind, 3, sizes, g)  # shards of different lengths
        spans[1] = replace(spans[1], reset=True)
        for reverse, reset in ((False, False), (True, False), (False, True)):
            spans[1] = replace(spans[1], reset=reset)
            scan = group.suffix if reverse else group.prefix
            crossing = [True] * (size - 1)
            found = scan(spans[rank], crossing)
            wanted = cases.expected(spans, crossing, reverse)[rank]
            worst = max(worst, cases.error_of(found, wanted))
    group.check()
    group.heap.close()
    return worst


@pytest.mark.parametrize("strategy", ["chain", "log_scan", "hierarchical", "all_gather"])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_equal_the_walk(size: int, strategy: str) -> None:
    kinds = ("rows", "two_states") if size == 3 else ("none", "full", "vector", "dense")
    errors = run_ranks(scan_kinds, size, strategy, kinds)
    assert max(errors) <= 1e-5, errors


def many_exchanges(rank: int, size: int, strategy: str, count: int) -> None:
    """Every exchange has other numbers, so that a panel of an earlier one would show."""
    group = make(strategy, size, 60.0)
    own = torch.Generator().manual_seed(rank)
    for number in range(count):
        if torch.rand((), generator=own) < 0.1:
            time.sleep(0.02 * torch.rand((), generator=own).item())
        value = float(1000 * number + 1)
        local = torch.full((1, 1, 1, 2, 2), value * (rank + 1))
        span = Span((SpanState(local, torch.full((1, 1, 1, 1, 1), 0.5)),))
        (found,) = group.prefix(span, [True] * (size - 1))
        wanted = 0.0
        for before in range(rank):
            wanted = 0.5 * wanted + value * (before + 1)
        assert found.unique().tolist() == [wanted], (number, found, wanted)
    group.check()
    group.heap.close()


@pytest.mark.parametrize(("strategy", "count"), [("chain", 200), ("all_gather", 60)])
def test_many_exchanges_with_random_delays(strategy: str, count: int) -> None:
    run_ranks(many_exchanges, 3, strategy, count)


def late_then_clean(rank: int, size: int) -> tuple[str, float]:
    group = make("chain", size, 60.0)
    g = torch.Generator().manual_seed(1)
    spans = [cases.random_span("rows", 2, cases.Sizes(H=1), g) for _ in range(size)]
    crossing = [True] * (size - 1)
    group.prefix(spans[rank], crossing)
    group.check()
    for workspace in group.workspaces.values():
        workspace.limit = max(64, int(workspace.limit * LATE_SECONDS / 2 / 60))
    if rank == 1:
        time.sleep(6 * LATE_SECONDS)
    text = ""
    group.prefix(spans[rank], crossing, Tag(step=7))
    try:
        group.check(together=True)
    except ExchangeTimeout as error:
        text = str(error)
    for workspace in group.workspaces.values():
        workspace.limit = 2**31 - 1
    worst = 0.0
    for _ in range(3):
        found = group.prefix(spans[rank], crossing)
        worst = max(worst, cases.error_of(found, cases.expected(spans, crossing)[rank]))
    group.check()
    group.heap.close()
    return text, worst


def test_late_rank_is_named_on_every_rank_and_the_next_exchange_is_right() -> None:
    results = run_ranks(late_then_clean, 3)
    for text, worst in results:
        assert "rank 1 did not come in time" in text and "step 7" in text, text
        assert "rank 2 waited for rank 1 and its message: panel 0, epoch 2, strategy chain" in text
        assert worst <= 1e-5


def other_exchange(rank: int, size: int) -> str:
    group = make("chain", size, 60.0)
    g = torch.Generator().manual_seed(1)
    spans = [cases.random_span("rows", 1, cases.Sizes(H=1), g) for _ in range(size)]
    group.prefix(spans[rank], [True], Tag(step=1, layer=rank))
    group.heap.barrier()  # rank 0 has nothing to wait for
    text = ""
    try:
        group.check()
    except TagMismatch as error:
        text = str(error)
    found = group.prefix(spans[rank], [True], Tag(step=1, layer=2))
    group.check()
    assert cases.error_of(found, cases.expected(spans, [True])[rank]) <= cases.TOLERANCE
    group.heap.close()
    return text


def test_ranks_in_different_exchanges_are_told() -> None:
    for text in run_ranks(other_exchange, 2):
        assert "rank 1 got a message of another exchange from rank 0: panel 0, epoch 1" in text


def exchange_with_killed_rank(rank: int, size: int) -> None:
    group = make("log_scan", size, 1.0)
    g = torch.Generator().manual_seed(1)
    spans = [cases.random_span("rows", 1, cases.Sizes(H=1), g) for _ in range(size)]
    group.prepare(spans[rank])
    if rank == 1:
        os._exit(9)
    group.prefix(spans[rank], [True] * (size - 1))
    group.check()


def test_killed_rank_is_named() -> None:
    errors = run_ranks(exchange_with_killed_rank, 3, expect_errors=True)
    assert errors[1].type == "Died", errors
    assert errors[2].type == "ExchangeTimeout", errors
    assert "rank 1 did not come in time" in errors[2].message, errors
