"""The numbers of the README's table of speed are those of the measured rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "scaling_runs" / "results" / "single_gpu_nvidia_h200.csv"
TOKENS = "16384"
COLUMNS = (  # (direction, implementation, column of the row) in the order of the table
    ("fwd", "ours", "median_ms"),
    ("fwd", "fla", "median_ms"),
    ("fwdbwd", "ours", "median_ms"),
    ("fwdbwd", "fla", "median_ms"),
    ("fwdbwd", "ours", "peak_mib"),
    ("fwdbwd", "fla", "peak_mib"),
)


def table() -> dict[str, list[str]]:
    section = (ROOT / "README.md").read_text().split("## Speed on one GPU")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def rows() -> dict[tuple[str, str, str], dict[str, str]]:
    with ROWS.open(newline="") as file:
        return {
            (row["variant"], row["direction"], row["impl"]): row
            for row in csv.DictReader(file)
            if row["T"] == TOKENS
        }


@pytest.mark.parametrize("name", table())
def test_numbers(name: str) -> None:
    found = rows()
    *cells, ours, theirs = table()[name]
    for text, (direction, implementation, column) in zip(cells, COLUMNS, strict=True):
        row = found.get((name, direction, implementation))
        if row is None:
            assert text == "-"
        elif column == "median_ms":
            assert text == f"{float(row[column]):.2f}"
        else:
            assert text == row[column]
    for text, implementation in ((ours, "ours"), (theirs, "fla")):
        pair = [found.get((name, direction, implementation)) for direction in ("fwd", "fwdbwd")]
        assert text == " / ".join("-" if row is None else row["host_us"] for row in pair)
