"""Ways to bring the state that enters a rank's shard to it; one interface, both directions."""

from __future__ import annotations

from flexla_dist.comm.strategies.all_gather import AllGather
from flexla_dist.comm.strategies.base import ScanProblem, Strategy
from flexla_dist.comm.strategies.chain import Chain
from flexla_dist.comm.strategies.hierarchical import Hierarchical
from flexla_dist.comm.strategies.log_scan import LogScan

STRATEGIES: dict[str, Strategy] = {
    s.name: s for s in (Chain(), LogScan(), Hierarchical(), AllGather())
}

__all__ = ["STRATEGIES", "ScanProblem", "Strategy"]
