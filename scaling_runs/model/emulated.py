"""Emulated hosts as the model sees them, and rows measured on them beside it.

Contract: a row has all that the model needs but the links, which are rows of their own, measured
in the same run between ranks of a host (`inside`) and of two hosts (`between`). So the comparison
is made anew from the files whenever the model has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling_runs.model.clusters import Cluster, Link, ModelProblem, with_notices
from scaling_runs.model.paced import VARIANT, PacedCall
from scaling_runs.model.predict import simulate
from scaling_runs.model.validate import Compared, Verdict, judge
from scaling_runs.model.workload import Kernels
from scaling_runs.rows import RowStore
from scaling_runs.weak_grid import Point

NETWORK = ("host", "delay", "hosts", "ranks_per_host", "rate_mbit", "latency_us")
_RUN = ("kind", "date", "commit", "gpu", "torch", "triton", "cores", "load")
LINK_COLUMNS = (
    *(*_RUN, *NETWORK, "where", "link"),
    *("alpha_us", "gigabytes", "worst_error", "samples_us"),
)
LINK_KEY = (*NETWORK, "where", "link")
ROW_COLUMNS = (
    *(*_RUN, *NETWORK, "system", "direction", "P", "T", "H", "K", "parts_ms"),
    *("median_ms", "p20_ms", "p80_ms", "samples", "rel_err"),
)
ROW_KEY = (*NETWORK, "system", "direction", "T", "H", "K")


@dataclass(frozen=True)
class EmulatedRows:
    """Rows of a folder and a machine: of systems, and of links."""

    systems: RowStore
    links: RowStore

    @classmethod
    def of(cls, folder: Path, slug: str) -> EmulatedRows:
        """Those of a folder's files; empty where there are none."""
        return cls(
            RowStore(folder / f"emulated_hosts_{slug}.csv", ROW_COLUMNS, ROW_KEY),
            RowStore(folder / f"emulated_links_{slug}.csv", LINK_COLUMNS, LINK_KEY),
        )

    def verdict(self) -> Verdict | None:
        """All rows beside the model; None where there are none."""
        rows = self.systems.rows()
        if not rows:
            return None
        cores = min(int(row["cores"]) for row in rows)
        return judge_emulated(compare_emulated(rows, self.links.rows()), cores)


def parts_text(kernels: Kernels) -> str:
    """Milliseconds of the local parts, as a cell of a row."""
    return " ".join(f"{1e3 * value:.4g}" for value in vars(kernels).values())


def parts_of(text: str) -> Kernels:
    """Inverse of `parts_text`."""
    return Kernels(*(1e-3 * float(word) for word in text.split()))


def cluster_of(row: Mapping[str, str], links: Iterable[Mapping[str, str]]) -> Cluster:
    """The emulated network of a row.

    Ranks of a host share its port. Local parts are pauses, so that no cores are shared. Raises
    ModelProblem where its links were not measured.
    """
    found: dict[str, dict[str, Link]] = {"inside": {}, "between": {}}
    for link in links:
        if all(link[name] == row[name] for name in NETWORK):
            seconds, bandwidth = 1e-6 * float(link["alpha_us"]), 1e9 * float(link["gigabytes"])
            found[link["where"]][link["link"]] = Link(seconds, bandwidth)
    ranks = int(row["ranks_per_host"])
    if not found["between"] or (ranks > 1 and not found["inside"]):
        raise ModelProblem(
            f"no links of {row['hosts']} emulated hosts of {ranks} ranks were measured: run "
            "scaling_runs/namespaces.py again"
        )
    inside, between = with_notices(found["inside"]), with_notices(found["between"])
    return Cluster("emulated hosts", ranks, inside, between, sharing=ranks, ring_waits=True)


def compare_emulated(
    rows: Sequence[Mapping[str, str]], links: Sequence[Mapping[str, str]]
) -> list[Compared]:
    """Every row beside its model."""
    return [_compared(row, cluster_of(row, links)) for row in rows]


def _compared(row: Mapping[str, str], cluster: Cluster) -> Compared:
    P, T, H, K = (int(row[name]) for name in ("P", "T", "H", "K"))
    call = PacedCall(P, H, T, K, parts_of(row["parts_ms"]))
    seconds = simulate(row["system"], call.workload(), cluster, row["direction"]).seconds
    place = f"{row['hosts']}x{row['ranks_per_host']} hosts {row['rate_mbit']} Mbit/s"
    point = Point(
        system=row["system"],
        variant=VARIANT,
        mode="weak",
        placement=f"{place} {row['latency_us']} us",
        direction=row["direction"],
        P=P,
        T=T,
        total=P * T,
        B=1,
        H=H,
        K=K,
        V=K,
        dtype="float32",
    )
    spread = (float(row["p20_ms"]), float(row["p80_ms"]))
    return Compared(point, float(row["median_ms"]), 1e3 * seconds, spread)


def judge_emulated(found: Sequence[Compared], cores: int) -> Verdict:
    """Medians where every rank has a core, and the order of systems everywhere."""
    order, near = judge(found, 0), judge(found, cores)
    return Verdict(near.exact, near.crowded, order.pairs, order.wrong_pairs, emulated=True)


def emulated_table(found: Sequence[Compared], cores: int) -> list[dict[str, object]]:
    """Rows of a printed table."""
    return [
        {
            "network": c.point.placement,
            "system": c.point.system,
            "direction": c.point.direction,
            "P": c.point.P,
            "measured_ms": f"{c.measured_ms:.2f}",
            "modelled_ms": f"{c.modelled_ms:.2f}",
            "error": f"{c.error:+.0%}",
            "core_each": "yes" if cores >= c.point.P else "no",
        }
        for c in found
    ]


TABLE = (
    *("network", "system", "direction", "P", "measured_ms", "modelled_ms", "error", "core_each"),
)
