"""Recursive doubling over a line of ranks: the building block of the logarithmic strategies."""

from __future__ import annotations

from flexla_dist.comm.channel import Channel
from flexla_dist.comm.element import Element, State, apply, combine
from flexla_dist.comm.links import Line
from flexla_dist.comm.tag import Tag


def doubling(
    element: Element, line: Line, channel: Channel, tag: Tag, keep_total: bool
) -> tuple[list[Element], Element]:
    """(elements of the spans before this rank, nearest first; element of all spans so far).

    Round d sends what is composed so far to the rank 2^d further and receives from the rank 2^d
    before, which covers the 2^d ranks just before those known. Any number of ranks; the order of
    composition is the order of the line. The second result is complete only where `keep_total`,
    elsewhere M is composed no further than other ranks need it.
    """
    received: list[Element] = []
    total, distance, count = element, 1, len(line.ranks)
    while distance < count:
        target, source = line.position + distance, line.position - distance
        earlier = channel.pass_element(
            total,
            line.ranks[target] if target < count else None,
            line.ranks[source] if source >= 0 else None,
            tag,
        )
        distance *= 2
        if earlier is not None:
            received.append(earlier)
            if keep_total or line.position + distance < count:
                total = combine(total, earlier)
    return received, total


def fold(received: list[Element], state: State) -> State:
    """Take `state` through the elements that `doubling` returned, the furthest first."""
    for element in reversed(received):
        state = apply(element, state)
    return state
