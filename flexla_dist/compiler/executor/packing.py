"""Rooms that share one block of memory: what lies where, and which rooms it pays for.

Contract: pure functions on numbers. A room is needed from its first event to its last; two rooms
may lie at one place where those do not meet, because kernels of a plan run in order on one stream.
A block asks for memory once, but holds it from the first event of any of its rooms to the last of
all of them: `choose` gives it as many rooms as the most memory in use during the plan allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

STEP = 256  # bytes between the starts of parts of a block
SLACK = 16 << 20  # bytes that a plan may need more at once for fewer blocks


class Need(NamedTuple):
    """Bytes needed from the event `first` to the event `last`."""

    bytes: int
    first: int
    last: int


def pack(needs: Sequence[Need]) -> tuple[list[int], int]:
    """Offset of each need in a block, and the size of the block; large ones first, each at the
    lowest place that is free while it is needed."""
    offsets = [0] * len(needs)
    placed: list[int] = []
    for at in sorted(range(len(needs)), key=lambda i: -needs[i].bytes):
        mine, offset = needs[at], 0
        for other in sorted(placed, key=offsets.__getitem__):
            theirs = needs[other]
            apart = theirs.last < mine.first or mine.last < theirs.first
            if apart or offsets[other] + theirs.bytes <= offset:
                continue
            if offsets[other] >= offset + mine.bytes:
                break
            offset = _rounded(offsets[other] + theirs.bytes)
        offsets[at] = offset
        placed.append(at)
    return offsets, max((offsets[i] + _rounded(needs[i].bytes) for i in placed), default=0)


def most_at_once(needs: Sequence[Need]) -> int:
    """Most bytes needed at one event."""
    changes: dict[int, int] = {}
    for size, first, last in needs:
        changes[first] = changes.get(first, 0) + size
        changes[last + 1] = changes.get(last + 1, 0) - size
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)


def choose(needs: Sequence[Need], others: Sequence[Need]) -> set[int]:
    """Indices of the needs that share one block: the smallest ones, as many as keep the most
    memory in use, with `others`, within SLACK of what blocks of their own would use."""
    limit = most_at_once([*needs, *others]) + SLACK
    order = sorted(range(len(needs)), key=lambda i: needs[i].bytes)
    for count in range(len(order), 1, -1):
        inside = [needs[i] for i in order[:count]]
        outside = [needs[i] for i in order[count:]]
        first, last = min(n.first for n in inside), max(n.last for n in inside)
        block = Need(pack(inside)[1], first, last)
        if most_at_once([block, *outside, *others]) <= limit:
            return set(order[:count])
    return set(order[:1])


def _rounded(size: int) -> int:
    return -(-size // STEP) * STEP
