"""Ways to bring the state that enters a rank's shard to it; one interface, both directions."""

from __future__ import annotations

from flexla_dist.comm.strategies.all_gather import AllGather
from flexla_dist.comm.strategies.base import ScanProblem, Strategy
from flexla_dist.comm.strategies.chain import Chain
from flexla_dist.comm.strategies.hierarchical import Hierarchical
from flexla_dist.comm.strategies.log_scan import LogScan
from flexla_dist.errors import ShardingError
from flexla_dist.shapes import nearest

STRATEGIES: dict[str, Strategy] = {
    s.name: s for s in (Chain(), LogScan(), Hierarchical(), AllGather())
}


def check_strategy(name: str) -> None:
    """ShardingError unless `name` is "auto" or a strategy."""
    known = ("auto", *STRATEGIES)
    if name not in known:
        hint = nearest(name, known) if isinstance(name, str) else ""
        raise ShardingError(f"strategy is {name!r}{hint}, expected one of: {', '.join(known)}")


__all__ = ["STRATEGIES", "ScanProblem", "Strategy", "check_strategy"]
