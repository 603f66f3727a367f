"""What an emulated network is like: hosts, ranks of each, rate and latency."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

# Frames as large as a relay written in Python can keep up with, and no larger than a burst of tbf.
FRAME_BYTES = 16000
NETWORK_PREFIX = "10.77.0"
MOST_HOSTS = 64
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Shape:
    """hosts: network namespaces. ranks: processes of each. rate: bits a second of a host's port, in
    each direction. latency: seconds from a host to another, one way, added by its cables."""

    hosts: int
    ranks: int
    rate: float
    latency: float

    def __post_init__(self) -> None:
        if not 2 <= self.hosts <= MOST_HOSTS or self.ranks < 1:
            raise ValueError(
                f"got {self.hosts} hosts of {self.ranks} ranks, expected 2 to {MOST_HOSTS} hosts "
                "of at least 1"
            )
        if not 1e5 <= self.rate <= 1e11 or not 0 <= self.latency <= 10:
            raise ValueError(
                f"got a rate of {self.rate:g} bits/s and a latency of {self.latency:g} s, expected "
                "0.1 Mbit/s to 100 Gbit/s and 0 to 10 s"
            )

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks

    @property
    def burst(self) -> int:
        """Bytes that tbf lets pass at once: two frames, or what the rate gives in a quarter of a
        millisecond, so that all but small messages meet the rate."""
        return int(max(2 * FRAME_BYTES, self.rate / 8 / 4000))

    def host(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.ranks

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{NETWORK_PREFIX}.{host + 1}"

    def name(self, host: int) -> str:
        """The name of a host. It tells the network too, because what is measured of links is kept
        by the names of hosts."""
        network = f"{self.rate / 1e6:g}mbit-{1e6 * self.latency:g}us-{self.hosts}x{self.ranks}"
        return f"host{host}-{network}".replace(".", "-").replace("+", "")

    def variables(self, rank: int, port: int) -> Mapping[str, str]:
        """What torchrun would tell a rank, and the device that gloo shall use."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank % self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(self.host(rank)),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def words(self) -> str:
        """In a line."""
        return (
            f"{self.hosts} hosts of {self.ranks} ranks, {self.rate / 1e9:g} Gbit/s, "
            f"{self.latency * 1e6:g} us added between hosts"
        )


def rate_of(text: str) -> float:
    """Bits a second of `100mbit` or `2.5gbit`, as tc writes them."""
    for unit, factor in _UNITS.items():
        number = text.lower().removesuffix(unit)
        if number != text.lower():
            try:
                return float(number) * factor
            except ValueError:
                break
    raise argparse.ArgumentTypeError(
        f"{text!r} is no rate, expected a number with {', '.join(_UNITS)}, such as 500mbit"
    )
