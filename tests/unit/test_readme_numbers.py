"""The numbers of the README's tables are those of the rows that scripts wrote."""

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
MEASURED = {  # rows of the README's table, and the systems that they are of
    "ours, kernels that exchange": "chain_device",
    "ours, host engine (NCCL)": "chain",
    "LASP2, asynchronous": "lasp2",
    "LASP2, blocking": "lasp2_naive",
    "LASP": "lasp",
    "Ulysses": "ulysses",
    "`ideal_same_plan`": "ideal_same_plan",
    "`ideal_best`": "ideal_best",
}
CALLS = [(v, d) for v in ("gated_delta_rule", "simple_gla") for d in ("fwd", "fwdbwd")]


def scaling() -> str:
    return (ROOT / "README.md").read_text().split("\n## Scaling")[1].split("\n## ")[0]


def two_gpus() -> dict[tuple[str, str, str, str], float]:
    """Medians of the rows on two GPUs, by system, call, tokens and B."""
    with (RESULTS / "weak_scaling_nvidia_h200.csv").open(newline="") as file:
        return {
            (row["system"], row["variant"], row["direction"], f"{row['T']} {row['B']}"): float(
                row["median_ms"]
            )
            for row in csv.DictReader(file)
            if row["status"] == "ok" and row["P"] == "2"
        }


@pytest.mark.parametrize("words", MEASURED)
def test_two_gpus(words: str) -> None:
    found = two_gpus()
    wanted = [f"{found[MEASURED[words], v, d, '32768 4']:.2f}" for v, d in CALLS]
    part = scaling().split("On two H200s")[1].split("At 128 GPUs")[0]
    [line] = [line for line in part.splitlines() if line.startswith(f"| {words} |")]
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == wanted


def test_one_long_sequence() -> None:
    found = two_gpus()
    forward, both = (found["auto", "gated_delta_rule", d, "131072 1"] for d in ("fwd", "fwdbwd"))
    text = f"take {forward:.2f} ms forward and {both:.1f} ms forward + backward"
    assert text in " ".join(scaling().split())


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
