"""Which system brings states to all ranks first, over numbers of ranks and sizes of a state."""

from __future__ import annotations

from collections.abc import Sequence

from scaling_runs.model.clusters import Cluster, ModelProblem
from scaling_runs.model.gpu_rows import apply_seconds
from scaling_runs.model.predict import simulate
from scaling_runs.model.workload import Bytes, Kernels, Workload

MAP_RANKS = (2, 4, 8, 16, 32, 64, 128)
MAP_STATES = tuple(1 << n for n in range(19, 26))
CANDIDATES = (
    *("chain", "log_scan", "hierarchical", "lasp2", "zeco", "fused_chain", "fused_hierarchical"),
)
# Programs of the model by the system of weak_scaling.py that a measured row of them would have.
RUN_AS = {"fused_chain": "chain_device", "fused_hierarchical": "hierarchical_device"}
PANEL_BYTES, MOST_PANELS = 1 << 16, 16


def exchange_load(ranks: int, state: int, dense: bool) -> Workload:
    """An exchange with no local work beside it: an apply reads and writes three states (and M), a
    combine twice as much; K = V where M is dense."""
    element = 2 * state if dense else state
    apply = apply_seconds(state, element)
    kernels = Kernels(0.0, 0.0, 0.0, 0.0, apply, 2 * apply)
    panels = max(1, min(MOST_PANELS, state // PANEL_BYTES))
    return Workload(ranks, 0, Bytes(state, element, 0, 0), kernels, panels)


def strategy_map(
    cluster: Cluster,
    dense: bool,
    ranks: Sequence[int] = MAP_RANKS,
    states: Sequence[int] = MAP_STATES,
) -> tuple[list[str], list[list[int]]]:
    """(names, index of the quickest for each state size and number of ranks)."""
    best = []
    for state in states:
        row = []
        for count in ranks:
            load = exchange_load(count, state, dense)
            times: dict[str, float] = {}
            for name in CANDIDATES:
                try:
                    times[name] = simulate(name, load, cluster, "fwd").seconds
                except ModelProblem:
                    continue
            row.append(CANDIDATES.index(min(times, key=lambda name: times[name])))
        best.append(row)
    return list(CANDIDATES), best
