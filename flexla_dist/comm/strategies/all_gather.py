"""LASP2's pattern: every rank gathers all elements and folds those before it."""

from __future__ import annotations

from flexla_dist.comm.element import State, apply
from flexla_dist.comm.strategies.base import ScanProblem


class AllGather:
    """One collective; every rank holds P elements, M included, and does up to P - 1 applies."""

    name = "all_gather"
    collective = True

    def scan(self, problem: ScanProblem) -> State:
        """Gather over the whole group, then take zero through the predecessors."""
        elements = problem.channel.gather_elements(problem.element, problem.tag)
        state = problem.zero()
        for rank in problem.line.ranks[: problem.line.position]:
            state = apply(elements[rank], state)
        return state
