"""Scan inside every node, chain of states between nodes, apply inside."""

from __future__ import annotations

from flexla_dist.comm.element import Element, State, after_reset, apply
from flexla_dist.comm.links import Line
from flexla_dist.comm.strategies.base import ScanProblem
from flexla_dist.comm.strategies.doubling import doubling, fold


class Hierarchical:
    """Elements travel inside nodes only; between nodes one state per hop.

    A node is a maximal run of consecutive ranks on one host, so nodes may differ in length. The
    last rank of a node in scan order leads it: it holds the element of the whole node.
    """

    name = "hierarchical"
    collective = False

    def scan(self, problem: ScanProblem) -> State:
        """The state entering the node, taken through the spans of the node before this rank."""
        parts = problem.line.segments(problem.nodes)
        index = next(i for i, part in enumerate(parts) if part.position >= 0)
        own = parts[index]
        before = parts[index - 1].ranks[-1] if index else None
        after = parts[index + 1].ranks[-1] if index + 1 < len(parts) else None
        leads = own.next_rank is None
        received, total = doubling(
            problem.element, own, problem.channel, problem.tag, leads and after is not None
        )
        if leads:
            entering = _lead(problem, own, total, before, after)
        elif before is None:
            entering = problem.zero()
        else:
            entering = problem.channel.receive_state(own.ranks[-1], problem.template, problem.tag)
        return fold(received, entering)


def _lead(
    problem: ScanProblem, own: Line, total: Element, before: int | None, after: int | None
) -> State:
    """Receive the node's entering state, pass the leaving one on, tell the other ranks."""
    channel, tag = problem.channel, problem.tag
    early = before is None or total.reset is True
    if early and after is not None:
        channel.send_state(after, after_reset(total), tag)
    if before is None:
        return problem.zero()
    entering = channel.receive_state(before, problem.template, tag)
    if not early and after is not None:
        channel.send_state(after, apply(total, entering), tag)
    for rank in own.ranks[:-1]:
        channel.send_state(rank, entering, tag)
    return entering
