"""Messages that share ports, as streams of bytes do.

Contract: a connection carries its messages one after the other in the order of posting, as a socket
or a queue pair does. Connections that meet at a port share its time max-min fairly, as TCP streams
and queue pairs come to do: no port idles while a connection through it could go faster, and a
message that is held up at one port holds no other. A message alone on its ports takes its seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from functools import partial

from scaling_runs.model.events import Event, Simulation

_NOTHING = 1e-9  # of a message's seconds: what is left then has come


class Port:
    """One direction of a link's end; the messages that pass it now."""

    __slots__ = ("passing",)

    def __init__(self) -> None:
        self.passing: dict[Flow, None] = {}


class Flow:
    """A message on its way: seconds that are left of it at full rate, and the share it has."""

    __slots__ = ("end", "left", "ports", "share", "since", "total", "turn", "waiting")

    def __init__(self, ports: tuple[Port, ...], seconds: float, waiting: deque[Flow]) -> None:
        self.ports, self.left, self.total, self.waiting = ports, seconds, seconds, waiting
        self.share, self.since, self.turn = 0.0, 0.0, 0
        self.end = Event()


class Flows:
    """All messages of a network."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._connections: dict[Hashable, deque[Flow]] = {}
        self._changed: dict[Port, None] = {}

    def carry(self, connection: Hashable, ports: tuple[Port, ...], seconds: float) -> Event:
        """Post a message that takes `seconds` alone; the event is its last byte on the wire."""
        queue = self._connections.setdefault(connection, deque())
        flow = Flow(ports, seconds, queue)
        queue.append(flow)
        if queue[0] is flow:
            self._enter(flow)
        return flow.end

    def _enter(self, flow: Flow) -> None:
        flow.since = self.simulation.now
        for port in flow.ports:
            port.passing[flow] = None
        self._change(flow.ports)

    def _change(self, ports: Iterable[Port]) -> None:
        """Share anew what passes these ports, once all that happens at this time has happened."""
        if not self._changed:
            self.simulation.at(self.simulation.now, self._share)
        self._changed.update(dict.fromkeys(ports))

    def _share(self) -> None:
        """New shares for all messages that meet, over however many ports, one that changed."""
        now, flows = self.simulation.now, self._meeting(self._changed)
        self._changed = {}
        for flow in flows:
            flow.left -= flow.share * (now - flow.since)
            flow.since = now
        for flow, share in fair_shares(flows).items():
            flow.share, flow.turn = share, flow.turn + 1
            left = 0.0 if flow.left <= _NOTHING * flow.total else flow.left
            self.simulation.at(now + left / share, partial(self._leave, flow, flow.turn))

    @staticmethod
    def _meeting(ports: Iterable[Port]) -> dict[Flow, None]:
        flows: dict[Flow, None] = {}
        seen, ahead = set(ports), list(ports)
        while ahead:
            for flow in ahead.pop().passing:
                if flow not in flows:
                    flows[flow] = None
                    fresh = [port for port in flow.ports if port not in seen]
                    seen.update(fresh)
                    ahead += fresh
        return flows

    def _leave(self, flow: Flow, turn: int) -> None:
        if turn != flow.turn:
            return  # its share has changed since
        flow.turn += 1
        for port in flow.ports:
            del port.passing[flow]
        self._change(flow.ports)
        self.simulation.trigger(flow.end)
        flow.waiting.popleft()
        if flow.waiting:
            self._enter(flow.waiting[0])


def fair_shares(flows: Iterable[Flow]) -> dict[Flow, float]:
    """Max-min fair: the fullest ports divide what they have evenly among their messages, then the
    next fullest what is left to them; no message has more than a whole port."""
    open_flows = dict.fromkeys(flows)
    ports = dict.fromkeys(port for flow in open_flows for port in flow.ports)
    room = dict.fromkeys(ports, 1.0)
    users = {port: sum(flow in open_flows for flow in port.passing) for port in ports}
    found: dict[Flow, float] = {}
    while open_flows:
        least = min(room[port] / count for port, count in users.items() if count)
        full = [p for p, count in users.items() if count and room[p] <= least * count * (1 + 1e-12)]
        for port in full:
            for flow in port.passing:
                if flow not in open_flows:
                    continue
                found[flow] = least
                del open_flows[flow]
                for each in flow.ports:
                    room[each] -= least
                    users[each] -= 1
    return found
