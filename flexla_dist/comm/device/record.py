"""What ranks report when a wait expires, and who is to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WAITED = ("its message", "it to read an earlier message")
OTHER_EXCHANGE = 2


@dataclass(frozen=True)
class Record:
    """A rank that gave up: whom it waited for, in which panel and epoch, and for what.

    what: 0 a message, 1 that an earlier one is read, 2: the message was of another exchange.
    """

    rank: int
    peer: int
    panel: int
    epoch: int
    what: int

    @classmethod
    def read(cls, rank: int, words: Sequence[int]) -> Record | None:
        """The record of `rank`, None if it has not reported."""
        return cls(rank, *words[1:5]) if words[0] else None


def late_rank(records: Sequence[Record]) -> int:
    """The rank that others wait for and that waits for nobody itself, as far as they reported."""
    peers = {record.rank: record.peer for record in records}
    rank, seen = next(iter(peers)), set[int]()
    while rank in peers and rank not in seen:
        seen.add(rank)
        rank = peers[rank]
    return rank


def describe(
    records: Sequence[Record], strategy: str, direction: str, name: Callable[[int], str]
) -> str:
    """One line for each rank that reported."""

    def line(r: Record) -> str:
        if r.what == OTHER_EXCHANGE:
            said = f"{name(r.rank)} got a message of another exchange from {name(r.peer)}"
        else:
            said = f"{name(r.rank)} waited for {name(r.peer)} and {_WAITED[r.what]}"
        where = f"panel {r.panel}, epoch {r.epoch}, strategy {strategy}, {direction}"
        return f"  {said}: {where}"

    return "\n".join(map(line, records))
