"""Messages between two neighbouring ranks and products on one of them, timed.

Both ranks of a pair make the same calls. Medians, because the scan that they stand for meets the
same interruptions; sizes far apart, because large messages have another speed.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Protocol

import torch

from flexla_dist.comm.channel import Channel, Incoming, Outgoing
from flexla_dist.comm.chooser.links import Curve, Link, Rates
from flexla_dist.comm.element import Element, StateElement, apply
from flexla_dist.comm.tag import Kind, Tag

SIZES = (4 << 10, 1 << 20, 8 << 20)
REPEATS = 25
WARM_UPS = 3
GATHERED_BYTES, GATHER_REPEATS = 32 << 20, 15
BURST = 5
_RATE_HEADS, _RATE_DIM, _RATE_REPEATS = 32, 128, 15
_RATE_STATES = 24  # 48 MiB: what arrives in a scan is in no cache either


class Transport(Protocol):
    """How an engine moves bytes between this rank and a neighbour; both make each call together.

    name: of the engine's carrier ("gloo", "nccl", a heap's name), part of the cache's key.
    Sizes are bytes; each call returns seconds on this rank's clock.
    """

    name: str

    def gather(self, size: int) -> float:
        """An all-gather of so many bytes of every rank; all ranks of the group call it, and before
        pairs measure: it opens connections that need all of them."""
        ...

    def there_and_back(self, peer: int, size: int, first: bool) -> float:
        """A message to the peer and one back; `first`: this rank sends first."""
        ...

    def both_ways(self, peer: int, size: int) -> float:
        """A message each way at the same time."""
        ...

    def burst(self, peer: int, size: int, count: int, first: bool) -> float:
        """`count` messages from the first rank posted together, then one small message back."""
        ...

    def panel(self, peer: int, size: int, first: bool) -> float | None:
        """As `there_and_back` by one program of a kernel; None without kernels."""
        ...


@dataclass
class HostTransport:
    """The host engine's messages: packed, with their header, as a scan sends them."""

    channel: Channel
    device: torch.device
    name: str

    def gather(self, size: int) -> float:
        """See `Transport`: NCCL's communicator of the whole group is made by all ranks."""
        state = self._state(size)
        start = self._now()
        self.channel.all_gather(Kind.STATE, Tag(), state)
        return self._now() - start

    def there_and_back(self, peer: int, size: int, first: bool) -> float:
        """See `Transport`."""
        state, tag = self._state(size), Tag()
        start = self._now()
        if first:
            self.channel.send_state(peer, state, tag)
        got = self.channel.receive_state(peer, state, tag)
        if not first:
            self.channel.send_state(peer, got, tag)
        return self._now() - start

    def both_ways(self, peer: int, size: int) -> float:
        """See `Transport`."""
        state = self._state(size)
        start = self._now()
        self._exchange([peer], [peer], state)
        return self._now() - start

    def burst(self, peer: int, size: int, count: int, first: bool) -> float:
        """See `Transport`."""
        state, small = self._state(size), self._state(SIZES[0])
        start = self._now()
        if first:
            self._exchange([peer] * count, [], state)
            self._exchange([], [peer], small)
        else:
            self._exchange([], [peer] * count, state)
            self._exchange([peer], [], small)
        return self._now() - start

    def panel(self, peer: int, size: int, first: bool) -> float | None:
        """See `Transport`: the host has no kernels."""
        return None

    def _exchange(self, targets: list[int], sources: list[int], state: tuple) -> None:
        sends = [Outgoing(rank, state) for rank in targets]
        receives = [Incoming(rank, state) for rank in sources]
        self.channel.exchange(Kind.STATE, Tag(), sends, receives)

    def _state(self, size: int) -> tuple[torch.Tensor]:
        return (torch.ones(size // 4, device=self.device),)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure_link(
    transport: Transport,
    peer: int,
    first: bool,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
) -> Link:
    """The link to a neighbour; the two ranks call it together, one of them as `first`.

    sizes: of messages, ascending; repeats: of each. As they are, it takes about half a second
    between processes of a host. Sizes take turns, so that a moment in which
    the machine does something else is no size's alone.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for turn in range(WARM_UPS + repeats):
        for size in sizes:
            found = {
                ("one", size): transport.there_and_back(peer, size, first) / 2,
                ("both", size): transport.both_ways(peer, size),
            }
            if size == sizes[0]:
                found["many", size] = transport.burst(peer, size, BURST, first)
            for key, seconds in found.items() if turn >= WARM_UPS else ():
                times.setdefault(key, []).append(seconds)
    one = [(size, median(times["one", size])) for size in sizes]
    both = [(size, median(times["both", size])) for size in sizes]
    alone, many = one[0][1], median(times["many", sizes[0]])
    return Link(
        Curve(_ascending(one)),
        Curve(_ascending(both)),
        gap=max(0.0, (many - 2 * alone) / (BURST - 1)),
        panel_beta=_panel_beta(transport, peer, first, repeats),
        measured=True,
        source=today(),
    )


def measure_gather(transport: Transport, ranks: int) -> Curve:
    """Seconds of an all-gather by the bytes of each rank; all ranks of the group call it.

    It is measured by itself because its memory, that of all elements at once, has its own price.
    """
    large = max(16 * SIZES[0], GATHERED_BYTES // ranks)
    points = []
    for size in (SIZES[0], large // 8, large // 2, large):
        times = [transport.gather(size) for _ in range(WARM_UPS + GATHER_REPEATS)]
        points.append((size, median(times[WARM_UPS:])))
    return Curve(_ascending(points))


def measure_rates(device: torch.device) -> Rates:
    """What applying elements costs on a device, as the host engine does it."""
    dims = (1, _RATE_HEADS, _RATE_DIM, _RATE_DIM)
    states = [torch.ones(dims, device=device) for _ in range(_RATE_STATES)]
    gate = torch.ones(1, 1, 1, 1, device=device)
    small = (torch.ones(1, 1, 8, 8, device=device),)
    launch = _time(lambda: apply(Element((StateElement(small[0], gate),)), small), device) / 2
    turns = cycle(zip(states, states[1:] + states[:1], strict=True))

    def scale() -> None:
        local, state = next(turns)
        apply(Element((StateElement(local, gate),)), (state,))

    scaled = _time(scale, device)
    product = _time(lambda: torch.matmul(*next(turns)), device)
    count = states[0].numel()
    stream = 5 * count * 4 / max(scaled - 2 * launch, scaled / 2)
    flops = 2.0 * _RATE_DIM * count / max(product - launch, product / 2)
    programs = 1
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count
    return Rates(launch, stream, flops, programs, True, today())


def _ascending(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Points whose seconds do not fall: noise must not make larger messages free."""
    found: list[tuple[int, float]] = []
    for size, seconds in points:
        found.append((size, max(seconds, found[-1][1] if found else 0.0)))
    return tuple(found)


def _panel_beta(transport: Transport, peer: int, first: bool, repeats: int) -> float:
    small, large = 4 << 10, 32 << 10
    times = []
    for size in (small, large):
        found = [transport.panel(peer, size, first) for _ in range(WARM_UPS + repeats)]
        known = [seconds for seconds in found[WARM_UPS:] if seconds is not None]
        if not known:
            return 0.0
        times.append(median(known) / 2)
    return max(0.0, (times[1] - times[0]) / (large - small))


def _time(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(WARM_UPS + _RATE_REPEATS):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[WARM_UPS:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def today() -> str:
    """When something was measured."""
    return datetime.date.today().isoformat()
