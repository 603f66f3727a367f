"""Choice of a strategy for the host engine, by a cost model that fits on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

# A message between processes of one host, and between hosts: seconds, and bytes per second.
LOCAL_LATENCY, LOCAL_BANDWIDTH = 60e-6, 2e9
REMOTE_LATENCY, REMOTE_BANDWIDTH = 120e-6, 1e9
FEW_RANKS = 4


@dataclass(frozen=True)
class Choice:
    """A strategy, why, and the predicted seconds of every candidate."""

    strategy: str
    reason: str
    seconds: dict[str, float]


def choose_host_strategy(
    size: int, node_runs: Sequence[int], state_bytes: int, element_bytes: int, dense: bool
) -> Choice:
    """The cheapest of chain, log_scan and hierarchical for `size` ranks on nodes of `node_runs`.

    A chain makes size - 1 hops of one state. log_scan makes ceil(log2 size) rounds of one element,
    over the slowest link in use, which the ranks of a node share. hierarchical does log_scan inside
    the longest node and a chain of states between nodes, plus one hop to tell the node. Composing a
    dense M costs about another trip of its bytes. all_gather never wins here: every element goes to
    every rank.
    """
    if sum(node_runs) != size:
        raise ValueError(f"node_runs {tuple(node_runs)} sum to {sum(node_runs)}, expected {size}")
    if size <= FEW_RANKS:
        return Choice("chain", f"{size} ranks: at most {FEW_RANKS - 1} hops of one state", {})
    nodes, longest = len(node_runs), max(node_runs)
    compose = 2 if dense else 1
    chain = (size - nodes) * _local(state_bytes) + (nodes - 1) * _remote(state_bytes)
    rounds = ceil(log2(size))
    travels = compose * element_bytes
    hop = _remote(longest * travels) if nodes > 1 else _local(travels)
    seconds = {"chain": chain, "log_scan": rounds * hop}
    if nodes > 1 and longest > 1:
        inside = ceil(log2(longest)) * _local(travels)
        told = _local(state_bytes)
        seconds["hierarchical"] = inside + (nodes - 1) * _remote(state_bytes) + told
    name = min(seconds, key=lambda key: seconds[key])
    table = ", ".join(f"{key} {value * 1e3:.2f} ms" for key, value in seconds.items())
    return Choice(name, f"{size} ranks on {nodes} node(s), predicted: {table}", seconds)


def _local(size: int) -> float:
    return LOCAL_LATENCY + size / LOCAL_BANDWIDTH


def _remote(size: int) -> float:
    return REMOTE_LATENCY + size / REMOTE_BANDWIDTH
