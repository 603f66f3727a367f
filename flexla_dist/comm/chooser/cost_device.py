"""The device engine's formulas; derived in `cost`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from flexla_dist.comm.chooser.links import Link
from flexla_dist.comm.chooser.setting import Parts, Setting, rounds
from flexla_dist.comm.topology import SAME_PROCESS


@dataclass(frozen=True)
class _Panels:
    """Panels of a state on one rank: their number, bytes, programs, and products' seconds."""

    setting: Setting
    count: int
    size: float
    programs: int
    apply: float
    compose: float

    @classmethod
    def of(cls, setting: Setting) -> _Panels:
        payload, rates = setting.payload, setting.rates
        count = payload.panels
        per_program = rates.flops / rates.programs
        ranks = setting.topology.size if _one_device(setting) else 1
        return cls(
            setting,
            count,
            payload.state / count,
            max(1, min(count, rates.programs // ranks)),
            payload.apply_flops / count / per_program,
            payload.compose_flops / count / per_program,
        )

    @property
    def of_element(self) -> float:
        """Panels of an element."""
        payload = self.setting.payload
        return self.count * payload.element / max(1, payload.state)

    def hop(self, link: Link) -> Parts:
        """One panel over a link, applied."""
        return Parts(link.alpha, self.size * link.panel_beta, self.apply)

    def waves(self, passes: float, seconds: float) -> float:
        """Seconds of the programs beyond the first panel, `passes` panels of so many seconds."""
        return max(0.0, ceil(passes / self.programs) - 1) * seconds


def chain(setting: Setting) -> Parts:
    """Panels walk from rank to rank."""
    panels = _Panels.of(setting)
    inside, across = setting.steps
    fill = _times(panels.hop(setting.inside), inside) + _times(panels.hop(setting.across), across)
    size = setting.payload.state
    links = []
    if inside:
        links.append(setting.inside.wire(size, setting.topology.longest - 1))
    if across:
        links.append(setting.wire_across(size, 1))
    hop = panels.hop(setting.inside if inside else setting.across)
    return fill + _drain(panels, max(links), panels.waves(panels.count, hop.wire + hop.combine))


def log_scan(setting: Setting) -> Parts:
    """Rounds in which panels of elements travel."""
    return _doubling(setting, setting.topology.size, Parts(), 0.0, 0.0)


def hierarchical(setting: Setting) -> Parts:
    """Rounds inside nodes, a chain striped over the ports between them, and back."""
    place, panels = setting.topology, _Panels.of(setting)
    between = place.nodes - 1
    if not between:
        return log_scan(setting)
    size = setting.payload.state
    striped = size / min(place.longest, place.adapters)
    told = panels.hop(setting.inside) if place.longest > 1 else Parts()
    back = setting.inside.wire(size) if place.longest > 1 else 0.0
    extra = _times(panels.hop(setting.across), between) + told
    return _doubling(setting, place.longest, extra, back, setting.across.wire(striped))


def all_gather(setting: Setting) -> Parts:
    """Every element straight to every rank, which folds those before its own."""
    place, panels = setting.topology, _Panels.of(setting)
    size, others, run = setting.payload.element, place.size - 1, place.longest
    slow = setting.across if place.nodes > 1 else setting.inside
    first = Parts(slow.alpha + (others - 1) * slow.gap, panels.size * slow.panel_beta, 0.0)
    links = [(run - 1) * setting.inside.wire(size), setting.inside.wire(size, run * (run - 1))]
    if place.nodes > 1:
        links.append(setting.wire_across(size, setting.leaving()))
    read = panels.size * setting.rates.programs / setting.rates.stream
    fold = others * (panels.apply + read)
    return (
        first
        + Parts(combine=fold)
        + _drain(panels, max(links), panels.waves(panels.count, fold + first.wire))
    )


def _doubling(setting: Setting, count: int, extra: Parts, back: float, striped: float) -> Parts:
    """Rounds over `count` ranks and `extra` behind them, whose links take `back` and `striped`."""
    place, panels = setting.topology, _Panels.of(setting)
    size, whole = setting.payload.element, count > place.longest
    fill, inside, across, distance = Parts(), back, striped, 1
    total = rounds(count)
    composed = total if place.nodes > 1 and not whole else max(0, total - 1)
    while distance < count:
        hops = []
        if place.longest > distance:
            hops.append(panels.hop(setting.inside))
            inside += setting.inside.wire(size, place.longest - distance)
        if whole:
            hops.append(panels.hop(setting.across))
            across += setting.wire_across(size, min(distance, place.longest))
        fill += max(hops, key=lambda hop: hop.latency + hop.wire)
        distance *= 2
    fill += Parts(combine=composed * panels.compose) + extra
    link = setting.inside if place.longest > 1 else setting.across
    passing = panels.size * link.panel_beta + panels.apply
    waves = total * panels.waves(panels.of_element, passing)
    return fill + _drain(panels, max(inside, across), waves)


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
