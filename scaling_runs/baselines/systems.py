"""All systems by name: ours, the baselines, and two floors that send nothing.

Contract: `prepare` gives a callable (inputs, params, scalars) -> output for one rank's shard, with
a gradient, or raises `Refused`; `formula` says what one direction of a call moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexla_dist.parallel.runtime import DEFAULT_TIMEOUT
from flexla_dist.shapes import nearest
from scaling_runs.baselines import formulas
from scaling_runs.baselines.device import DEVICE_SUFFIX, IdealAttend, OwnAttend
from scaling_runs.baselines.fla_cp import FlaAttend, check_variant
from scaling_runs.baselines.fold import fold_fused, fold_nested, fold_sum
from scaling_runs.baselines.formulas import Formula
from scaling_runs.baselines.lasp import RingAttend
from scaling_runs.baselines.node import ScanAttend
from scaling_runs.baselines.scans import AllScan, GatherScan
from scaling_runs.baselines.shard import Refused, Sharding, Values
from scaling_runs.baselines.ulysses import HeadAttend, check_heads

Attend = Callable[[Values, Values, Mapping[str, float]], Tensor]
ZECO_BLOCKS = 4
STRONG_PANELS = 2


@dataclass(frozen=True)
class Settings:
    """Settings that some systems have: K-blocks of zeco, panels of heads of lasp2, ranks of a node
    for our hierarchical strategy (None: the hosts tell), seconds a rank of ours waits."""

    blocks: int = ZECO_BLOCKS
    panels: int = STRONG_PANELS
    node_size: int | None = None
    timeout: float = DEFAULT_TIMEOUT


Make = Callable[[Any, Sharding, Settings], Attend]


@dataclass(frozen=True)
class System:
    """One way to run an operator on shards.

    family: "ours", "baseline" or "floor". exact: the output is that of the unsharded operator; a
    floor's is not. formula: bytes of one direction, None where they depend on a choice or are not
    counted. engine: "device" where kernels carry the states, "auto" where the package chooses.
    """

    name: str
    family: str
    title: str
    make: Make
    formula: Callable[[Settings], Formula] | None
    exact: bool = True
    check: Callable[[Any], None] = lambda op: None
    engine: str = "host"
    note: str = ""

    @property
    def strategy(self) -> str:
        """Of one of ours: the strategy's name, the same for both engines."""
        return self.name.removesuffix(DEVICE_SUFFIX)

    def prepare(self, op: Any, sharding: Sharding, settings: Settings | None = None) -> Attend:
        """The operator on this rank's shard. Raises Refused where the system cannot run it."""
        if op.spec.log_scaled is not None and self.family != "ours":
            raise Refused(
                f"{self.name} carries plain states, and those of {op.spec.name} have a log scale; "
                "use one of ours"
            )
        self.check(op)
        return self.make(op, sharding, settings or Settings())


def has_matrix(op: Any) -> bool:
    """Whether a state of the operator has a dense M."""
    return any(t.has_matrix for t in op.graphs.transitions.values())


def has_decay(op: Any) -> bool:
    """Whether anything but the plain sum of contributions reaches the state."""
    return any(t.kind != "identity" for t in op.graphs.transitions.values())


def _no_decay(op: Any) -> None:
    if has_decay(op):
        raise Refused(
            f"lasp2_published adds states up and has no decay, {op.spec.name} has one; use lasp2, "
            "which is extended to decays and dense M"
        )


def _rows_alone(op: Any) -> None:
    if has_matrix(op):
        raise Refused(
            f"zeco sends blocks of state rows, which a dense M mixes, as that of {op.spec.name} "
            "does; use chain or lasp2"
        )


def _ours(strategy: str, backend: str = "host") -> Make:
    def make(op: Any, sharding: Sharding, settings: Settings) -> Attend:
        return OwnAttend(op, sharding, strategy, settings.node_size, settings.timeout, backend)

    return make


def _by_kernels(strategy: str, title: str) -> System:
    """A strategy of ours by the device engine."""
    name = strategy + DEVICE_SUFFIX
    return System(name, "ours", title, _ours(strategy, "device"), None, engine="device")


def _lasp2_published(op: Any, sharding: Sharding, settings: Settings) -> Attend:
    scan = GatherScan(sharding.ranks, fold_sum, eager_wait=True)
    return ScanAttend(op, sharding, scan, whole_summaries=True)


def _lasp2(op: Any, sharding: Sharding, settings: Settings) -> Attend:
    return ScanAttend(op, sharding, GatherScan(sharding.ranks, fold_fused), settings.panels)


def _lasp2_naive(op: Any, sharding: Sharding, settings: Settings) -> Attend:
    scan = GatherScan(sharding.ranks, fold_nested, eager_wait=True)
    return ScanAttend(op, sharding, scan, whole_summaries=True)


def _zeco(op: Any, sharding: Sharding, settings: Settings) -> Attend:
    return ScanAttend(op, sharding, AllScan(sharding.ranks, settings.blocks))


def _unsharded(op: Any, sharding: Sharding, settings: Settings) -> Attend:
    return lambda inputs, params, scalars: op(**inputs, **params, **scalars)[0]


SYSTEMS: dict[str, System] = {
    s.name: s
    for s in (
        System(
            "chain",
            "ours",
            "one state a hop, P - 1 hops",
            _ours("chain"),
            lambda s: formulas.chain_of_messages,
        ),
        System(
            "log_scan",
            "ours",
            "recursive doubling of elements",
            _ours("log_scan"),
            lambda s: formulas.doubling,
        ),
        System(
            "hierarchical",
            "ours",
            "doubling inside nodes, a chain of states between them",
            _ours("hierarchical"),
            lambda s: formulas.nodes_then_chain,
        ),
        System(
            "all_gather",
            "ours",
            "every element to every rank, by messages",
            _ours("all_gather"),
            lambda s: formulas.gather_of_messages,
        ),
        _by_kernels("chain", "one state a hop, by kernels in symmetric memory"),
        _by_kernels("log_scan", "recursive doubling, by kernels in symmetric memory"),
        _by_kernels("hierarchical", "doubling, then a chain of nodes, by kernels"),
        _by_kernels("all_gather", "every element to every rank, by kernels in symmetric memory"),
        System(
            "auto",
            "ours",
            "the engine and strategy that the package chooses",
            _ours("auto", "auto"),
            None,
            engine="auto",
        ),
        System(
            "lasp",
            "baseline",
            "blocking ring of states, the local pass inside the chain",
            lambda op, sharding, settings: RingAttend(op, sharding),
            lambda s: formulas.ring,
        ),
        System(
            "lasp2_published",
            "baseline",
            "blocking all-gather of states, no decay",
            _lasp2_published,
            lambda s: formulas.gather(1),
            check=_no_decay,
        ),
        System(
            "lasp2",
            "baseline",
            "LASP2 extended to decays and dense M, strong: asynchronous gathers, fused merge",
            _lasp2,
            lambda s: formulas.gather(s.panels),
        ),
        System(
            "lasp2_naive",
            "baseline",
            "LASP2 extended, naive: blocking gather, every product of M formed anew",
            _lasp2_naive,
            lambda s: formulas.gather(1),
        ),
        System(
            "zeco",
            "baseline",
            "All-Scan: a chain in blocks of state rows",
            _zeco,
            lambda s: formulas.blocked_ring(s.blocks),
            check=_rows_alone,
        ),
        System(
            "ulysses",
            "baseline",
            "all-to-all of inputs and outputs, tokens for heads",
            lambda op, sharding, settings: HeadAttend(op, sharding),
            lambda s: formulas.heads_for_tokens,
        ),
        System(
            "fla_cp",
            "baseline",
            "FLA's context parallelism: one all-gather of [S | M]",
            lambda op, sharding, settings: FlaAttend(op, sharding),
            lambda s: formulas.gather(1),
            check=lambda op: check_variant(op.spec.name),
        ),
        System(
            "ideal_same_plan",
            "floor",
            "our own call, summaries included, flags set beforehand: nothing is waited for",
            lambda op, sharding, settings: IdealAttend(op, sharding, settings.timeout),
            lambda s: formulas.nothing,
            exact=False,
            note="flags are set beforehand: its results are not right by design",
        ),
        System(
            "ideal_best",
            "floor",
            "independent shards, no summaries, nothing sent",
            _unsharded,
            lambda s: formulas.nothing,
            exact=False,
        ),
    )
}


def get_system(name: str) -> System:
    """A system by name. Raises Refused with the nearest name where there is none."""
    if name not in SYSTEMS:
        raise Refused(
            f"there is no system {name!r}{nearest(name, SYSTEMS)}; "
            f"expected one of: {', '.join(SYSTEMS)}"
        )
    return SYSTEMS[name]


__all__ = [
    "SYSTEMS",
    "Attend",
    "Refused",
    "Settings",
    "Sharding",
    "System",
    "check_heads",
    "get_system",
    "has_decay",
    "has_matrix",
]
