"""Plots of the report; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scaling_runs.model.clusters import PRESETS, ModelProblem
from scaling_runs.model.maps import MAP_RANKS, MAP_STATES, strategy_map
from scaling_runs.model.validate import require_validation
from scaling_runs.report_data import Line, Report
from scaling_runs.report_runs import SystemRuns, without_run

MARK = {"measured": "-o", "modelled": "--"}
SIZE = (9.0, 4.6)


def draw(found: Report, folder: Path, runs: dict[str, SystemRuns]) -> list[str]:
    """Write all plots that there is data for; their file names."""
    written = []
    for name, make in (
        ("scaling_weak.png", _weak),
        ("scaling_breakdown.png", _breakdown),
        ("scaling_bytes.png", _bytes),
    ):
        figure = make(found.lines)
        if figure is not None:
            figure.savefig(folder / name, dpi=110, bbox_inches="tight")
            plt.close(figure)
            written.append(name)
    return written + _maps(folder, runs)


def _colour(system: str, lines: Sequence[Line]) -> str:
    names = sorted({line.system for line in lines})
    return f"C{names.index(system) % 10}"


def _weak(lines: Sequence[Line]) -> plt.Figure | None:
    """Times over the number of ranks: one panel a variant and direction, measured and modelled."""
    chosen = [n for n in lines if n.mode == "weak" and n.placement == "barrier"]
    panels = list(dict.fromkeys((n.variant, n.direction, n.where) for n in chosen))[:6]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 4.0 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (variant, direction, where) in zip(axes.flat, panels, strict=False):
        here = [
            n for n in chosen if (n.variant, n.direction, n.where) == (variant, direction, where)
        ]
        largest = max(n.state_bytes for n in here)
        here = [n for n in here if n.state_bytes == largest]
        for system in dict.fromkeys(n.system for n in here):
            own = sorted((n for n in here if n.system == system), key=lambda n: n.P)
            axis.plot(
                [n.P for n in own],
                [n.ms for n in own],
                MARK[own[0].kind],
                color=_colour(system, lines),
                label=system,
            )
        kind = here[0].kind
        axis.set_title(f"{variant} {direction}, {where} ({kind})", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("ranks")
        axis.set_ylabel("ms")
        axis.legend(fontsize=6)
    return figure


def _breakdown(lines: Sequence[Line]) -> plt.Figure | None:
    """Local work, exposed and hidden exchange by system, of measured forward passes."""
    chosen = [
        n
        for n in lines
        if n.kind == "measured" and n.placement == "barrier" and n.direction == "fwd"
    ]
    chosen = [n for n in chosen if n.exposed_ms is not None]
    if not chosen:
        return None
    most = max(chosen, key=lambda n: (n.P, n.state_bytes)).group
    here = [n for n in chosen if n.group == most]
    figure, axis = plt.subplots(figsize=SIZE)
    names = [n.system for n in here]
    floor = [n.floor_ms or 0.0 for n in here]
    exposed = [n.exposed_ms or 0.0 for n in here]
    hidden = [-(n.hidden_ms or 0.0) for n in here]
    axis.bar(names, floor, color="0.75", label="local work (ideal_same_plan)")
    axis.bar(names, exposed, bottom=floor, color="C3", label="exposed")
    axis.bar(names, hidden, color="C2", label="hidden exchange (below zero)")
    first = here[0]
    axis.set_title(
        f"{first.variant} forward, P = {first.P}, {first.T} tokens a rank, {first.where} (measured)"
    )
    axis.set_ylabel("ms")
    axis.tick_params(axis="x", rotation=30)
    axis.legend(fontsize=7)
    return figure


def _bytes(lines: Sequence[Line]) -> plt.Figure | None:
    """Bytes received by the rank that receives most, counted."""
    chosen = [n for n in lines if n.received_bytes and n.direction == "fwd"]
    if not chosen:
        return None
    largest = max(n.state_bytes for n in chosen)
    chosen = [n for n in chosen if n.state_bytes == largest]
    variants = list(dict.fromkeys(n.variant for n in chosen))[:3]
    figure, axes = plt.subplots(1, len(variants), figsize=(5.2 * len(variants), 4.0), squeeze=False)
    for axis, variant in zip(axes.flat, variants, strict=True):
        here = [n for n in chosen if n.variant == variant]
        for system in dict.fromkeys(n.system for n in here):
            own = {n.P: (n.received_bytes or 0) / 2**20 for n in here if n.system == system}
            ranks = sorted(own)
            axis.plot(
                ranks, [own[p] for p in ranks], "-o", label=system, color=_colour(system, lines)
            )
        axis.set_title(f"{variant} forward (measured)", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("ranks")
        axis.set_ylabel("MiB received by a rank")
        axis.legend(fontsize=6)
    return figure


def _maps(folder: Path, runs: dict[str, SystemRuns]) -> list[str]:
    """The quickest system over ranks and state sizes, where the model may be asked; a star at what
    no measured run stands behind."""
    try:
        require_validation(folder)
    except ModelProblem:
        return []
    written = []
    for cluster in PRESETS.values():
        figure, axes = plt.subplots(1, 2, figsize=(11.0, 4.2))
        for axis, dense in zip(axes, (False, True), strict=True):
            names, best = strategy_map(cluster, dense)
            unrun = without_run((names[place] for row in best for place in row), runs)
            axis.imshow(best, aspect="auto", origin="lower", cmap="tab10", vmin=0, vmax=9)
            axis.set_xticks(range(len(MAP_RANKS)), [str(p) for p in MAP_RANKS])
            axis.set_yticks(range(len(MAP_STATES)), [f"{s / 2**20:g}" for s in MAP_STATES])
            for y, row in enumerate(best):
                for x, place in enumerate(row):
                    star = "*" if names[place] in unrun else ""
                    text = names[place].replace("_", "\n", 1) + star
                    axis.text(x, y, text, ha="center", va="center", fontsize=5)
            axis.set_xlabel("ranks")
            axis.set_ylabel("state MiB")
            kind = "dense M" if dense else "diagonal M"
            mark = "; *: no measured run" if unrun else ""
            axis.set_title(f"{cluster.name}, {kind} (modelled{mark})", fontsize=9)
        name = f"scaling_map_{cluster.name}.png"
        figure.savefig(folder / name, dpi=110, bbox_inches="tight")
        plt.close(figure)
        written.append(name)
    return written
