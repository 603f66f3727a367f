"""The numbers of the README's tables are those of the rows that scripts wrote."""

from __future__ import annotations

import csv
import re
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
            if (row["B"], row["T"], row["H"], row["V"]) == ("1", TOKENS, "32", "128")
            and not row.get("HV")
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


# -- scaling ---------------------------------------------------------------------------------------

RESULTS = ROOT / "scaling_runs" / "results"
MEASURED = (  # words of the README before a number, and the system that it is of
    ("ours", "chain"),
    ("engine and", "chain_device"),
    ("dense M", "lasp2_naive"),
    ("(blocking) and", "lasp2"),
    ("LASP", "lasp"),
    ("Ulysses", "ulysses"),
    ("exchange nothing", "ideal_best"),
)


def scaling() -> str:
    text = (ROOT / "README.md").read_text().split("\n## Scaling")[1].split("\n## ")[0]
    return " ".join(text.split())


@pytest.mark.parametrize(("words", "system"), MEASURED)
def test_two_gpus(words: str, system: str) -> None:
    with (RESULTS / "weak_scaling_nvidia_h200.csv").open(newline="") as file:
        found = {row["system"]: row for row in csv.DictReader(file) if row["status"] == "ok"}
    row = found[system]
    assert (row["variant"], row["direction"], row["P"], row["B"], row["T"]) == (
        "gated_delta_rule", "fwd", "2", "4", "32768",
    )  # fmt: skip
    paragraph = scaling().split("On two H200s")[1].split("On ")[0].split("At 128 GPUs")[0]
    number = re.search(rf"{re.escape(words)} (\d+\.\d)", paragraph)
    assert number is not None and number[1] == f"{float(row['median_ms']):.1f}"


MODELLED = {
    "simple_gla forward": "simple_gla fwd",
    "simple_gla forward + backward": "simple_gla fwdbwd",
    "gated_delta_rule forward": "gated_delta_rule fwd",
    "gated_delta_rule forward + backward": "gated_delta_rule fwdbwd",
}


@pytest.mark.parametrize("name", MODELLED)
def test_128_gpus(name: str) -> None:
    """A row of the README is one of the page that `report.py` made."""

    def cells(line: str) -> list[str]:
        return [cell.strip().strip("*+`") for cell in line.strip().strip("|").split("|")]

    lines = (RESULTS / "scaling.md").read_text().splitlines()
    page = [cells(line) for line in lines if line.startswith(f"| {MODELLED[name]} | `h20_ib` |")]
    assert len(page) == 1
    _, _, best, same, ours, _, over, _, _, lasp2 = page[0]
    readme = (ROOT / "README.md").read_text().splitlines()
    [row] = [cells(line) for line in readme if line.startswith(f"| {name} | ")]
    assert row == [name, best, same, ours, over, lasp2]
