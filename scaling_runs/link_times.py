"""Times of host scans over the ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist

from flexla_dist.comm import Element, StateExchanger, Tag, zero_state
from flexla_dist.comm.element import StateElement

HEAD = 128
HEAD_BYTES = 4 * HEAD * HEAD
WARM_UPS = 3


@dataclass(frozen=True)
class ScanCase:
    """One scan: heads of 128 x 128 in float32, kind of M, strategy, ranks of a node."""

    state_mib: float
    kind: str
    strategy: str
    node_size: int

    @property
    def heads(self) -> int:
        """Heads of so many MiB."""
        return max(1, round(self.state_mib * 2**20 / HEAD_BYTES))


@dataclass(frozen=True)
class ScanTime:
    """Milliseconds of one scan, until the rank that waits longest has its state."""

    median_ms: float
    p20_ms: float
    p80_ms: float


def make_element(kind: str, heads: int, device: torch.device) -> Element:
    """A rank's element: "none", "scalar", "rows", "full" or "dense" M."""
    generator = torch.Generator().manual_seed(0)
    local = torch.randn(1, heads, HEAD, HEAD, generator=generator).to(device)
    shapes = {"scalar": (1, 1), "rows": (HEAD, 1), "full": (HEAD, HEAD)}
    if kind == "none":
        return Element((StateElement(local),))
    if kind == "dense":
        matrix = torch.randn(1, heads, HEAD, HEAD, generator=generator).to(device) / HEAD
        return Element((StateElement(local, None, matrix),))
    gate = torch.rand(1, heads, *shapes[kind], generator=generator).to(device)
    return Element((StateElement(local, gate),))


def time_scans(
    exchanger: StateExchanger, cases: Sequence[ScanCase], repeats: int, device: torch.device
) -> list[ScanTime]:
    """Median and spread of every case; collective, the same on every rank.

    A forward and a backward scan follow each other, as the last rank of one is the first of the
    other; half of that is one scan. So no clocks are compared. The cases take turns, so that what
    else the machine does disturbs all of them alike.
    """
    elements = {c: make_element(c.kind, c.heads, device) for c in cases}
    templates = {c: zero_state(elements[c]) for c in cases}
    users = {c: exchanger.using(c.strategy, node_size=c.node_size) for c in cases}
    crossing = (True,) * (exchanger.size - 1)
    spans = torch.zeros(len(cases), WARM_UPS + repeats, dtype=torch.float64)
    for turn in range(WARM_UPS + repeats):
        for number, case in enumerate(cases):
            for _ in range(2):  # the first one settles the allocator after another size
                dist.barrier()
                start = time.perf_counter()
                for scan in (users[case].prefix, users[case].suffix):
                    scan(elements[case], crossing, Tag(), templates[case])
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                spans[number, turn] = (time.perf_counter() - start) / 2
    exchanger.flush()
    dist.all_reduce(spans, dist.ReduceOp.MAX)
    return [_summary(row[WARM_UPS:].tolist()) for row in spans]


def _summary(spans: list[float]) -> ScanTime:
    cuts = quantiles(spans, n=5) if len(spans) > 1 else [spans[0]] * 4
    return ScanTime(median(spans) * 1e3, cuts[0] * 1e3, cuts[3] * 1e3)
