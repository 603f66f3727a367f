"""The section on the published cluster: overheads, who loses, published points, assumptions.

Contract: all numbers are of modelled lines; without lines of the cluster the section is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaling_runs.model.clusters import get_cluster
from scaling_runs.model.gpu_rows import ASSUMPTIONS
from scaling_runs.report_data import Line

CLUSTER, RANKS, TARGET = "h20_ib", 128, 0.05
PLACES = (CLUSTER, f"{CLUSTER}_slow")
DEVICE = ("fused_hierarchical", "fused_chain")
HOST = ("chain", "log_scan", "hierarchical", "all_gather")
OTHERS = ("lasp", "lasp2", "lasp2_naive", "zeco", "ulysses")
# As quoted by others: (system, variant, {ranks: ms}); direction not said.
PAPER = (
    ("FlexLA", "gated_delta_rule", {4: 12.2, 128: 14.5}),
    ("LASP2", "gated_delta_rule", {4: 13.2, 128: 345.3}),
)
Times = dict[str, float]
Case = tuple[str, str, str]


def cases_of(lines: Sequence[Line], ranks: int) -> dict[Case, Times]:
    """{(variant, direction, place): {system: ms}} on that many ranks of the cluster."""
    found: dict[Case, Times] = {}
    for line in lines:
        if line.where in PLACES and ranks == line.P and line.kind == "modelled":
            found.setdefault((line.variant, line.direction, line.where), {})[line.system] = line.ms
    wanted = ("ideal_same_plan", "ideal_best", *DEVICE)
    return {case: times for case, times in found.items() if all(n in times for n in wanted)}


def cluster_section(lines: Sequence[Line]) -> str:
    """The whole section."""
    cases = cases_of(lines, RANKS)
    if not cases:
        return ""
    cluster = get_cluster(CLUSTER)
    kernels = sorted({line.kernels_of for line in lines if line.where in PLACES})
    parts = [
        f"## {RANKS} GPUs of the published cluster\n",
        f"Modelled, not measured: weak scaling on `{CLUSTER}`, local parts of "
        f"{'; '.join(kernels)}. "
        f"`{PLACES[0]}` has the quickest local parts that an H20 can have, `{PLACES[1]}` the "
        "slowest; the truth lies between. No run between nodes stands behind these numbers.\n",
        *_overheads(cases),
        *_losses(lines),
        *_published(lines),
        "Assumptions:\n",
        *(f"- {text}" for text in (*cluster.assumptions, *ASSUMPTIONS)),
        "\nSources:\n",
        *(f"- {text}" for text in cluster.sources),
        "",
    ]
    return "\n".join(parts)


def _overheads(cases: dict[Case, Times]) -> list[str]:
    rows = [
        "| call | local parts | ideal_best | ideal_same_plan | ours, hierarchical | ours, chain | "
        "over same plan | at most 5%? | over best | LASP2, strong |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (variant, direction, place), times in cases.items():
        ours, floor = times[DEVICE[0]], times["ideal_same_plan"]
        over = ours / floor - 1
        numbers = [times["ideal_best"], floor, ours, times[DEVICE[1]]]
        cells = [f"*{value:.2f}*" for value in numbers]
        cells += [f"*{over:+.1%}*", "yes" if over <= TARGET else "**no**"]
        cells += [f"*{ours / times['ideal_best'] - 1:+.1%}*", f"*{times['lasp2']:.2f}*"]
        rows.append(f"| {variant} {direction} | `{place}` | {' | '.join(cells)} |")
    return [
        *rows,
        "",
        "Milliseconds. Ours are the device engine's strategies (`fused_hierarchical`, "
        "`fused_chain`); nodes make the chooser take hierarchical. Over best is mostly what "
        "summaries cost, not the exchange: a rank alone needs none.\n",
    ]


def losses(cases: Sequence[tuple[int, Case, Times]], own: Sequence[str]) -> list[str]:
    """Where another system is quicker than the quickest of `own`, a line for each kind of call:
    the ranks, the systems, by how much at most."""
    found: dict[Case, list[tuple[int, str, float]]] = {}
    for ranks, case, times in cases:
        other = min((n for n in OTHERS if n in times), key=lambda name: times[name])
        best = min(times[n] for n in own if n in times)
        if times[other] < best:
            found.setdefault(case, []).append((ranks, other, best / times[other] - 1))
    lines = []
    for (variant, direction, place), lost in found.items():
        counts = ", ".join(str(ranks) for ranks, _, _ in lost)
        others = ", ".join(f"`{name}`" for name in dict.fromkeys(name for _, name, _ in lost))
        most = max(more for _, _, more in lost)
        lines.append(
            f"{variant} {direction}, `{place}`: P = {counts}, to {others}, by up to {most:.1%}"
        )
    return lines


def _losses(lines: Sequence[Line]) -> list[str]:
    ranks = sorted({line.P for line in lines if line.where in PLACES})
    cases = [(p, case, times) for p in ranks for case, times in cases_of(lines, p).items()]
    found = ["Where ours lose to the quickest other system, modelled:\n"]
    for words, own in (("device engine", DEVICE), ("host engine", HOST)):
        where = losses(cases, own)
        found.append(f"- {words}: " + ("nowhere" if not where else f"of {len(cases)} cases"))
        found += [f"  - {text}" for text in where]
    return [*found, ""]


def measured_losses(lines: Sequence[Line]) -> str:
    """Where ours lost in measured calls that began with a barrier; empty where nothing compares."""
    found: dict[tuple, Times] = {}
    for line in lines:
        if line.kind == "measured" and line.placement == "barrier":
            place = f"{line.where}, {line.mode}, state {line.state_bytes / 2**20:g} MiB"
            case = (line.variant, line.direction, place)
            found.setdefault((line.P, case), {})[line.system] = line.ms
    own = (*HOST, *(f"{name}_device" for name in HOST))
    cases = [
        (ranks, case, times)
        for (ranks, case), times in found.items()
        if any(n in times for n in own) and any(n in times for n in OTHERS)
    ]
    if not cases:
        return ""
    where = [f"- {text}" for text in losses(cases, own)] or ["- nowhere"]
    head = f"Where ours lost to the quickest other system, measured, of {len(cases)} cases:\n"
    return "\n".join([head, *where, ""])


def _published(lines: Sequence[Line]) -> list[str]:
    """Published points beside ours; what is comparable is the growth from 4 to 128 GPUs."""
    rows = ["| ms, gated delta rule | 4 GPUs | 128 GPUs | growth |", "|---|---|---|---|"]
    for system, _, points in PAPER:
        rows.append(
            f"| {system}, published | {points[4]} | {points[128]} | {points[128] - points[4]:.1f} |"
        )
    for place in PLACES:
        for system in (*DEVICE, "lasp2", "lasp2_naive", "lasp"):
            own = {
                line.P: line.ms
                for line in lines
                if (line.where, line.system, line.variant, line.direction)
                == (place, system, "gated_delta_rule", "fwd")
            }
            if 4 in own and RANKS in own:
                numbers = (own[4], own[RANKS], own[RANKS] - own[4])
                cells = " | ".join(f"*{value:.2f}*" for value in numbers)
                rows.append(f"| `{system}` fwd, modelled, `{place}` | {cells} |")
    return [*rows, ""]
