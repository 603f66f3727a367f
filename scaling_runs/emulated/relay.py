#!/usr/bin/env python3
"""Cables with a latency, for kernels without netem: pairs of TAP devices and what passes frames.

    python scaling_runs/emulated/relay.py --cables 2 --latency-us 500

Makes the devices host0, port0, host1, port1 .. in the network namespace where it runs, says `ready`
and hands each frame of one end of a cable to the other end after the latency, in order, until it is
ended; then the devices are gone. Nothing is dropped and no rate is kept: queueing disciplines of
the devices do that.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

TUN = "/dev/net/tun"
_SET_DEVICE, _TAP, _PLAIN = 0x400454CA, 0x0002, 0x1000  # TUNSETIFF, IFF_TAP, IFF_NO_PI
_SET_TIMER_SLACK = 29  # prctl: sleeps end within a microsecond of their time, not fifty
LARGEST_FRAME = 1 << 16
AT_ONCE = 64  # frames read of one device before the others have their turn


@dataclass
class DelayLine:
    """Frames on their way in one direction: each leaves `latency` seconds after it came."""

    latency: float
    _frames: deque[tuple[float, bytes]] = field(default_factory=deque)

    def put(self, now: float, frame: bytes) -> None:
        """A frame comes."""
        self._frames.append((now + self.latency, frame))

    def take(self, now: float) -> list[bytes]:
        """The frames whose time has come, in the order in which they came."""
        found = []
        while self._frames and self._frames[0][0] <= now:
            found.append(self._frames.popleft()[1])
        return found

    @property
    def due(self) -> float | None:
        """When the next frame leaves; None where there is none."""
        return self._frames[0][0] if self._frames else None


def open_tap(name: str) -> int:
    """The descriptor of a new TAP device in this network namespace, which lives as long as it."""
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _TAP | _PLAIN))
    return descriptor


def pass_frames(pairs: Sequence[tuple[int, int]], latency: float) -> None:
    """Pass frames between the ends of each pair, for ever."""
    ways = {a: (b, DelayLine(latency)) for pair in pairs for a, b in (pair, pair[::-1])}
    while True:
        times = [line.due for _, line in ways.values() if line.due is not None]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        readable, _, _ = select.select(list(ways), [], [], wait)
        for source in readable:
            _read(source, ways[source][1])
        now = time.monotonic()
        for target, line in ways.values():
            for frame in line.take(now):
                _write(target, frame)


def _read(source: int, line: DelayLine) -> None:
    for _ in range(AT_ONCE):
        try:
            line.put(time.monotonic(), os.read(source, LARGEST_FRAME))
        except BlockingIOError:
            return
        except OSError:  # the device is not up yet, or no longer
            time.sleep(1e-3)
            return


def _write(target: int, frame: bytes) -> None:
    try:
        os.write(target, frame)
    except OSError:  # the other end is not up: a frame into nowhere, as on a real cable
        return


def main(words: Sequence[str] | None = None) -> int:
    """Make the devices and pass frames."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cables", type=int, required=True, help="pairs of devices")
    parser.add_argument("--latency-us", type=float, required=True, help="of a cable, one way")
    options = parser.parse_args(words)
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1000)
    try:
        pairs = [(open_tap(f"host{n}"), open_tap(f"port{n}")) for n in range(options.cables)]
    except OSError as why:
        print(f"relay.py: no TAP device by {TUN}: {why}", file=sys.stderr)
        return 2
    print("ready", flush=True)
    pass_frames(pairs, 1e-6 * options.latency_us)
    return 0


if __name__ == "__main__":
    sys.exit(main())
