"""Timed messages by interpreted kernels: between processes, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.comm.chooser.heap_transport import (
    HeapTransport,
    Pattern,
    measure_heap_link,
    measure_kernel_rates,
)
from flexla_dist.comm.errors import ExchangeTimeout
from flexla_dist.comm.heaps import LocalHeap, make_heap
from flexla_dist.errors import ShardingError
from flexla_dist.testing.ranks import run_ranks


def patterns(rank: int, size: int) -> dict[str, float]:
    """One call of each kind, twice, so that memory is used again."""
    heap = make_heap(None, "cpu", "posix_shm")
    transport = HeapTransport(heap, rounds=(1, 3))
    found = {}
    for _ in range(2):
        found["gather"] = transport.gather(4096)
        if size == 2:
            found["there and back"] = transport.there_and_back(1 - rank, 40 << 10, rank == 0)
            found["both"] = transport.both_ways(1 - rank, 4096)
            found["burst"] = transport.burst(1 - rank, 4096, 3, rank == 0)
            found["panel"] = transport.panel(1 - rank, 32 << 10, rank == 0) or 0.0
    heap.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_messages_are_timed(size: int) -> None:
    for found in run_ranks(patterns, size):
        assert len(found) == (5 if size == 2 else 1)
        assert all(0 < seconds < 60 for seconds in found.values()), found


def link(rank: int, size: int) -> Any:
    """A link of small messages, as the chooser takes it."""
    heap = make_heap(None, "cpu", "posix_shm")
    found = measure_heap_link(HeapTransport(heap, rounds=(1, 2)), (4 << 10, 16 << 10), 3)
    heap.close()
    return found


def test_a_link_is_what_the_chooser_takes() -> None:
    for found in run_ranks(link, 2):
        assert found.measured and found.seconds(4096) > 0 and found.gap >= 0
        assert found.both is not None and found.panel_beta >= 0


def test_rates_of_kernels() -> None:
    rates = measure_kernel_rates(torch.device("cpu"), rounds=(1, 3))
    assert rates.measured and rates.flops > 0 and rates.stream > 0 and rates.programs == 8


def test_sizes_of_patterns() -> None:
    assert (Pattern(4096, 2).rows, Pattern(4096, 2).panels) == (16, 1)
    assert (Pattern(40 << 10, 2).rows, Pattern(40 << 10, 2).panels) == (128, 2)
    assert Pattern(100, 2).rows == 1
    burst = Pattern(4096, 2, count=5)
    assert burst.flags_bytes == 256 and burst.nbytes == 256 + 2 * 5 * 2 * 4096


def test_an_interpreted_local_heap_cannot_wait() -> None:
    """Its programs run one after the other, so that the first one's answer never comes."""
    transport = HeapTransport(LocalHeap(2, "cpu"), rounds=(1, 2), limit=3)
    with pytest.raises(ExchangeTimeout, match="did not come within 3 looks"):
        transport.there_and_back(1, 4096, True)


def test_settings_are_checked() -> None:
    with pytest.raises(ShardingError, match="two ascending numbers"):
        HeapTransport(LocalHeap(2, "cpu"), rounds=(4, 4))
