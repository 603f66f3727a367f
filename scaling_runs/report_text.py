"""The Markdown page of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaling_runs.model.maps import CANDIDATES
from scaling_runs.model.programs import PROGRAMS
from scaling_runs.report_cluster import cluster_section, measured_losses
from scaling_runs.report_data import Line, Report
from scaling_runs.report_runs import SystemRuns, commit_words, runs_table, unrun_words

PUBLISHED = """\
## Published points

FlexLA's, weak scaling at B = 4, H = 32, D = 128, 32K tokens a GPU, H20 with 400 Gb/s InfiniBand,
4 GPUs to 128. Its tables could not be read by us; these are the end points that are quoted from it.

| | 4 GPUs | 128 GPUs | a hop |
|---|---|---|---|
| FlexLA, gated delta rule | 12.2 ms | 14.5 ms | 18.5 us |
| LASP2, gated delta rule | 13.2 ms | 345.3 ms | 2.7 ms |
| LASP2 above FlexLA, scalar GLA | | 4.3 ms | |

345 ms cannot be wire time: an all-gather of all elements and a fused merge take 8 to 9 ms by the
links' bandwidths. Both a local recurrence inside the chain and a nested prefix with every product
formed anew would explain it, so that we measure both (`lasp`, `lasp2_naive`) beside the strong form
(`lasp2`).
"""

HOW = """\
## How to read it

Times are medians over calls, of the slowest rank in each. `barrier`: the ranks meet before each
call, the worst case for a chain; `stream`: calls in a row; `step`: a whole training step;
`exchange`: states alone. Exposed is the time above `ideal_same_plan`, our local work with nothing
sent; `ideal_best` are independent shards without summaries. `scaling_runs/baselines/README.md`
describes the systems. Numbers in *italics* and dashed lines are modelled, not measured.
"""


def page(
    found: Report,
    plots: Sequence[str],
    checked: Mapping[str, Any] | None,
    runs: Mapping[str, SystemRuns],
) -> str:
    """The whole page."""
    known = dict(runs)
    parts = ["# Scaling\n", HOW, f"{commit_words(found.measured())}\n", runs_table(known)]
    maps = [plot for plot in plots if plot.startswith("scaling_map")]
    for plot in plots:
        name = plot.removesuffix(".png").replace("_", " ")
        parts.append(f"![{name}]({plot})\n")
        if maps and plot == maps[-1]:
            text = (
                "Every cell of a map is modelled, none is measured: exchanges alone, no local work "
            )
            text += f"beside them that could hide them. {unrun_words(CANDIDATES, known)}"
            parts.append(f"{text.strip()}\n")
    parts.append(cluster_section(found.modelled()))
    for title, lines in (("Measured", found.measured()), ("Modelled", found.modelled())):
        if lines:
            parts.append(f"## {title}\n")
            if title == "Measured":
                parts.append(measured_losses(lines))
            if title == "Modelled":
                words = unrun_words((line.system for line in lines), known)
                parts += [f"{words}\n"] if words else []
            parts += _tables(lines)
    parts.append(_model_words(checked, bool(found.modelled()), known))
    parts.append(PUBLISHED)
    return "\n".join(parts)


def _model_words(
    checked: Mapping[str, Any] | None, predicted: bool, runs: dict[str, SystemRuns]
) -> str:
    """Whether the model was compared with measurements."""
    if checked is None:
        return (
            "## The model\n\nNot yet compared with measurements, so nothing is predicted from it. "
            "`python -m scaling_runs.model --help` says how.\n"
        )
    lines = [
        f"## The model\n\nAgainst measurements on `{checked['host']}`: {checked['summary']}.\n"
    ]
    emulated = checked.get("emulated")
    said = "not measured" if emulated is None else emulated["summary"]
    lines.append(f"Against measurements on emulated hosts: {said}.\n")
    words = unrun_words(PROGRAMS, runs)
    lines += [f"{words}\n"] if words else []
    if not predicted:
        lines.append("No cluster was predicted from it.\n")
    lines += ["| row | measured ms | model ms | error |", "|---|---|---|---|"]
    for row in (*checked["rows"], *(emulated["rows"] if emulated else ())):
        if row["core_for_each_rank"]:
            lines.append(
                f"| {row['point']} | {row['measured_ms']:.2f} | *{row['modelled_ms']:.2f}* | "
                f"{row['error']:+.0%} |"
            )
    return "\n".join([*lines, ""])


def _tables(lines: Sequence[Line]) -> list[str]:
    """A table for each place, variant, shape, direction and placement: systems by ranks."""
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        shape = (line.B, line.H, line.K, line.V, line.dtype)
        amount = line.T if line.mode == "weak" else 0
        key = (line.where, line.variant, line.mode, line.placement, line.direction, shape, amount)
        groups.setdefault(key, []).append(line)
    return [_table(key, group) for key, group in groups.items()]


def _table(key: tuple, lines: Sequence[Line]) -> str:
    where, variant, mode, placement, direction, shape, amount = key
    B, H, K, V, dtype = shape
    tokens = f"{amount} tokens a rank" if amount else "the same total"
    title = (
        f"**{where}: {variant}, {direction}, {placement}**, {mode} scaling, {tokens}, B={B}, "
        f"H={H}, K={K}, V={V}, {dtype}, state {lines[0].state_bytes / 2**20:.2f} MiB; "
        f"{_commits(lines)}"
    )
    ranks = sorted({line.P for line in lines})
    rows = [title, "", f"| ms | {' | '.join(f'P = {p}' for p in ranks)} | received MiB |"]
    rows.append("|---" * (len(ranks) + 2) + "|")
    for system in dict.fromkeys(line.system for line in lines):
        by_rank = {line.P: line for line in lines if line.system == system}
        cells = [_cell(by_rank.get(p)) for p in ranks]
        last = by_rank[max(by_rank)]
        received = "" if last.received_bytes is None else f"{last.received_bytes / 2**20:.2f}"
        rows.append(f"| `{system}` | {' | '.join(cells)} | {received} |")
    return "\n".join([*rows, ""])


def _commits(lines: Sequence[Line]) -> str:
    dates = sorted({f"{line.date}, {line.commit}" for line in lines})
    words = "; ".join(dates)
    parts = sorted({line.kernels_of for line in lines if line.kernels_of})
    words += f"; local parts of {', '.join(parts)}" if parts else ""
    if any(line.kind == "measured" and line.commit.endswith("+") for line in lines):
        words += " (+: changes that were not committed)"
    return words


def _cell(line: Line | None) -> str:
    if line is None:
        return ""
    if line.kind == "modelled":
        return f"*{line.ms:.2f}*"
    spread = "" if line.p20_ms is None else f" ({line.p20_ms:.2f} to {line.p80_ms:.2f})"
    return f"{line.ms:.2f}{spread}"
