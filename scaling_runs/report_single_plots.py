"""Plots of the page of one GPU; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scaling_runs.report_single_data import DIRECTIONS, SOFTMAX, VARIANTS, Call, SingleGpu, number
from scaling_runs.report_single_text import NAMES, sweep_calls

LINES = (("ours", "gla", "C0", "o"), ("fla", "gla", "C1", "s"), ("sdpa", SOFTMAX, "0.3", "x"))
NAMED = 0.08  # share from which on a kernel's name is written into its bar


def draw(found: SingleGpu, folder: Path, names: list[str]) -> None:
    """Write the plots of these names into the folder."""
    for name in names:
        figure = (_shares if "shares" in name else _sweep)(found)
        figure.savefig(folder / name, dpi=100, bbox_inches="tight")
        plt.close(figure)


def _shares(found: SingleGpu) -> plt.Figure:
    """Share of a call by kernel, ours above FLA's, by direction."""
    figure, axes = plt.subplots(1, 2, figsize=(16.0, 6.5))
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        labels: list[str] = []
        for variant in VARIANTS:
            for impl in ("ours", "fla"):
                known = [
                    (call, rows)
                    for (call, of), rows in found.limits.items()
                    if (call.variant, call.direction, of) == (variant, direction, impl)
                ]
                place = len(labels)
                label = f"{variant}, {NAMES[impl]}"
                labels.append(label if known else f"{label} (missing)")
                if known:
                    _bar(axis, place, found, known[0][0], impl)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0.0, 1.15)
        axis.set_xlabel(
            "share of the kernels' time; colour: tensor pipes active, grey: not counted"
        )
        axis.set_title(f"{direction}, {found.gpu}", fontsize=10)
    figure.tight_layout()
    colours = plt.cm.ScalarMappable(plt.Normalize(0.0, 100.0), "viridis")
    figure.colorbar(colours, ax=axes, fraction=0.02, pad=0.01, label="tensor pipes active, %")
    return figure


def _bar(axis: plt.Axes, place: int, found: SingleGpu, call: Call, impl: str) -> None:
    left = 0.0
    prefix = f"{call.variant}_"
    for row in found.launches(call, impl):
        share, tensor = number(row, "share") or 0.0, number(row, "tensor_pct")
        colour = "0.8" if tensor is None else plt.cm.viridis(tensor / 100.0)
        axis.barh(place, share, left=left, color=colour, edgecolor="white", linewidth=0.8)
        if share >= NAMED:
            text = row["kernel"].removeprefix(prefix)[: int(90 * share)]
            dark = tensor is not None and tensor < 60.0
            axis.text(
                left + share / 2,
                place,
                text,
                ha="center",
                va="center",
                fontsize=6,
                color="white" if dark else "black",
            )
        left += share
    whole = found.whole(call, impl)
    axis.text(1.01, place, f"{number(whole, 'us'):.0f} us", va="center", fontsize=7)


Value = Callable[[Call, str], float | None]


def _sweep(found: SingleGpu) -> plt.Figure:
    """Latency and memory over length, a column for each batch."""
    calls = sweep_calls(found)
    batches = sorted({call.B for call in calls})
    kinds: list[tuple[str, str, Value]] = [
        (direction, what, value)
        for direction in DIRECTIONS
        for what, value in (("ms", found.ms), ("peak MiB", found.mib))
    ]
    wide, high = len(batches), len(kinds)
    figure, axes = plt.subplots(high, wide, figsize=(4.4 * wide, 3.0 * high), squeeze=False)
    for row, (direction, what, value) in zip(axes, kinds, strict=True):
        for axis, batch in zip(row, batches, strict=True):
            here = [c for c in calls if (c.direction, c.B) == (direction, batch)]
            _lines(axis, here, value)
            axis.set_title(f"GLA {direction}, B={batch}, H=16, D=128", fontsize=9)
            axis.set_ylabel(what)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{found.gpu}; points that are not there were not measured or did not fit")
    figure.tight_layout()
    return figure


def _lines(axis: plt.Axes, calls: list[Call], value: Value) -> None:
    for impl, variant, colour, mark in LINES:
        known = [(c.T, value(replace(c, variant=variant), impl)) for c in calls]
        points = [(tokens, y) for tokens, y in known if y is not None]
        if points:
            axis.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=mark,
                label=NAMES[impl],
                markersize=5,
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({call.T for call in calls})
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.set_xlabel("tokens")
    axis.grid(alpha=0.3)
