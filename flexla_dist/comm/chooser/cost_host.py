"""The host engine's formulas; derived in `cost`."""

from __future__ import annotations

from collections.abc import Callable

from flexla_dist.comm.chooser.setting import Parts, Setting, rounds


def chain(setting: Setting) -> Parts:
    """P - 1 hops of a state."""
    inside, across = setting.steps
    size = setting.payload.state
    return Parts(
        inside * setting.inside.alpha + across * setting.across.alpha,
        inside * setting.inside.wire(size) + across * setting.wire_across(size, 1),
        max(0, setting.topology.size - 2) * apply_seconds(setting),
    )


def log_scan(setting: Setting) -> Parts:
    """Rounds over all ranks."""
    place = setting.topology
    return _doubling(setting, place.size, max(0, rounds(place.size) - 1))


def hierarchical(setting: Setting) -> Parts:
    """Rounds inside nodes, a chain between leaders, and the news to the node."""
    place, size = setting.topology, setting.payload.state
    count = rounds(place.longest)
    between = place.nodes - 1
    composed = count if between else max(0, count - 1)
    parts = _doubling(setting, place.longest, composed)
    if not between:
        return parts
    parts += Parts(
        between * setting.across.alpha,
        between * setting.wire_across(size, 1),
        max(0, between - 1) * apply_seconds(setting),
    )
    told = place.longest - 1
    if told:
        link = setting.inside
        parts += Parts(link.alpha + (told - 1) * link.gap, told * link.wire(size))
    return parts


def all_gather(setting: Setting) -> Parts:
    """Every element to every rank."""
    place, size = setting.topology, setting.payload.element
    others, run = place.size - 1, place.longest
    slow = setting.across if place.nodes > 1 else setting.inside
    folded = others * apply_seconds(setting) * max(1.0, setting.crowd(run) / 2)
    if setting.gather is not None:
        return Parts(setting.gather.alpha, setting.gather.wire(size), folded)
    wire = [(run - 1) * setting.inside.wire(size), setting.inside.wire(size, run * (run - 1))]
    if place.nodes > 1:
        wire.append(setting.wire_across(size, setting.leaving()))
    return Parts(slow.alpha + (others - 1) * slow.gap, max(wire), folded)


def apply_seconds(setting: Setting) -> float:
    """Seconds to take a state through an element."""
    payload = setting.payload
    launches = 1 if payload.kind == "none" else 2
    return setting.rates.seconds(payload.apply_bytes, payload.apply_flops, launches)


def compose_seconds(setting: Setting) -> float:
    """Seconds to compose two elements: the state's part and M's."""
    payload = setting.payload
    moved = setting.rates.seconds(payload.compose_bytes, payload.compose_flops)
    return apply_seconds(setting) + (moved if payload.transition else 0.0)


def _doubling(setting: Setting, count: int, composed: int) -> Parts:
    """Rounds over `count` consecutive ranks, `composed` compositions on the way, and the fold."""
    place, size = setting.topology, setting.payload.element
    whole = count > place.longest
    parts, distance = Parts(), 1
    while distance < count:
        ways = []
        if place.longest > distance:
            link = setting.inside
            messages = (place.longest - distance) * setting.together
            ways.append(Parts(link.alpha, link.wire(size, messages)))
        if whole:
            crossing = min(distance, place.longest) * setting.together
            ways.append(Parts(setting.across.alpha, setting.wire_across(size, crossing)))
        parts += max(ways, key=lambda way: way.latency + way.wire)
        distance *= 2
    products = composed * compose_seconds(setting) + rounds(count) * apply_seconds(setting)
    return parts + Parts(combine=products * setting.crowd(place.longest))


PARTS: dict[str, Callable[[Setting], Parts]] = {
    "chain": chain,
    "log_scan": log_scan,
    "hierarchical": hierarchical,
    "all_gather": all_gather,
}
