"""Which rows of a state [N, HV, ...] a shard works with."""

from __future__ import annotations

from dataclasses import dataclass

from flexla_dist.parallel.plan import SequencePlan


@dataclass(frozen=True)
class Rows:
    """Rows of the local states and, with `whole_`, of states of all documents.

    start, end: documents whose first, last token is here. first, last: the document that may come
    from, go to another rank. last_whole: the latter among all. Without packing a state has one row
    for every batch row, on each rank, and all of them cross together.
    """

    start: slice
    whole_start: slice
    end: slice
    whole_end: slice
    first: slice
    last: slice
    last_whole: slice

    @classmethod
    def of(cls, plan: SequencePlan) -> Rows:
        """Rows of a plan."""
        documents = plan.documents
        starting, ending = documents.starting, documents.ending
        if not plan.packed:
            everything, nothing = slice(None), slice(0, 0)
            start = everything if len(starting) else nothing
            end = everything if len(ending) else nothing
            return cls(start, start, end, end, everything, everything, everything)
        first, last = documents.first, max(documents.count - 1, 0)
        return cls(
            slice(starting.start, starting.stop),
            slice(first + starting.start, first + starting.stop),
            slice(ending.start, ending.stop),
            slice(first + ending.start, first + ending.stop),
            slice(0, 1),
            slice(last, last + 1),
            slice(first + last, first + last + 1),
        )
