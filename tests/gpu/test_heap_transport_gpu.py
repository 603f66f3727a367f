"""Messages between virtual ranks of one launch, timed on a GPU.

Measurements are printed: `pytest -s`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.comm.chooser.heap_transport import (
    HeapTransport,
    measure_heap_link,
    measure_kernel_rates,
)
from flexla_dist.comm.chooser.report import link_line, rates_line
from flexla_dist.comm.heaps import LocalHeap

pytestmark = pytest.mark.gpu


def test_link_and_rates_of_virtual_ranks() -> None:
    """Within wide bounds of what hops of the exchange were measured to take: 1.4 to 3.8 us."""
    link = measure_heap_link(HeapTransport(LocalHeap(2, "cuda")))
    rates = measure_kernel_rates(torch.device("cuda"))
    print(link_line("device", "same_process", link))
    print(
        rates_line(rates),
        f"{1e9 * link.panel_beta:.3g} ns a byte of a panel, {1e6 * rates.step:.3g} us a step",
    )
    assert 3e-7 < link.alpha < 3e-5 and 1e10 < 1 / link.beta < 1e13
    assert 0 <= link.gap < 3e-5 and 0 < link.panel_beta < 1e-8
    assert 1e12 < rates.flops < 1e15 and 1e11 < rates.stream < 2e13
    assert 3e-8 < rates.step < 2e-6 and link.credit == link.alpha


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gathers_of_virtual_ranks(ranks: int) -> None:
    transport = HeapTransport(LocalHeap(ranks, "cuda"))
    times = [transport.gather(size) for size in (4 << 10, 1 << 20, 4 << 20)]
    print(f"gather of {ranks}: {[f'{1e6 * t:.1f} us' for t in times]}")
    assert 0 < times[0] < times[2] < 1e-2
