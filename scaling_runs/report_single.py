#!/usr/bin/env python3
"""One page on one GPU: speed, what limits each kernel, batch and length beside softmax attention.

    python scaling_runs/report_single.py                 from the rows of scaling_runs/results
    python scaling_runs/report_single.py --no-plots      without matplotlib

Writes single_gpu.md and single_gpu_*.png into the folder of the CSV files, from rows alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling_runs.machine import RESULTS
from scaling_runs.report_single_data import SingleGpu, read_single
from scaling_runs.report_single_text import page, sweep_calls

PAGE = "single_gpu.md"
SHARES, SWEEP = "single_gpu_shares.png", "single_gpu_sweep.png"
GPU = "nvidia_h200"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--gpu", default=GPU, help="as in the names of the files")
    parser.add_argument("--no-plots", action="store_true", help="tables only")
    return parser.parse_args(words)


def plot_names(found: SingleGpu) -> list[str]:
    """Plots that there are rows for."""
    names = [SHARES] if found.limits else []
    return names + ([SWEEP] if sweep_calls(found) else [])


def main(words: Sequence[str] | None = None) -> int:
    """Write the page."""
    options = parse(words)
    folder: Path = options.results
    found = read_single(folder, options.gpu)
    if not found.times and not found.limits:
        print(
            f"report_single.py: no rows of {options.gpu} in {folder}; measure first, on a GPU: "
            "python scaling_runs/single_gpu.py",
            file=sys.stderr,
        )
        return 2
    names = [] if options.no_plots else plot_names(found)
    if names:
        try:
            from scaling_runs.report_single_plots import draw
        except ImportError as missing:
            print(
                f"report_single.py: plots need matplotlib ({missing}): pip install "
                "'flexla_dist[bench]', or give --no-plots",
                file=sys.stderr,
            )
            return 2
        draw(found, folder, names)
    (folder / PAGE).write_text(page(found, names))
    print(folder / PAGE, *names, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
