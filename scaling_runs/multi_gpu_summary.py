"""The table at the end of `multi_gpu.sh`: what was right, and times beside both ideals."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaling_runs.baselines import SYSTEMS
from scaling_runs.multi_gpu_rows import SHOWN
from scaling_runs.multi_gpu_sizes import IDEALS
from scaling_runs.rows import Row, format_table

PUBLISHED = {  # gated delta rule, 262144 tokens over 8 H200, 32 heads, in ms
    "fwd": {"FlashQLA": 1.68, "FLA's context parallel": 4.82},
    "fwdbwd": {"FlashQLA": 5.59, "FLA's context parallel": 14.15},
}
PLACE = ("variant", "mode", "P", "T", "B", "direction")
COLUMNS = (*PLACE, "system", "median_ms", "p80_ms", "over_same_plan", "over_best", "status", "note")
COMPARED = (*PLACE, "ideal_best", "ideal_same_plan", "device", "above", "host", "others")
PUBLISHED_TOKENS = 262144


def summary(rows: Sequence[Row], weak_file: Path, ranks: int) -> tuple[str, str]:
    """(short, whole): what this machine's files hold of so many ranks. The short one has what was
    not right and one line a place, the whole one all rows."""
    points = weak_rows(weak_file, ranks)
    times = with_ideals(points)
    bad = [t for t in times if t["status"] not in ("ok", "refused")]
    short, whole = [], ["== times: of the slowest rank, beside both ideals ==", ""]
    whole += [format_table(times, COLUMNS), ""]
    for step in ("check", "check_nvshmem", "links", "train", "killed"):
        found = [{**row, "note": row["note"][:90]} for row in rows if row["step"] == step]
        if not found:
            continue
        counts: dict[str, int] = {}
        for row in found:
            counts[row["status"]] = counts.get(row["status"], 0) + 1
        head = f"-- {step}: " + ", ".join(f"{count} {status}" for status, count in counts.items())
        whole += [head, format_table(found, SHOWN[1:]), ""]
        kept = [row for row in found if _telling(row)]
        short += [head, *([format_table(kept, SHOWN[1:])] if kept else []), ""]
    if bad:
        short += ["-- times that could not be had", format_table(bad, COLUMNS), ""]
    short += [f"-- times on {ranks} ranks, ms", format_table(compared(points), COMPARED), ""]
    short += published(points)
    steps = [{**r, "note": r["note"][:60]} for r in rows if r["step"] == "step"]
    short += ["", format_table(steps, ("quantity", "value", "unit", "status", "note"))]
    return "\n".join(short), "\n".join([*whole, *short])


def _telling(row: Mapping[str, str]) -> bool:
    """Whether a row belongs into the short summary."""
    if row["step"] == "links":
        return row["quantity"] not in ("scan", "survey")
    return row["status"] != "ok" or row["step"] in ("train", "killed")


def compared(rows: Sequence[Row]) -> list[dict[str, object]]:
    """One line a place: both ideals, the best of ours by either engine, the best of the others."""
    places: dict[tuple, dict[str, float]] = {}
    named: dict[tuple, Row] = {}
    for row in sorted(rows, key=_place):
        if row["median_ms"]:
            places.setdefault(_place(row), {})[row["system"]] = float(row["median_ms"])
            named[_place(row)] = row
    return [
        {**{name: named[place][name] for name in PLACE}, **_best(times)}
        for place, times in places.items()
    ]


def _best(times: Mapping[str, float]) -> dict[str, object]:
    families: dict[str, list[tuple[float, str]]] = {"device": [], "host": [], "others": []}
    for name, ms in times.items():
        if name in SYSTEMS and SYSTEMS[name].family != "floor":
            own = SYSTEMS[name].engine if SYSTEMS[name].family == "ours" else "others"
            families["device" if own == "auto" else own].append((ms, name))
    found: dict[str, object] = {n: f"{times[n]:.3f}" for n in IDEALS if n in times}
    for family, some in families.items():
        if some:
            ms, name = min(some)
            found[family] = f"{name} {ms:.3f}"
            if family == "device" and "ideal_same_plan" in times:
                found["above"] = f"{100 * (ms / times['ideal_same_plan'] - 1):+.1f}%"
    return found


def weak_rows(path: Path, ranks: int) -> list[Row]:
    """Points on at most so many ranks."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["world"]) == ranks]


def with_ideals(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Rows sorted by place and time, with the part above either ideal."""
    ideals: dict[tuple, float] = {}
    for row in rows:
        if row["system"].startswith("ideal") and row["median_ms"]:
            ideals[(row["system"], *_place(row))] = float(row["median_ms"])
    found = []
    for row in sorted(rows, key=lambda r: (*_place(r), float(r["median_ms"] or "inf"))):
        shown: dict[str, object] = {**row, "note": row["note"][:70]}
        if row["status"] == "begun":
            shown["note"] = "ended the program, or was ended with it"
        for column, name in (("over_same_plan", "ideal_same_plan"), ("over_best", "ideal_best")):
            ideal = ideals.get((name, *_place(row)))
            if ideal and row["median_ms"]:
                shown[column] = f"{100 * (float(row['median_ms']) / ideal - 1):+.1f}%"
        found.append(shown)
    return found


def _place(row: Mapping[str, str]) -> tuple:
    return (row["variant"], row["mode"], -int(row["P"]), -int(row["T"]), row["B"], row["direction"])


def published(rows: Sequence[Row]) -> list[str]:
    """Our best time of the long sequence beside what others have published."""
    lines = []
    for direction, times in PUBLISHED.items():
        ours = [
            (float(row["median_ms"]), row["system"])
            for row in rows
            if row["mode"] == "strong"
            and row["direction"] == direction
            and int(row["total"]) == PUBLISHED_TOKENS
            and row["median_ms"]
            and (row["system"].endswith("_device") or row["system"] in ("chain", "auto"))
        ]
        if ours:
            best, system = min(ours)
            others = ", ".join(f"{name} {ms} ms" for name, ms in times.items())
            lines.append(f"262144 tokens, {direction}: {system} {best:.3f} ms; on 8 H200: {others}")
    return lines
