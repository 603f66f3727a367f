"""The cheapest strategy and engine for a scan, with what speaks for and against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flexla_dist.comm.chooser.cost import STRATEGIES, Estimate, estimate
from flexla_dist.comm.chooser.links import DEVICE, ENGINES, HOST
from flexla_dist.comm.chooser.setting import Setting
from flexla_dist.comm.topology import Topology
from flexla_dist.errors import ShardingError

AUTO = "auto"
NEAR_SECONDS, NEAR_SHARE = 1e-6, 0.05


@dataclass(frozen=True)
class Choice:
    """A strategy, the engine that runs it, and its predicted exposed seconds.

    table: the estimates of all candidates. reason: why this one, in a line.
    """

    strategy: str
    engine: str
    seconds: float
    reason: str
    table: tuple[Estimate, ...] = field(default=(), repr=False)


def choose(
    settings: Setting | dict[str, Setting],
    *,
    strategy: str = AUTO,
    engine: str = AUTO,
    refused: Sequence[tuple[str, str]] = (),
) -> Choice:
    """The candidate of least exposed time; candidates near the best count as equal, and of them
    the one that sends the fewest bytes is taken, then the first of chain, hierarchical, log_scan.

    settings: one setting by engine ("host", "device"), or the host's. strategy, engine: forced
    unless "auto". refused: (strategy, engine) pairs that cannot run.
    ShardingError: an unknown name, or nothing that fits what is forced.
    """
    by_engine = {HOST: settings} if isinstance(settings, Setting) else settings
    _check(strategy, (AUTO, *STRATEGIES), "strategy")
    _check(engine, (AUTO, *ENGINES), "engine")
    table = [
        estimate(name, used, setting)
        for used, setting in by_engine.items()
        for name in STRATEGIES
        if (name, used) not in refused
    ]
    place = next(iter(by_engine.values())).topology
    same = place.nodes == 1 or place.longest == 1  # then hierarchical is log_scan, or chain
    names = (
        {*STRATEGIES} - ({"hierarchical"} if same else set()) if strategy == AUTO else {strategy}
    )
    fitting = [e for e in table if e.strategy in names and engine in (AUTO, e.engine)]
    if not fitting:
        raise ShardingError(
            f"strategy {strategy!r} with engine {engine!r} cannot run here, expected one of: "
            + ", ".join(f"{e.strategy} ({e.engine})" for e in table)
        )
    best = _best(fitting)
    forced = AUTO not in (strategy, engine) or (strategy != AUTO and len(by_engine) == 1)
    why = _reason(best, table, place.size, forced)
    return Choice(best.strategy, best.engine, best.exposed, why, tuple(table))


def _best(candidates: Sequence[Estimate]) -> Estimate:
    least = min(e.exposed for e in candidates)
    limit = least + max(NEAR_SECONDS, NEAR_SHARE * least)
    near = [e for e in candidates if e.exposed <= limit]
    simplest = ("chain", "hierarchical", "log_scan", "all_gather")
    return min(near, key=lambda e: (e.sent, simplest.index(e.strategy), e.exposed))


def _reason(best: Estimate, table: Sequence[Estimate], size: int, forced: bool) -> str:
    engines = {e.engine for e in table}
    words = [f"{_name(e, engines)} {e.exposed * 1e3:.3g} ms" for e in table]
    why = "forced" if forced else "predicted"
    return f"{best.strategy} for {size} ranks, {why}: {', '.join(words)}"


def _name(e: Estimate, engines: set[str]) -> str:
    return e.strategy if len(engines) == 1 else f"{e.strategy} ({e.engine})"


def _check(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        raise ShardingError(f"{what} is {name!r}, expected one of: {', '.join(known)}")


def engines_of(topology: Topology) -> tuple[str, ...]:
    """The engines to choose from: the device's where GPUs share a heap. On CPUs its kernels run in
    an interpreter, which is for tests."""
    return (HOST, DEVICE) if topology.device == "cuda" and topology.heap != "none" else (HOST,)
