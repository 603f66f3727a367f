#!/usr/bin/env python3
"""One page of what was measured and modelled: tables, plots, the published points beside ours.

    python scaling_runs/report.py                 from all CSV files of scaling_runs/results
    python scaling_runs/report.py --no-plots      without matplotlib

Writes scaling_summary.csv, scaling_*.png and scaling.md into the folder of the CSV files. Modelled
numbers are marked: italic in tables, dashed in plots, `modelled` in the CSV file. A table says of
every system where it was measured or modelled, or that it was not run; maps mark with a star what
no measured run stands behind; commits with changes that were not committed are told.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling_runs.machine import RESULTS
from scaling_runs.report_data import SUMMARY, Line, Report, read_report
from scaling_runs.report_runs import system_runs
from scaling_runs.report_text import page

Row = dict[str, str]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--no-plots", action="store_true", help="tables only")
    return parser.parse_args(words)


def write_summary(lines: Sequence[Line], path: Path) -> None:
    """All lines in one CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, SUMMARY, lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow(line.columns())


def main(words: Sequence[str] | None = None) -> int:
    """Write the page."""
    options = parse(words)
    folder: Path = options.results
    found: Report = read_report(folder)
    if not found.lines:
        print(
            f"report.py: no rows in {folder}; measure first, for example with "
            "./launch/weak_scaling.sh --ranks 2 -- --config configs/weak_scaling/cpu.yaml",
            file=sys.stderr,
        )
        return 2
    runs = system_runs(folder, found.lines)
    write_summary(found.lines, folder / "scaling_summary.csv")
    plots: list[str] = []
    if not options.no_plots:
        try:
            from scaling_runs.report_plots import draw
        except ImportError as missing:
            print(
                f"report.py: plots need matplotlib ({missing}): pip install 'flexla_dist[bench]', "
                "or give --no-plots",
                file=sys.stderr,
            )
            return 2
        plots = draw(found, folder, runs)
    verdict = folder / "model_validation.json"
    checked = json.loads(verdict.read_text()) if verdict.is_file() else None
    (folder / "scaling.md").write_text(page(found, plots, checked, runs))
    print(f"{len(found.lines)} lines; {folder / 'scaling.md'}", *plots, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
