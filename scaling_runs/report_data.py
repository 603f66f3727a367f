"""Measured and modelled rows of a folder as lines of one shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from scaling_runs.model.__main__ import PREDICTED, PREDICTED_KEY
from scaling_runs.rows import RowStore
from scaling_runs.weak_rows import COLUMNS, KEY

SUMMARY = (
    *("kind", "where", "system", "variant", "mode", "placement", "direction", "P", "T", "B", "H"),
    *("K", "V", "dtype", "state_bytes", "ms", "p20_ms", "p80_ms", "floor_ms", "exposed_ms"),
    *("exchange_ms", "hidden_ms", "received_bytes", "date", "commit", "kernels_of"),
)


@dataclass(frozen=True)
class Line:
    """One time. floor_ms: our local work alone; exposed: above it; exchange: of states alone;
    hidden: of the exchange what is not exposed. kernels_of: whose local parts a model has."""

    kind: str
    where: str
    system: str
    variant: str
    mode: str
    placement: str
    direction: str
    P: int
    T: int
    B: int
    H: int
    K: int
    V: int
    dtype: str
    state_bytes: int
    ms: float
    p20_ms: float | None
    p80_ms: float | None
    received_bytes: int | None
    date: str
    commit: str
    floor_ms: float | None = None
    exchange_ms: float | None = None
    kernels_of: str = ""

    @property
    def group(self) -> tuple:
        """What lines of different systems have in common when they are compared."""
        return (self.kind, self.where, *self.call, self.mode, self.placement, self.direction)

    @property
    def call(self) -> tuple:
        """Variant, ranks and shape."""
        shape = (self.B, self.H, self.K, self.V, self.dtype)
        return (self.variant, self.P, self.T, *shape)

    @property
    def exposed_ms(self) -> float | None:
        """Time above the local work alone; None without that, or for the floors."""
        if self.floor_ms is None or self.system.startswith("ideal"):
            return None
        return max(0.0, self.ms - self.floor_ms)

    @property
    def hidden_ms(self) -> float | None:
        """What of the exchange is not exposed, in a forward pass."""
        if self.exposed_ms is None or self.exchange_ms is None or self.direction != "fwd":
            return None
        return max(0.0, self.exchange_ms - self.exposed_ms)

    def columns(self) -> dict[str, object]:
        """As a row of the summary."""
        derived = {"exposed_ms": self.exposed_ms, "hidden_ms": self.hidden_ms}
        values = {**vars(self), **derived}
        return {name: _text(values[name]) for name in SUMMARY}


def _text(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else value


@dataclass(frozen=True)
class Report:
    """All lines of a folder."""

    lines: list[Line] = field(default_factory=list)

    def measured(self) -> list[Line]:
        """Lines of real runs."""
        return [line for line in self.lines if line.kind == "measured"]

    def modelled(self) -> list[Line]:
        """Lines of the model."""
        return [line for line in self.lines if line.kind == "modelled"]


def read_report(folder: Path) -> Report:
    """Lines of all result files of a folder, with floors and exchanges found for each."""
    lines: list[Line] = []
    for path in sorted(folder.glob("weak_scaling_*.csv")):
        where = path.stem.removeprefix("weak_scaling_")
        for row in RowStore(path, COLUMNS, KEY).rows():
            if row["status"] == "ok" and row["median_ms"]:
                lines.append(_measured(row, where))
    for path in sorted(folder.glob("predicted_*.csv")):
        for row in RowStore(path, PREDICTED, PREDICTED_KEY).rows():
            lines.append(_modelled(row))
    return Report(_with_floors(lines))


def _numbers(row: dict[str, str]) -> dict[str, int]:
    return {name: int(row[name]) for name in ("P", "T", "B", "H", "K", "V", "state_bytes")}


def _measured(row: dict[str, str], where: str) -> Line:
    names = ("system", "variant", "mode", "placement", "direction", "dtype", "date", "commit")
    received = row["received_bytes"]
    return Line(
        kind="measured",
        where=where,
        ms=float(row["median_ms"]),
        p20_ms=float(row["p20_ms"]),
        p80_ms=float(row["p80_ms"]),
        received_bytes=int(received) if received else None,
        **{name: row[name] for name in names},  # type: ignore[arg-type]
        **_numbers(row),  # type: ignore[arg-type]
    )


def _modelled(row: dict[str, str]) -> Line:
    names = ("system", "variant", "direction", "dtype", "date", "commit", "kernels_of")
    alone = row["exchange_ms"]
    return Line(
        kind="modelled",
        exchange_ms=float(alone) if alone else None,
        where=row["cluster"],
        mode="weak",
        placement="barrier",
        ms=float(row["ms"]),
        p20_ms=None,
        p80_ms=None,
        received_bytes=None,
        **{name: row[name] for name in names},  # type: ignore[arg-type]
        **_numbers(row),  # type: ignore[arg-type]
    )


def _with_floors(lines: Iterable[Line]) -> list[Line]:
    lines = list(lines)
    floors = {line.group: line.ms for line in lines if line.system == "ideal_same_plan"}
    alone = {
        (line.where, line.system, *line.call): line.ms
        for line in lines
        if line.placement == "exchange"
    }
    found = []
    for line in lines:
        values = dict(vars(line))
        values["floor_ms"] = floors.get(line.group)
        if line.kind == "measured" and line.placement != "exchange":
            values["exchange_ms"] = alone.get((line.where, line.system, *line.call))
        found.append(Line(**values))
    return found
