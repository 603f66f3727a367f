"""A rank's place in one exchange, as the row of integers that the kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexla_dist.comm.links import Line

FIELDS = 13
SpanPlace = tuple[bool, int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """What one rank's programs know of an exchange.

    home: where this rank's tensors are in the stacked ones (0 where they are not stacked).
    position, count: in the line of connected ranks, in scan order. reset, live: of the span.
    turn: 1 for a prefix, -1 for a suffix: the way through ranks and segments. part_position,
    part_count: in the part of the line on one node; before, after: whether other parts are.
    starts: segments, in scan order, at which further documents start, after that at `live`.
    """

    rank: int
    home: int
    position: int
    count: int
    reset: bool
    live: int
    segments: int
    turn: int
    part_position: int
    part_count: int
    before: bool
    after: bool
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        rank: int,
        home: int,
        crossing: Sequence[bool],
        nodes: Sequence[int],
        span: SpanPlace,
        reverse: bool,
    ) -> Place:
        """The place of a rank whose span is (reset, live, segments, starts)."""
        line = Line.around(rank, crossing, reverse)
        parts = line.segments(nodes)
        index = next(i for i, part in enumerate(parts) if part.position >= 0)
        part = parts[index]
        reset, live, segments, starts = span
        return cls(
            rank,
            home,
            line.position,
            len(line.ranks),
            reset,
            live,
            segments,
            -1 if reverse else 1,
            part.position,
            len(part.ranks),
            index > 0,
            index + 1 < len(parts),
            starts,
        )

    def row(self) -> tuple[int, ...]:
        """The fields in order, as integers, then a word for each segment: a document starts there.

        The last field is the first segment of what leaves.
        """
        fresh = self.starts[-1] if self.starts else min(self.live, self.segments - 1)
        return (
            self.rank,
            self.home,
            self.position,
            self.count,
            int(self.reset),
            self.live,
            self.segments,
            self.turn,
            self.part_position,
            self.part_count,
            int(self.before),
            int(self.after),
            fresh if self.reset else 0,
            *(int(number in self.starts) for number in range(self.segments)),
        )
