"""The device engine's formulas; derived in `cost`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from flexla_dist.comm.chooser.links import Link
from flexla_dist.comm.chooser.setting import Parts, Setting, rounds
from flexla_dist.comm.topology import SAME_PROCESS

_STEP_BYTES = 1024  # what a program copies of a dense element before it waits for memory


@dataclass(frozen=True)
class _Panels:
    """Panels of a state on one rank: their number, programs, and what one of them takes.

    state: bytes of one state; message: bytes of an element that are written and read as a whole.
    told, copied: seconds to copy a state and an element from memory into a message, step by step.
    own: seconds to bring the own element there. apply, compose: of the products.
    """

    setting: Setting
    count: int
    programs: int
    state: float
    message: float
    told: float
    copied: float
    own: float
    apply: float
    compose: float

    @classmethod
    def of(cls, setting: Setting) -> _Panels:
        payload, rates = setting.payload, setting.rates
        count, dense = payload.panels, payload.kind == "dense"
        per_program = rates.flops / rates.programs
        ranks = setting.topology.size if _one_device(setting) else 1
        state, element = payload.state / count, _element_bytes(setting) / count
        step = rates.step / _STEP_BYTES if dense else 0.0
        link = setting.inside
        return cls(
            setting,
            count,
            max(1, min(count, rates.programs // ranks)),
            state,
            state if dense else element,
            state * step,
            element * step,
            element * link.panel_beta if dense else 0.0,
            payload.apply_flops / count / per_program,
            payload.repeats * payload.compose_flops / count / per_program,
        )

    def hop(self, link: Link, size: float) -> Parts:
        """One panel of so many bytes over a link."""
        return Parts(link.alpha, size * link.panel_beta)

    def credits(self, link: Link, messages: float) -> Parts:
        """To take and to give back the credits of messages that follow each other."""
        return Parts(2 * messages * self.credit(link))

    def credit(self, link: Link) -> float:
        """Seconds of a credit; on one device it is a word like that which tells of a message."""
        return link.credit or (link.alpha if _one_device(self.setting) else 0.0)

    def end(self, link: Link, size: float) -> float:
        """A program's seconds for one end of a message: its credit, its flag, half of its bytes."""
        return 1.5 * self.credit(link) + size * link.panel_beta / 2

    def waves(self, seconds: float) -> float:
        """Seconds of the busiest rank's programs for panels beyond the first, so many for each."""
        return (ceil(self.count / self.programs) - 1) * seconds


def chain(setting: Setting) -> Parts:
    """Panels walk from rank to rank."""
    panels = _Panels.of(setting)
    inside, across = setting.steps
    size, ranks, run = setting.payload.state, setting.topology.size, setting.topology.longest
    fill = _times(panels.hop(setting.inside, panels.state), inside)
    fill += _times(panels.hop(setting.across, panels.state), across)
    link = setting.inside if inside else setting.across
    fill += panels.credits(link, 1) + Parts(combine=(ranks - 2) * panels.apply)
    links = []
    if inside:
        links.append(_wire_inside(setting, size, run - 1, run - 1))
    if across:
        links.append(setting.wire_across(size, 1))
    passing = min(2, ranks - 1) * panels.end(link, panels.state)
    busiest = passing + (panels.apply if ranks > 2 else 0.0)
    return fill + _drain(panels, max(links), panels.waves(busiest))


def log_scan(setting: Setting) -> Parts:
    """Rounds in which panels of elements travel, the last ones from what begins the line."""
    place, panels = setting.topology, _Panels.of(setting)
    total = rounds(place.size)
    fill, link = _doubling(panels, place.size)
    travel = (total - 1) * panels.copied + panels.told
    own = panels.own if total > 1 else 0.0
    composing = (total - 1) * panels.apply + max(0, total - 2) * panels.compose
    fill += Parts(wire=own + travel, combine=composing + (total - 1) * panels.apply)
    slow = setting.inside if place.longest > 1 else setting.across
    busiest = (2 * total - 1) * panels.end(slow, panels.message) + own + travel
    busiest += composing + max(0, total - 2) * panels.apply
    return fill + _drain(panels, link, panels.waves(busiest))


def hierarchical(setting: Setting) -> Parts:
    """Rounds inside nodes, a chain striped over the ports between them, and back."""
    place, panels = setting.topology, _Panels.of(setting)
    between = place.nodes - 1
    if not between:
        return log_scan(setting)
    size, total = setting.payload.state, rounds(place.longest)
    striped = size / min(place.longest, place.adapters)
    fill, inside = _doubling(panels, place.longest)
    travel = total * panels.copied + (panels.own if total else 0.0)
    composing = total * (panels.apply + panels.compose)
    fill += _times(panels.hop(setting.across, panels.state), between)
    fill += panels.credits(setting.across, 1)
    if place.longest > 1:
        fill += panels.hop(setting.inside, panels.state)
        inside += setting.inside.wire(size)
    folded = (between - 1 + total) * panels.apply
    fill += Parts(wire=travel, combine=composing + folded)
    busiest = 2 * total * panels.end(setting.inside, panels.message)
    busiest += 2 * panels.end(setting.across, panels.state) + travel
    busiest += composing + (1 + total) * panels.apply
    links = max(inside, setting.across.wire(striped))
    return fill + _drain(panels, links, panels.waves(busiest))


def all_gather(setting: Setting) -> Parts:
    """Every element straight to every rank after it, which folds those before its own."""
    place, panels = setting.topology, _Panels.of(setting)
    size, others, run = _element_bytes(setting), place.size - 1, place.longest
    slow = setting.across if place.nodes > 1 else setting.inside
    links = [_wire_inside(setting, size, run * (run - 1) // 2, run - 1)]
    if not _one_device(setting):
        links.append((run - 1) * setting.inside.wire(size))
    if place.nodes > 1:
        links.append(setting.wire_across(size, setting.leaving()))
    further = max(slow.gap, panels.message * slow.panel_beta)
    own = panels.own if others > 1 else 0.0
    travel = own + max(others * panels.told, (others - 1) * panels.copied)
    folded = (others - 1) * panels.apply
    fill = panels.hop(slow, panels.message) + panels.credits(slow, others)
    fill += Parts(wire=(others - 1) * further + travel, combine=folded)
    busiest = others * panels.end(slow, panels.message) + max(travel, folded)
    return fill + _drain(panels, max(links), panels.waves(busiest))


def _doubling(panels: _Panels, count: int) -> tuple[Parts, float]:
    """(hops of a panel in rounds over `count` ranks, seconds of the busiest link in all of them);
    without what is copied and multiplied between."""
    setting = panels.setting
    place, size = setting.topology, _element_bytes(setting)
    whole = count > place.longest
    fill, inside, across, distance = Parts(), 0.0, 0.0, 1
    while distance < count:
        hops = []
        if place.longest > distance:
            one = panels.hop(setting.inside, panels.message) + panels.credits(setting.inside, 1)
            hops.append(one)
            messages = place.longest - distance
            inside += _wire_inside(setting, size, messages, min(distance, messages))
        if whole:
            one = panels.hop(setting.across, panels.message) + panels.credits(setting.across, 1)
            hops.append(one)
            across += setting.wire_across(size, min(distance, place.longest))
        fill += max(hops, key=lambda hop: hop.latency + hop.wire)
        distance *= 2
    return fill, max(inside, across)


def _element_bytes(setting: Setting) -> float:
    """Bytes of an element's messages: every panel of a head brings its own copy of a dense M."""
    payload = setting.payload
    return payload.state + payload.repeats * payload.transition


def _wire_inside(setting: Setting, size: float, messages: int, alone: int) -> float:
    """Seconds of messages inside a node. On one device all are written to and read from a memory
    that has its own rate, whatever a link made of few programs reached; `alone` of them are from
    ranks that nothing enters, so without M. Elsewhere a link of a later node decides."""
    if _one_device(setting):
        moved = (messages - alone) * size + alone * setting.payload.state
        return 2 * moved / setting.rates.stream
    return setting.inside.wire(size, messages)


def _drain(panels: _Panels, link: float, programs: float) -> Parts:
    """The panels behind the first, at the pace of what is busiest."""
    behind = link * (panels.count - 1) / panels.count
    return Parts(wire=behind) if behind >= programs else Parts(combine=programs)


def _times(parts: Parts, count: float) -> Parts:
    return Parts(parts.latency * count, parts.wire * count, parts.combine * count)


def _one_device(setting: Setting) -> bool:
    """Whether all ranks share one device and its programs."""
    place = setting.topology
    return place.nodes == 1 and place.inside == SAME_PROCESS


PARTS: dict[str, Callable[[Setting], Parts]] = {
    "chain": chain,
    "log_scan": log_scan,
    "hierarchical": hierarchical,
    "all_gather": all_gather,
}
