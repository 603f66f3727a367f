"""Plots of the report; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.patches import Patch

from scaling_runs.model.clusters import PRESETS, ModelProblem
from scaling_runs.model.maps import MAP_RANKS, MAP_STATES, strategy_map
from scaling_runs.model.validate import require_validation
from scaling_runs.report_cluster import CLUSTER, OTHERS, PAPER, RANKS
from scaling_runs.report_data import Line, Report
from scaling_runs.report_runs import SystemRuns, without_run

PLAIN, ABOVE, RATIO = "ms", "ms above ideal_same_plan", "time over that of ideal_same_plan"
COLOURS = {
    "fused_hierarchical": "C0",
    "fused_chain": "C9",
    "hierarchical": "navy",
    "chain": "C2",
    "log_scan": "C4",
    "all_gather": "C6",
    "lasp": "C3",
    "lasp2": "C1",
    "lasp2_naive": "C5",
    "zeco": "C8",
    "ulysses": "black",
    "fla_cp": "C7",
}


def draw(found: Report, folder: Path, runs: dict[str, SystemRuns]) -> list[str]:
    """Write all plots that there is data for; their file names."""
    written = []
    for name, make in (
        ("scaling_weak.png", _weak_modelled),
        ("scaling_weak_measured.png", _weak_measured),
        ("scaling_breakdown.png", _breakdown),
        ("scaling_bytes.png", _bytes),
    ):
        figure = make(found.lines)
        if figure is not None:
            figure.savefig(folder / name, dpi=110, bbox_inches="tight")
            plt.close(figure)
            written.append(name)
    return written + _maps(folder, runs)


def _style(system: str, kind: str) -> dict[str, Any]:
    """The same in every plot: ours round or diamonds, others crosses, floors without marks."""
    shown = "--" if kind == "modelled" else "-"
    if system.startswith("ideal"):
        return {"color": "0.2", "linestyle": ":" if system == "ideal_best" else shown}
    mark = "D" if system.startswith("fused") else "x" if system in OTHERS else "o"
    return {"color": COLOURS.get(system, "0.6"), "linestyle": shown, "marker": mark}


def _legend_beside(figure: plt.Figure, labels: dict[str, Artist], size: int) -> None:
    """One legend for all panels, to their right."""
    figure.legend(
        list(labels.values()),
        list(labels),
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        fontsize=size,
    )


def _rank_axis(axis: plt.Axes, ranks: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(p) for p in ranks])
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel("ranks")
    axis.grid(alpha=0.3)


def _time_axis(axis: plt.Axes, label: str) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.set_ylabel(label)


def _value(line: Line, what: str) -> float | None:
    if what == ABOVE:
        return line.exposed_ms
    if what == RATIO:
        return line.ms / line.floor_ms if line.floor_ms else None
    return line.ms


def _times(axis: plt.Axes, here: Sequence[Line], what: str, labels: dict[str, Artist]) -> None:
    """All systems over ranks: times, what of them is above ideal_same_plan, or times over it."""
    for system in sorted({n.system for n in here}):
        own = sorted((n for n in here if n.system == system), key=lambda n: n.P)
        points = [(n.P, value) for n in own if (value := _value(n, what))]
        if points:
            style: dict[str, Any] = {
                "markersize": 4,
                "linewidth": 1.2,
                **_style(system, own[0].kind),
            }
            [drawn] = axis.plot(*zip(*points, strict=True), **style)
            labels.setdefault(system, drawn)
    first = here[0]
    axis.set_title(f"{first.variant} {first.direction} ({first.kind})", fontsize=10)
    _rank_axis(axis, sorted({n.P for n in here}))
    if what == RATIO:
        axis.set_ylabel(what)
    else:
        _time_axis(axis, what)


def _panels(
    lines: Sequence[Line], title: str, columns: Sequence[tuple[str, str]]
) -> plt.Figure | None:
    """A row for each variant; columns: direction and what is drawn of it."""
    variants = sorted({n.variant for n in lines}, reverse=True)
    if not variants:
        return None
    wide, high = len(columns), len(variants)
    figure, axes = plt.subplots(high, wide, figsize=(4.8 * wide, 4.2 * high), squeeze=False)
    labels: dict[str, Artist] = {}
    for row, variant in zip(axes, variants, strict=True):
        for axis, (direction, what) in zip(row, columns, strict=True):
            here = [n for n in lines if (n.variant, n.direction) == (variant, direction)]
            if not here:
                axis.remove()
                continue
            _times(axis, here, what, labels)
            if here[0].where == CLUSTER and what == PLAIN:
                _published(axis, variant, labels)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    _legend_beside(figure, labels, 9)
    return figure


def _published(axis: plt.Axes, variant: str, labels: dict[str, Artist]) -> None:
    for (system, of, points), mark in zip(PAPER, ("*", "P"), strict=True):
        if of == variant:
            [drawn] = axis.plot(*zip(*points.items(), strict=True), f"k{mark}", markersize=8)
            labels[f"{system}, published"] = drawn


def _weak_modelled(lines: Sequence[Line]) -> plt.Figure | None:
    """Modelled times on the published cluster, with its points."""
    here = [n for n in lines if n.kind == "modelled" and n.where == CLUSTER]
    title = f"Modelled, not measured: {CLUSTER}, 32768 tokens a GPU, B=4, H=32, K=V=128, bf16"
    return _panels(here, title, (("fwd", PLAIN), ("fwd", ABOVE), ("fwdbwd", ABOVE)))


def _weak_measured(lines: Sequence[Line]) -> plt.Figure | None:
    """Measured times of the state size that was run on most numbers of ranks."""
    chosen = [n for n in lines if (n.kind, n.mode, n.placement) == ("measured", "weak", "barrier")]
    sizes: dict[tuple, set[int]] = {}
    for line in chosen:
        sizes.setdefault((line.where, line.state_bytes), set()).add(line.P)
    if not sizes:
        return None
    where, size = max(sizes, key=lambda key: (len(sizes[key]), key[1] <= 2 << 20, key[1]))
    here = [n for n in chosen if (n.where, n.state_bytes) == (where, size)]
    title = f"Measured: {where}, {here[0].T} tokens a rank, state {size / 2**20:g} MiB, "
    title += f"{here[0].dtype}; more ranks than cores share them"
    return _panels(here, title, (("fwd", PLAIN), ("fwd", RATIO), ("fwdbwd", RATIO)))


def _breakdown(lines: Sequence[Line]) -> plt.Figure | None:
    """Local work, exposed and hidden exchange by system, of forward passes: the measured ones on
    most ranks, and the modelled ones of the published cluster."""
    chosen = [n for n in lines if n.placement == "barrier" and n.direction == "fwd"]
    chosen = [n for n in chosen if n.exposed_ms is not None]
    groups = []
    measured = [n for n in chosen if n.kind == "measured"]
    if measured:
        groups.append(max(measured, key=lambda n: (n.P, n.state_bytes)).group)
    modelled = [n for n in chosen if (n.where, n.P) == (CLUSTER, RANKS)]
    groups += sorted({n.group for n in modelled})
    if not groups:
        return None
    figure, axes = plt.subplots(1, len(groups), figsize=(5.2 * len(groups), 4.6), squeeze=False)
    for axis, group in zip(axes.flat, groups, strict=True):
        _bars(axis, [n for n in chosen if n.group == group])
    axes.flat[0].legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    return figure


def _bars(axis: plt.Axes, here: Sequence[Line]) -> None:
    here = sorted(here, key=lambda n: n.ms)
    places = range(len(here))
    floor = [n.floor_ms or 0.0 for n in here]
    exposed = [n.exposed_ms or 0.0 for n in here]
    hidden = [-(n.hidden_ms or 0.0) for n in here]
    axis.bar(places, floor, color="0.75", label="local work (ideal_same_plan)")
    axis.bar(places, exposed, bottom=floor, color="C3", label="exposed exchange")
    axis.bar(places, hidden, color="C2", label="hidden exchange (below zero)")
    top = 2.5 * max(floor)
    for place, line in zip(places, here, strict=True):
        if line.ms > top:
            axis.text(place, 0.97 * top, f"{line.ms:.0f} ms", rotation=90, ha="center", va="top")
    axis.set_ylim(1.1 * min(hidden), min(top, 1.15 * max(n.ms for n in here)))
    axis.axhline(0.0, color="k", linewidth=0.8)
    axis.set_xticks(places, [n.system for n in here], rotation=45, ha="right", fontsize=8)
    first = here[0]
    size = f"state {first.state_bytes / 2**20:g} MiB"
    axis.set_title(
        f"{first.variant} forward, P = {first.P}, {first.T} tokens a rank,\n{size}, "
        f"{first.where} ({first.kind})",
        fontsize=10,
    )
    axis.set_ylabel("ms")


def _bytes(lines: Sequence[Line]) -> plt.Figure | None:
    """Bytes received by the rank that receives most, counted, in units of a state; of the largest
    state that was run on as many ranks (ulysses sends tokens)."""
    chosen = [n for n in lines if n.received_bytes and n.direction == "fwd"]
    variants = sorted({n.variant for n in chosen}, reverse=True)[:3]
    if not variants:
        return None
    figure, axes = plt.subplots(1, len(variants), figsize=(5.2 * len(variants), 4.0), squeeze=False)
    labels: dict[str, Artist] = {}
    for axis, variant in zip(axes.flat, variants, strict=True):
        here = [n for n in chosen if n.variant == variant]
        for number, system in enumerate(sorted({n.system for n in here})):
            own = {
                n.P: (n.received_bytes or 0) / n.state_bytes
                for n in sorted(here, key=lambda n: n.state_bytes)
                if n.system == system
            }
            ranks = sorted(own)
            values = [own[p] for p in ranks]
            beside = [p * (1 + 0.012 * number) for p in ranks]  # equal counts stay visible
            [drawn] = axis.plot(beside, values, **_style(system, "measured"))
            labels.setdefault(system, drawn)
        axis.set_title(f"{variant} forward (counted in runs)", fontsize=10)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_ylabel("received by a rank, in states")
        _rank_axis(axis, sorted({n.P for n in here}))
    figure.tight_layout()
    _legend_beside(figure, labels, 8)
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
        figure, axes = plt.subplots(1, 2, figsize=(11.0, 4.8))
        shown: dict[str, Artist] = {}
        for axis, dense in zip(axes, (False, True), strict=True):
            names, best = strategy_map(cluster, dense)
            unrun = without_run((names[place] for row in best for place in row), runs)
            colours = [[matplotlib.colors.to_rgb(COLOURS[names[n]]) for n in row] for row in best]
            axis.imshow(colours, aspect="auto", origin="lower", alpha=0.55)
            axis.set_xticks(range(len(MAP_RANKS)), [str(p) for p in MAP_RANKS])
            axis.set_yticks(range(len(MAP_STATES)), [f"{s / 2**20:g}" for s in MAP_STATES])
            for name in dict.fromkeys(names[n] for row in best for n in row):
                star = "*" if name in unrun else ""
                shown[name + star] = Patch(color=COLOURS[name], alpha=0.55)
            axis.set_xlabel("ranks")
            axis.set_ylabel("state MiB")
            kind = "dense M" if dense else "diagonal M"
            mark = "; *: no run of ranks with a device each" if unrun else ""
            axis.set_title(
                f"{cluster.name}, {kind}: quickest exchange\n(every cell modelled{mark})",
                fontsize=9,
            )
        figure.legend(list(shown.values()), list(shown), loc="lower center", ncols=4, fontsize=10)
        figure.subplots_adjust(bottom=0.2)
        name = f"scaling_map_{cluster.name}.png"
        figure.savefig(folder / name, dpi=110, bbox_inches="tight")
        plt.close(figure)
        written.append(name)
    return written
