"""Exclusive scan by recursive doubling: ceil(log2 P) rounds in which whole elements travel."""

from __future__ import annotations

from flexla_dist.comm.element import State
from flexla_dist.comm.strategies.base import ScanProblem
from flexla_dist.comm.strategies.doubling import doubling, fold


class LogScan:
    """Few rounds, but M travels and is composed; for small states and many ranks."""

    name = "log_scan"
    collective = False

    def scan(self, problem: ScanProblem) -> State:
        """Collect the spans before this rank, then take zero through them."""
        received, _ = doubling(
            problem.element, problem.line, problem.channel, problem.tag, keep_total=False
        )
        return fold(received, problem.zero())
