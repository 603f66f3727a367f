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
POINT_SECONDS = 3.0  # of all calls of a point but the first two, roughly
LONG_MS = 40.0  # calls from here on are repeated as often as the time of a point allows
MOST_LONG = 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds on the device (median, 20th and 80th percentile), microseconds of the host to
    launch one call, and the most MiB in use (arguments included)."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    host_us: float
    peak_mib: float


def measure_call(
    call: Call,
    warmup_ms: float = WARMUP_MS,
    repeat_ms: float = REPEAT_MS,
    limit_s: float = POINT_SECONDS,
) -> Timing:
    """Time a call on the GPU.

    The first calls compile and tune and are not timed. Between timed calls the L2 cache is
    overwritten; CUDA events take the times. A call of more than `LONG_MS` is repeated fewer times,
    at least once, so that all takes about `limit_s` seconds.
    """
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - begin
    if 1e3 * once > LONG_MS:
        return _measure_long(call, repetitions(once, limit_s))
    call()
    torch.cuda.synchronize()
    peak = peak_mib(call)
    median, low, high = triton.testing.do_bench(
        call, warmup=warmup_ms, rep=repeat_ms, quantiles=[0.5, 0.2, 0.8]
    )
    return Timing(median, low, high, host_us(call), peak)


def repetitions(once_s: float, limit_s: float) -> int:
    """How often a long call is timed; one more measures its memory."""
    return max(1, min(MOST_LONG, int(limit_s / once_s) - 1))


def _measure_long(call: Call, times: int) -> Timing:
    """A few calls, each timed by events; the host's time is that of launching the same calls."""
    peak = peak_mib(call)
    found, host = [], []
    for _ in range(times):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        first.record()
        call()
        last.record()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last))
    low, high = (statistics.quantiles(found, n=5)[i] if times > 1 else found[0] for i in (0, 3))
    return Timing(statistics.median(found), low, high, 1e6 * statistics.median(host), peak)


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
