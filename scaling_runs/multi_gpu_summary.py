"""The table at the end of `multi_gpu.sh`: what was right, and times beside both ideals."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaling_runs.multi_gpu_rows import SHOWN
from scaling_runs.rows import Row, format_table

PUBLISHED = {  # gated delta rule, 262144 tokens over 8 H200, 32 heads, in ms
    "fwd": {"FlashQLA": 1.68, "FLA's context parallel": 4.82},
    "fwdbwd": {"FlashQLA": 5.59, "FLA's context parallel": 14.15},
}
PLACE = ("variant", "mode", "P", "T", "B", "direction")
COLUMNS = (*PLACE, "system", "median_ms", "p80_ms", "over_same_plan", "over_best", "status", "note")
PUBLISHED_TOKENS = 262144


def print_summary(rows: Sequence[Row], weak_file: Path, ranks: int) -> None:
    """Everything that this machine's files hold of so many ranks."""
    print(f"\n== steps, checks, links, training, failure ({ranks} ranks) ==")
    own = [row for row in rows if row["step"] == "step"]
    print(format_table([{**r, "note": r["note"][:60]} for r in own], ("quantity", *SHOWN[6:])))
    for step in ("check", "check_nvshmem", "links", "train", "killed"):
        found = [{**row, "note": row["note"][:90]} for row in rows if row["step"] == step]
        counts: dict[str, int] = {}
        for row in found:
            counts[row["status"]] = counts.get(row["status"], 0) + 1
        if found:
            said = ", ".join(f"{count} {status}" for status, count in counts.items())
            print(f"\n-- {step}: {said}")
            print(format_table(found, SHOWN[1:]))
    print("\n== times: of the slowest rank, beside both ideals ==")
    points = weak_rows(weak_file, ranks)
    print(format_table(with_ideals(points), COLUMNS))
    for line in published(points):
        print(line)


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
