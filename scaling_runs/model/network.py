"""Messages and collectives between the ranks of a modelled cluster."""

from __future__ import annotations

from collections.abc import Hashable

from scaling_runs.model.clusters import TWO_SIDED, Cluster
from scaling_runs.model.events import Delay, Event, Meeting, Process, Resource, Simulation, Use
from scaling_runs.model.flows import Flows, Port

CORE_TURN = 2e-3  # seconds that a process keeps a core for which others wait


class Network:
    """Ports and cores of the ranks; messages by key."""

    def __init__(self, simulation: Simulation, cluster: Cluster, ranks: int) -> None:
        self.simulation, self.cluster, self.ranks = simulation, cluster, ranks
        self._flows = Flows(simulation)
        self._out = [Port() for _ in range(ranks)]
        self._in = [Port() for _ in range(ranks)]
        cards = -(-ranks // cluster.sharing)
        self._card_out = [Port() for _ in range(cards)]
        self._card_in = [Port() for _ in range(cards)]
        nodes = -(-ranks // cluster.node_size)
        cores = cluster.cores
        self._cores = None if cores is None else [Resource(cores) for _ in range(nodes)]
        self._chips = [Resource() for _ in range(ranks)]
        self._wire = Resource()
        self._arrived: dict[Hashable, Event] = {}
        self._awaited: dict[Hashable, Event] = {}
        self._meetings: dict[Hashable, Meeting] = {}
        self.bytes = 0.0

    def compute(self, rank: int, seconds: float) -> Use:
        """Work of a rank, on its device or on a core of its node."""
        if self._cores is None:
            return Use((self._chips[rank],), seconds)
        return Use((self._cores[rank // self.cluster.node_size],), seconds, CORE_TURN)

    def send(self, kind: str, source: int, target: int, size: float, key: Hashable) -> None:
        """Post a message; `receive(key)` tells when it is there."""
        self.bytes += size
        self.simulation.spawn(self._transfer(kind, source, target, size, key))

    def push(self, kind: str, source: int, size: float) -> Event:
        """A message inside the node that has left the port of its sender."""
        link = self.cluster.link(kind, 0, min(1, self.ranks - 1))
        self.bytes += size
        ports = (self._out[source],)
        return self._flows.carry(("push", source), ports, size / link.bandwidth)

    def receive(self, key: Hashable) -> Event:
        """Post the receive of the message of this key; the event is its arrival."""
        self.simulation.trigger(self._awaited.setdefault(key, Event()))
        return self._arrived.setdefault(key, Event())

    def _notice(self, source: int, target: int, key: Hashable) -> Process:
        """Wait until the sender knows that the message is awaited: two-sided messages leave no
        sooner, neither gloo's nor those of NCCL between nodes."""
        awaited = self._awaited.setdefault(key, Event())
        yield awaited
        if awaited.time is not None:
            known = awaited.time + self.cluster.notice(source, target)
            yield Delay(max(0.0, known - self.simulation.now))

    def _transfer(self, kind: str, source: int, target: int, size: float, key: Hashable) -> Process:
        cluster = self.cluster
        link = cluster.link(kind, source, target)
        if kind in TWO_SIDED:
            yield from self._notice(source, target, key)
        if self._cores is not None:
            # Over a host's own sockets a message is work of its cores.
            yield Use((self._cores[source // cluster.node_size],), link.seconds(size))
        else:
            if source // cluster.node_size == target // cluster.node_size:
                ports = (self._out[source], self._in[target])
            else:
                share = cluster.sharing
                ports = (self._card_out[source // share], self._card_in[target // share])
            yield self._flows.carry((source, target), ports, size / link.bandwidth)
            yield Delay(link.alpha)
        self.simulation.trigger(self._arrived.setdefault(key, Event()))

    def gather(self, key: Hashable, size: float) -> Event:
        """An all-gather of `size` bytes a rank.

        A ring of P - 1 steps, N - 1 of them between N nodes; each has its latency. Over nodes all
        their cards carry: a rank's card brings N - 1 parts while the links in the node pass on
        P - 1. Where steps wait (gloo), a part goes in two halves and a half is posted when the
        half before the last has come: on the slowest link a further step takes the longer of its
        wire and of a latency with half of its wire.
        """
        ranks, cluster = self.ranks, self.cluster
        inside = cluster.link("gather", 0, min(1, ranks - 1))
        steps = -(-ranks // cluster.node_size) - 1
        latency = (ranks - 1 - steps) * inside.alpha
        seconds = (ranks - 1) * size / inside.bandwidth
        if steps:
            between = cluster.link("gather", 0, ranks - 1)
            if cluster.ring_waits:
                slow = max(inside, between, key=lambda link: link.seconds(size))
                wire = size / slow.bandwidth
                further = max(wire, slow.alpha + wire / 2)
                return self._meet(key, slow.alpha + wire + (ranks - 2) * further)
            latency += steps * between.alpha
            seconds = max(seconds, steps * size * cluster.sharing / between.bandwidth)
        return self._meet(key, (latency + seconds) * self._crowding())

    def all_to_all(self, key: Hashable, size: float) -> Event:
        """An all-to-all in which a rank holds `size` bytes: what goes out of the node and what
        stays inside move beside each other."""
        ranks, cluster = self.ranks, self.cluster
        near = min(cluster.node_size, ranks)
        inside = cluster.link("all_to_all", 0, min(1, ranks - 1))
        seconds = (near - 1) * inside.alpha + size * (near - 1) / ranks / inside.bandwidth
        if ranks > near:
            outside = cluster.link("all_to_all", 0, ranks - 1)
            far = size * (ranks - near) / ranks * cluster.sharing / outside.bandwidth
            seconds = max(seconds, (ranks - near) * outside.alpha + far)
        return self._meet(key, seconds * self._crowding())

    def _crowding(self) -> float:
        """How many ranks take turns on a core."""
        if self._cores is None or self.cluster.cores is None:
            return 1.0
        return max(1.0, min(self.ranks, self.cluster.node_size) / self.cluster.cores)

    def _meet(self, key: Hashable, seconds: float) -> Event:
        if key not in self._meetings:
            self._meetings[key] = Meeting(self.simulation, self.ranks, seconds, self._wire)
        return self._meetings[key].arrive()
