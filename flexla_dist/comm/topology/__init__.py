"""Where the ranks of a group are and what joins them."""

from __future__ import annotations

from flexla_dist.comm.topology.facts import RankFacts, look_around
from flexla_dist.comm.topology.topology import (
    LINK_CLASSES,
    NETWORK,
    NVLINK,
    PCIE,
    SAME_PROCESS,
    SHARED_MEMORY,
    Topology,
    build_topology,
    link_class,
)

__all__ = [
    "LINK_CLASSES",
    "NETWORK",
    "NVLINK",
    "PCIE",
    "SAME_PROCESS",
    "SHARED_MEMORY",
    "RankFacts",
    "Topology",
    "build_topology",
    "link_class",
    "look_around",
]
