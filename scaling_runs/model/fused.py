"""Exchanges inside kernels, as processes of the simulation.

Contract: as the device engine does. A group of heads is exchanged once all its summaries are there,
panel by panel, and its local pass waits for all its states.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

from scaling_runs.model.clusters import ModelProblem
from scaling_runs.model.direction import Direction
from scaling_runs.model.events import Delay, Event, Process
from scaling_runs.model.workload import Workload


def _grouped(load: Workload) -> list[list[int]]:
    """Panels by group of heads."""
    groups = min(load.groups, load.panels)
    load = replace(load, groups=groups)
    return [[p for p in range(load.panels) if load.group(p) == g] for g in range(groups)]


def fused_chain(d: Direction, at: int) -> Process:
    """Inside kernels: once a group of heads is summarised, each of its panels goes on as soon as
    its entering state is there; the group's local pass waits for all its states."""
    last, count = at + 1 == d.ranks, d.load.panels
    simulation, groups = d.network.simulation, _grouped(d.load)
    size, hop = d.load.bytes.state / count, d.load.kernels.apply / count
    ready: list[Event] = [Event() for _ in groups]

    def pass_on(panel: int, begun: Event) -> Process:
        if at:
            yield d.received(at - 1, at, panel)
        yield begun
        yield Delay(hop)
        d.send("device", at, at + 1, size, panel)

    for panels, begun in zip(groups, ready, strict=True):
        for panel in panels if not last else ():
            simulation.spawn(pass_on(panel, begun))
    for panels, begun in zip(groups, ready, strict=True):
        if not last:
            yield d.work(at, d.pre * len(panels) / count)
        simulation.trigger(begun)
    for panels in groups:
        for panel in panels if at else ():
            yield d.received(at - 1, at, panel)
        yield d.work(at, d.post * len(panels) / count)


def fused_hierarchical(d: Direction, at: int) -> Process:
    """Inside kernels: once a group of heads is summarised, its panels are doubled in the node; each
    rank of a node carries its share of the node's panels to the next node and tells the node's
    ranks what enters. The group's local pass waits for all its states."""
    size = min(d.network.cluster.node_size, d.ranks)
    if d.ranks % size:
        raise ModelProblem(f"fused_hierarchical: {d.ranks} ranks do not fill nodes of {size}")
    count, kernels, simulation = d.load.panels, d.load.kernels, d.network.simulation
    node, position, nodes = at // size, at % size, d.ranks // size
    rounds = ceil(log2(size)) if size > 1 else 0
    element, state = d.load.bytes.element / count, d.load.bytes.state / count
    inside = d.network.cluster.link("device", 0, min(1, d.ranks - 1))
    groups = _grouped(d.load)
    ready: list[Event] = [Event() for _ in groups]
    composed: list[Event] = [Event() for _ in range(count)]

    def compose(panel: int, begun: Event) -> Process:
        """Doubling: an element a round goes out of this rank's port, what arrives is composed."""
        yield begun
        for _ in range(rounds):
            yield d.network.push("device", d.rank(at), element)
            yield Delay(inside.alpha + kernels.combine / count)
        simulation.trigger(composed[panel])
        if nodes > 1 and panel % size == position:
            yield from carry(panel)

    def carry(panel: int) -> Process:
        """This rank's share: the node's map comes from the node's last rank."""
        if size > 1:
            yield Delay(inside.seconds(element))
        if node:
            yield d.received(at - size, at, panel)
            for place in range(node * size, node * size + size):
                if place != at:
                    d.send("device", at, place, state, ("told", panel))
        if node + 1 < nodes:
            yield Delay(kernels.apply / count)
            d.send("device", at, at + size, state, panel)

    for panels, begun in zip(groups, ready, strict=True):
        for panel in panels:
            simulation.spawn(compose(panel, begun))
    for panels, begun in zip(groups, ready, strict=True):
        yield d.work(at, d.pre * len(panels) / count)
        simulation.trigger(begun)
    for panels in groups:
        for panel in panels:
            yield composed[panel]
            if node:
                owner = node * size + panel % size
                source, what = (at - size, panel) if owner == at else (owner, ("told", panel))
                yield d.received(source, at, what)
                yield Delay(kernels.apply / count)
        yield d.work(at, d.post * len(panels) / count)
