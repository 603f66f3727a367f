"""Times of a call that several ranks make together.

Contract: a sample is the time of the slowest rank. Times are those of CUDA events on a GPU and of
the clock on the CPU. On a GPU the ranks start together after a collective on the device, before
which it rests for `LEAD_SECONDS`: the host queues the call meanwhile, so that kernels follow each
other as in a training step, whose host runs ahead; a call that takes the host longer shows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], object]
FEWEST, MOST = 5, 60
BATCHES = 5
LEAD_SECONDS = 2e-3
CYCLES = 2e9  # a second, of a GPU's clock, about


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call: median, 20th and 80th percentile, number of samples."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        """From the samples in milliseconds."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered),
            ordered[round(0.2 * last)],
            ordered[round(0.8 * last)],
            len(ordered),
        )


class Clock:
    """Times calls of one rank of a group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self._token = torch.zeros(1, device=device)

    def meet(self) -> None:
        """Wait for all ranks: on a GPU its stream waits, so that kernels start together."""
        dist.all_reduce(self._token, group=self.group)

    def barrier_samples(self, call: Call, seconds: float) -> list[float]:
        """Milliseconds of calls before each of which the ranks meet."""
        count = self._count(call, seconds)
        return self.largest([self._sample(call, 1) for _ in range(count)])

    def stream_samples(self, call: Call, seconds: float) -> list[float]:
        """Calls in a row: a rank may run ahead of the others. Per call, of each batch of calls."""
        each = max(1, self._count(call, seconds) // BATCHES)
        return self.largest([self._sample(call, each) for _ in range(BATCHES)])

    def _count(self, call: Call, seconds: float) -> int:
        """Calls that fill the time, the same number on all ranks."""
        call()
        once = self.largest([self._sample(call, 1), self._sample(call, 1)])
        return max(FEWEST, min(MOST, int(1e3 * seconds / max(min(once), 1e-3))))

    def _sample(self, call: Call, calls: int) -> float:
        """Milliseconds of a call, this rank's, over `calls` of them."""
        if self.device.type == "cuda":
            return self._device_sample(call, calls)
        self.meet()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - begin) / calls

    def _device_sample(self, call: Call, calls: int) -> float:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(LEAD_SECONDS * CYCLES))
        self.meet()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls

    def largest(self, values: Sequence[float]) -> list[float]:
        """Entry by entry the largest value of all ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return found.tolist()
