"""Of every system: where it was measured, where it is modelled, what was never run.

Contract: all of it is read from the rows of a folder. A program of the model counts as measured
where the system that it stands for has a measured row; virtual ranks of one device are no ranks
with a device each, and are told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scaling_runs.baselines import SYSTEMS
from scaling_runs.model.emulated import ROW_COLUMNS, ROW_KEY
from scaling_runs.model.maps import RUN_AS
from scaling_runs.model.programs import PROGRAMS
from scaling_runs.report_data import Line
from scaling_runs.rows import RowStore
from scaling_runs.weak_rows import COLUMNS, KEY

UNFINISHED = {"refused": "refused", "failed": "failed", "begun": "begun and not finished"}
NOTE_WORDS = 12


@dataclass
class SystemRuns:
    """Of one system: ranks by place of measured and of modelled rows, places whose rows are of
    virtual ranks alone or of paced ranks on emulated hosts, and why else there is no row."""

    system: str
    measured: dict[str, set[int]] = field(default_factory=dict)
    modelled: dict[str, set[int]] = field(default_factory=dict)
    virtual: set[str] = field(default_factory=set)
    emulated: set[str] = field(default_factory=set)
    unfinished: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """`measured`, `modelled` or `not run`; both where rows of both are there."""
        kinds = [name for name in ("measured", "modelled") if getattr(self, name)]
        return " and ".join(kinds) or "not run"

    @property
    def run(self) -> bool:
        """Whether a measured row of ranks with a device each stands behind it."""
        return bool(self.measured)

    def cells(self) -> tuple[str, str, str]:
        """Measured, modelled, and what there is instead of a measured row."""
        instead = list(self.unfinished)
        if self.virtual and not self.measured:
            instead.append(f"virtual ranks of one device: {', '.join(sorted(self.virtual))}")
        if self.emulated and not self.measured:
            places = ", ".join(sorted(self.emulated))
            instead.append(f"paced ranks on emulated hosts: {places}")
        if not self.measured and not instead:
            instead.append("not run")
        return _places(self.measured), _places(self.modelled), "; ".join(instead)


def _places(found: dict[str, set[int]]) -> str:
    return "; ".join(
        f"{where}, P = {', '.join(map(str, sorted(ranks)))}" for where, ranks in found.items()
    )


def system_runs(folder: Path, lines: Iterable[Line]) -> dict[str, SystemRuns]:
    """Of all systems, and of the model's programs that have none of their name."""
    found = {name: SystemRuns(name) for name in (*SYSTEMS, *PROGRAMS)}
    for line in lines:
        one = found.setdefault(line.system, SystemRuns(line.system))
        places = one.measured if line.kind == "measured" else one.modelled
        places.setdefault(line.where, set()).add(line.P)
    for path in sorted(folder.glob("weak_scaling_*.csv")):
        where = path.stem.removeprefix("weak_scaling_")
        _unfinished(found, where, RowStore(path, COLUMNS, KEY).rows())
    for path in sorted(folder.glob("emulated_hosts_*.csv")):
        where = path.stem.removeprefix("emulated_hosts_")
        for row in RowStore(path, ROW_COLUMNS, ROW_KEY).rows():
            found[row["system"]].emulated.add(where)
    virtual = _virtual_strategies(folder)
    for program, system in RUN_AS.items():
        found[program].measured = dict(found[system].measured)
    for name, one in found.items():
        strategy = RUN_AS.get(name, name)
        if strategy.endswith("_device"):
            one.virtual = virtual.get(strategy.removesuffix("_device"), set())
    return found


def _unfinished(found: dict[str, SystemRuns], where: str, rows: Sequence[dict[str, str]]) -> None:
    """Note once for each system and status why there is no time."""
    for row in rows:
        if row["status"] not in UNFINISHED or row["system"] not in found:
            continue
        words = row["note"].split()
        note = " ".join(words[:NOTE_WORDS]) + (" ..." if len(words) > NOTE_WORDS else "")
        text = f"{where}: {UNFINISHED[row['status']]}" + (f" ({note})" if note else "")
        if text not in found[row["system"]].unfinished:
            found[row["system"]].unfinished.append(text)


def _virtual_strategies(folder: Path) -> dict[str, set[str]]:
    """{strategy: GPUs} of the rows of virtual_ranks.py."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("virtual_ranks_*.csv")):
        from scaling_runs.virtual_ranks import COLUMNS as VIRTUAL_COLUMNS
        from scaling_runs.virtual_ranks import KEY as VIRTUAL_KEY

        for row in RowStore(path, VIRTUAL_COLUMNS, VIRTUAL_KEY).rows():
            if row["impl"] == "ours":
                gpu = path.stem.removeprefix("virtual_ranks_")
                found.setdefault(row["strategy"], set()).add(gpu)
    return found


def runs_table(runs: dict[str, SystemRuns]) -> str:
    """The section of the page."""
    rows = [
        "## What was run\n",
        "| system | state | measured | modelled | instead of a measured row |",
        "|---|---|---|---|---|",
    ]
    for name, one in runs.items():
        measured, modelled, instead = one.cells()
        rows.append(f"| `{name}` | {one.state} | {measured} | *{modelled}* | {instead} |")
    return "\n".join([*rows, ""]).replace("| ** |", "| |")


def without_run(names: Iterable[str], runs: dict[str, SystemRuns]) -> list[str]:
    """Of these systems those that no measured row stands behind, in order, once each."""
    return [n for n in dict.fromkeys(names) if n not in runs or not runs[n].run]


def unrun_words(names: Iterable[str], runs: dict[str, SystemRuns]) -> str:
    """A sentence on those of some modelled systems that were never run; empty where all were."""
    missing = without_run(names, runs)
    if not missing:
        return ""
    listed = ", ".join(f"`{name}`" for name in missing)
    virtual = [name for name in missing if name in runs and runs[name].virtual]
    some = f" ({', '.join(virtual)}: on virtual ranks of one device alone)" if virtual else ""
    return f"Modelled without a measured run of ranks with a device each: {listed}{some}."


def commit_words(lines: Sequence[Line]) -> str:
    """What the commits of measured lines say of the code that was measured."""
    total = len(lines)
    changed = sorted({n.commit for n in lines if n.commit.endswith("+")})
    unknown = sum(n.commit in ("", "unknown") for n in lines)
    count = sum(n.commit.endswith("+") for n in lines)
    if not total:
        return "Nothing was measured."
    said = []
    if changed:
        said.append(
            f"{count} of {total} measured times are of code with changes that were not committed "
            f"({', '.join(changed)}): they cannot be repeated from a commit."
        )
    if unknown:
        said.append(f"{unknown} of {total} measured times are of an unknown commit.")
    return " ".join(said) or f"All {total} measured times are of committed code."
