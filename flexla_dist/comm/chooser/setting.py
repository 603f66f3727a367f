"""What an estimate is made of, and the parts that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2

from flexla_dist.comm.chooser.links import Curve, Link, Rates
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.topology import NETWORK, Topology


@dataclass(frozen=True)
class Setting:
    """What an estimate is made of: ranks, payload, links by class, rates, overlappable seconds.

    ring: whether all-gathers go around a ring (NCCL) instead of from each rank to each. gather:
    seconds of an all-gather by bytes of a rank, where that was measured.
    """

    topology: Topology
    payload: Payload
    links: Mapping[str, Link]
    rates: Rates
    work: float = 0.0
    ring: bool = False
    gather: Curve | None = None

    @property
    def inside(self) -> Link:
        """The link inside nodes; that between nodes where every node has one rank."""
        place = self.topology
        return self.links[place.inside if place.longest > 1 else place.across]

    @property
    def across(self) -> Link:
        """The link between nodes; that inside where there is one node."""
        place = self.topology
        return self.links[place.across if place.nodes > 1 else place.inside]

    @property
    def steps(self) -> tuple[int, int]:
        """Hops of a chain (inside nodes, between nodes)."""
        return self.topology.size - self.topology.nodes, self.topology.nodes - 1

    @property
    def together(self) -> int:
        """Nodes that share one host, where the caller said what a node is."""
        place = self.topology
        return 1 if place.across == NETWORK else place.nodes

    def crowd(self, ranks: int) -> float:
        """How much slower products are when so many ranks of every node compute at once."""
        place = self.topology
        busy = ranks * self.together
        return max(1.0, busy / place.cores) if place.device == "cpu" else 1.0

    def lanes_out(self, link: Link) -> float:
        """Messages that leave a node side by side."""
        if link is self.inside:
            return link.lanes
        return min(link.lanes, self.topology.adapters)

    def wire_across(self, size: float, messages: float) -> float:
        """Seconds beyond alpha of messages that leave a node, over all its ports."""
        link = self.across
        return link.wire(size) * max(1.0, messages / self.lanes_out(link))

    def leaving(self) -> int:
        """Elements that leave the largest node in an all-gather."""
        place = self.topology
        outside = place.size - place.longest
        return outside if self.ring else place.longest * outside


@dataclass(frozen=True)
class Parts:
    """Seconds of a formula by what they are spent on."""

    latency: float = 0.0
    wire: float = 0.0
    combine: float = 0.0

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.latency + other.latency, self.wire + other.wire, self.combine + other.combine
        )


def rounds(count: int) -> int:
    """Rounds of recursive doubling over `count` ranks."""
    return ceil(log2(count)) if count > 1 else 0
