"""Device time, host time and memory of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

Call = Callable[[], object]
WARMUP_MS, REPEAT_MS = 50, 200
HOST_CALLS, HOST_ROUNDS = 8, 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds on the device (median, 20th and 80th percentile), microseconds of the host to
    launch one call, and the most MiB in use (arguments included)."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    host_us: float
    peak_mib: float


def measure_call(call: Call, warmup_ms: float = WARMUP_MS, repeat_ms: float = REPEAT_MS) -> Timing:
    """Time a call on the GPU.

    The first calls compile and tune and are not timed. Between timed calls the L2 cache is
    overwritten; CUDA events take the times.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    peak = peak_mib(call)
    median, low, high = triton.testing.do_bench(
        call, warmup=warmup_ms, rep=repeat_ms, quantiles=[0.5, 0.2, 0.8]
    )
    return Timing(median, low, high, host_us(call), peak)


def host_us(call: Call) -> float:
    """Microseconds that the host needs to launch a call, the device's queue being empty."""
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - begin) / HOST_CALLS)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(rounds)


def peak_mib(call: Call) -> float:
    """Most memory in use during a call, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20
