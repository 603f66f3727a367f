"""The state walks from rank to rank; nothing but the state travels, whatever M is."""

from __future__ import annotations

from flexla_dist.comm.element import State, after_reset, apply
from flexla_dist.comm.strategies.base import ScanProblem


class Chain:
    """P - 1 hops of one state; a rank whose span resets the state sends without waiting."""

    name = "chain"
    collective = False

    def scan(self, problem: ScanProblem) -> State:
        """Receive from the predecessor, apply the own element, send to the successor."""
        line, channel, tag = problem.line, problem.channel, problem.tag
        early = line.prev_rank is None or problem.element.reset is True
        if early and line.next_rank is not None:
            channel.send_state(line.next_rank, after_reset(problem.element), tag)
        if line.prev_rank is None:
            return problem.zero()
        entering = channel.receive_state(line.prev_rank, problem.template, tag)
        if not early and line.next_rank is not None:
            channel.send_state(line.next_rank, apply(problem.element, entering), tag)
        return entering
