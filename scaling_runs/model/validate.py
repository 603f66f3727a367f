"""The model against measured medians: within 20% where every rank has a core, the same order of
systems where ranks share cores and on emulated hosts.

Contract: the verdict is kept in a file with a hash of the model's sources, and modelled columns
beyond what was measured are refused without a passing verdict of the present sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from scaling_runs.model.clusters import Cluster, ModelProblem, from_calibration
from scaling_runs.model.predict import simulate
from scaling_runs.model.programs import PROGRAMS
from scaling_runs.model.workload import KernelTable, nearest_world, workload_of
from scaling_runs.weak_grid import Point

TOLERANCE = 0.20
APART = 1.2
ONE_AT_A_TIME = ("lasp",)  # one rank computes while the others wait: local parts as if alone
FILES = (
    *("events.py", "flows.py", "network.py", "direction.py", "programs.py", "fused.py"),
    "predict.py",
)


@dataclass(frozen=True)
class Compared:
    """A measured row and its model."""

    point: Point
    measured_ms: float
    modelled_ms: float
    spread: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.modelled_ms / self.measured_ms - 1

    @property
    def within(self) -> bool:
        """Whether the error is within the tolerance."""
        return abs(self.error) <= TOLERANCE


@dataclass(frozen=True)
class Verdict:
    """What the comparison found. emulated: ranks were on emulated hosts, where the order counts
    whether ranks share cores or not."""

    exact: tuple[Compared, ...]
    crowded: tuple[Compared, ...]
    pairs: int
    wrong_pairs: tuple[str, ...]
    emulated: bool = False

    @property
    def passed(self) -> bool:
        """All rows with a core for each rank within 20%, and no pair of systems that are apart in
        the other order; of either there must be something to compare."""
        compared = bool(self.pairs) if self.emulated else bool(self.exact)
        return compared and all(c.within for c in self.exact) and not self.wrong_pairs

    def summary(self) -> str:
        """The verdict in words."""
        inside = sum(c.within for c in self.exact)
        order = self.pairs - len(self.wrong_pairs)
        state = "passed" if self.passed else "NOT passed"
        medians = "no median had a core for each rank"
        if self.exact:
            worst = max(abs(c.error) for c in self.exact)
            medians = (
                f"{inside} of {len(self.exact)} medians within 20% (largest error {worst:.0%})"
            )
        where = "on emulated hosts" if self.emulated else "where ranks share cores"
        pairs = f"{order} of {self.pairs} pairs of systems in the measured order {where}"
        return f"{state}: {medians}; {pairs}"


@dataclass(frozen=True)
class Measurements:
    """What was measured on a host of some cores: rows of systems, of kernels and of links."""

    host: str
    cores: int
    rows: Sequence[Mapping[str, str]]
    kernels: Sequence[Mapping[str, str]]
    links: Sequence[Mapping[str, str]]

    def cluster(self, ranks: int) -> Cluster:
        """The host, with links measured on as many ranks as have a core each, or nearly."""
        usable = [row for row in self.links if self.cores >= int(row["world"])]
        rows = nearest_world(usable, min(ranks, self.cores))
        return from_calibration(self.host, self.cores, rows)

    def table(self, ranks: int) -> KernelTable:
        """Kernel times of as many ranks beside each other as have a core each."""
        usable = [row for row in self.kernels if self.cores >= int(row["world"])]
        return KernelTable(usable, min(ranks, self.cores))


def compare(measured: Measurements) -> list[Compared]:
    """Measured operator rows that the model has programs and kernel times for."""
    found = []
    for row in measured.rows:
        if row["status"] != "ok" or row["placement"] != "barrier" or row["nodes"] != "1":
            continue
        if row["system"] not in PROGRAMS or not row["median_ms"]:
            continue
        point = point_of(row)
        try:
            beside = 1 if point.system in ONE_AT_A_TIME else point.P
            load = workload_of(point, measured.table(beside).kernels(point))
            cluster = measured.cluster(point.P)
            seconds = simulate(point.system, load, cluster, point.direction).seconds
        except ModelProblem:
            continue
        spread = (float(row["p20_ms"]), float(row["p80_ms"]))
        found.append(Compared(point, float(row["median_ms"]), 1e3 * seconds, spread))
    return found


def judge(found: Sequence[Compared], cores: int) -> Verdict:
    """Exact where P is at most the cores; beyond, pairs of systems whose medians differ by more
    than 20% and whose 20th to 80th percentiles do not overlap must be in the same order."""
    exact = tuple(c for c in found if cores >= c.point.P)
    crowded = tuple(c for c in found if cores < c.point.P)
    groups: dict[tuple, list[Compared]] = {}
    for one in crowded:
        groups.setdefault(one.point.group, []).append(one)
    pairs, wrong = 0, []
    for group in groups.values():
        for a, b in combinations(group, 2):
            fast, slow = sorted((a, b), key=lambda c: c.measured_ms)
            if slow.measured_ms < APART * fast.measured_ms or fast.spread[1] >= slow.spread[0]:
                continue
            pairs += 1
            if fast.modelled_ms > slow.modelled_ms:
                wrong.append(
                    f"{fast.point.words()} measured {fast.measured_ms:.1f} ms, modelled "
                    f"{fast.modelled_ms:.1f}; {slow.point.system} {slow.measured_ms:.1f} and "
                    f"{slow.modelled_ms:.1f}"
                )
    return Verdict(exact, crowded, pairs, tuple(wrong))


def point_of(row: Mapping[str, str]) -> Point:
    """The point of a measured row."""
    whole = {name: int(row[name]) for name in ("P", "T", "total", "B", "H", "K", "V")}
    names = ("system", "variant", "mode", "placement", "direction", "dtype")
    return Point(**{name: row[name] for name in names}, **whole)  # type: ignore[arg-type]


def sources_hash() -> str:
    """Hash of the sources that decide what the model says."""
    folder = Path(__file__).parent
    text = b"".join((folder / name).read_bytes() for name in FILES)
    return hashlib.sha256(text).hexdigest()[:16]


def keep_verdict(
    verdict: Verdict, folder: Path, host: str, emulated: Verdict | None = None
) -> Path:
    """Write the verdict, and that of emulated hosts; returns the file."""
    path = folder / "model_validation.json"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"sources": sources_hash(), "host": host, **_verdict_content(verdict)}
    content["emulated"] = None if emulated is None else _verdict_content(emulated)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _verdict_content(verdict: Verdict) -> dict[str, object]:
    return {
        "passed": verdict.passed,
        "summary": verdict.summary(),
        "rows": [
            {
                "point": c.point.words(),
                "measured_ms": round(c.measured_ms, 3),
                "modelled_ms": round(c.modelled_ms, 3),
                "error": round(c.error, 3),
                "core_for_each_rank": c in verdict.exact,
            }
            for c in (*verdict.exact, *verdict.crowded)
        ],
        "wrong_pairs": list(verdict.wrong_pairs),
    }


def require_validation(folder: Path) -> str:
    """The summaries of passing verdicts. Raises ModelProblem where there are none of these sources:
    nothing is predicted beyond measured sizes before the model has been checked, on processes of
    one host and on emulated hosts."""
    path = folder / "model_validation.json"
    fix = "run python -m scaling_runs.model --validate after measuring with weak_scaling.py"
    if not path.is_file():
        raise ModelProblem(
            f"the model was not compared with measurements ({path} is missing); {fix}"
        )
    content = json.loads(path.read_text())
    if content["sources"] != sources_hash():
        raise ModelProblem(f"the model changed since it was compared with measurements; {fix}")
    emulated = content.get("emulated")
    for part in (content, emulated):
        if part is None:
            raise ModelProblem(
                "the model was not compared with measurements on emulated hosts: run "
                "launch/emulated_hosts.sh, then python -m scaling_runs.model --validate"
            )
        if not part["passed"]:
            raise ModelProblem(
                f"the model does not reproduce the measurements ({part['summary']}), so nothing is "
                f"predicted from it; see {path}"
            )
    return f"{content['summary']}; emulated hosts {emulated['summary']}"
