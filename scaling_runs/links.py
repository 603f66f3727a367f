#!/usr/bin/env python3
"""Measures links and host strategies of a group of ranks, and compares them with the predictions.

    torchrun --standalone --nproc_per_node=2 scaling_runs/links.py
    torchrun --standalone --nproc_per_node=4 scaling_runs/links.py --node-size 2 --repeats 15

alpha and beta are measured anew, then every strategy for each size of state and kind of M; the time
of a scan is half of that of a forward and a backward scan in a row. Rows go to
scaling_runs/results/host_scans_<gpu>.csv; a newer run replaces the rows of the same key. Up to as
many ranks as cores a prediction shall be within 25 percent of the median; beyond, the order of the
strategies shall be right (--check: exit status 1 where it is not). Run it on a quiet machine: the
load before the run is a column.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from flexla_dist.comm import Payload, StateExchanger
from flexla_dist.comm.chooser.choose import Choice
from flexla_dist.comm.chooser.report import link_line, rates_line, section
from flexla_dist.comm.chooser.survey import Survey
from scaling_runs.link_times import HEAD, ScanCase, ScanTime, time_scans
from scaling_runs.machine import RESULTS, Machine, describe_machine
from scaling_runs.rows import RowStore, format_table

COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "cores", "load", "carrier", "link", "alpha_us"),
    *("gb_per_s", "ranks", "node_size", "kind", "state_mib", "strategy"),
    *("predicted_ms", "median_ms", "p20_ms", "p80_ms", "ratio"),
)
KEY = ("gpu", "carrier", "link", "ranks", "node_size", "kind", "state_mib", "strategy")
SHOWN = COLUMNS[13:]
SIZES = (0.5, 2.0, 8.0)
KINDS = ("scalar", "dense")
WITHIN = 0.25
CLEAR = 1.5  # medians nearer than this have no order


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node-size", type=int, help="ranks that count as a node")
    parser.add_argument("--repeats", type=int, default=40, help="scans of each kind, default 40")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of M, comma-separated")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    parser.add_argument("--check", action="store_true", help="fail where a prediction is wrong")
    args = parser.parse_args(words)
    unknown = set(args.kinds.split(",")) - {"none", "scalar", "rows", "full", "dense"}
    if unknown:
        parser.error(f"--kinds: {', '.join(sorted(unknown))} is no kind of M")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, expected at least 1")
    return args


def cases_of(ranks: int, node_size: int, kinds: Sequence[str]) -> list[ScanCase]:
    """Sizes x kinds x strategies; hierarchical only where nodes have an inside and an outside."""
    strategies = ["chain", "log_scan", "all_gather"]
    if 1 < node_size < ranks:
        strategies.append("hierarchical")
    return [ScanCase(size, k, s, node_size) for size in SIZES for k in kinds for s in strategies]


def predicted(survey: Survey, case: ScanCase) -> Choice:
    """The prediction of the strategy of a case."""
    payload = Payload.of_heads(case.kind, case.heads, HEAD, HEAD)
    return survey.choose(payload, case.strategy)


def rows_of(
    machine: Machine, survey: Survey, load: float, cases: Sequence[ScanCase], times: list[ScanTime]
) -> list[dict[str, object]]:
    """One row a case."""
    place = survey.topology
    name = place.classes[-1]
    link = survey.links[name]
    found: list[dict[str, object]] = []
    for case, time in zip(cases, times, strict=True):
        seconds = predicted(survey, case).seconds
        found.append(
            machine.columns()
            | {"cores": place.cores, "load": load, "carrier": survey.carrier, "link": name}
            | {"alpha_us": link.alpha * 1e6, "gb_per_s": 1e-9 / link.beta, "ranks": place.size}
            | {"node_size": case.node_size, "kind": case.kind, "state_mib": case.state_mib}
            | {"strategy": case.strategy, "predicted_ms": seconds * 1e3, **vars(time)}
            | {"ratio": seconds * 1e3 / time.median_ms}
        )
    return found


def problems(rows: Sequence[Mapping[str, object]], within_cores: bool) -> list[str]:
    """What the predictions have wrong: numbers up to the number of cores, beyond it the order."""
    if within_cores:
        return [
            f"{_name(row)}: predicted {row['predicted_ms']:.3g} ms, median {row['median_ms']:.3g}"
            for row in rows
            if not 1 - WITHIN <= float(str(row["ratio"])) <= 1 + WITHIN
        ]
    found = []
    for a, b in combinations(rows, 2):
        if (a["kind"], a["state_mib"]) != (b["kind"], b["state_mib"]):
            continue
        fast, slow = sorted((a, b), key=lambda row: float(str(row["median_ms"])))
        clear = float(str(slow["median_ms"])) > CLEAR * float(str(fast["median_ms"]))
        if clear and float(str(slow["predicted_ms"])) < float(str(fast["predicted_ms"])):
            found.append(f"{_name(fast)} is predicted slower than {slow['strategy']}")
    return found


def _name(row: Mapping[str, object]) -> str:
    return f"{row['kind']}, {row['state_mib']} MiB, {row['strategy']}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write, print; rank 0 writes and prints."""
    args = parse(words)
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        print("links.py measures between ranks: start it with torchrun", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    exchanger = StateExchanger(None, node_size=args.node_size)
    survey = exchanger.survey(device, fresh=True)
    runs = survey.topology.longest
    cases = cases_of(exchanger.size, runs, args.kinds.split(","))
    times = time_scans(exchanger, cases, args.repeats, device)
    wrong: list[str] = []
    if exchanger.rank == 0:
        machine = describe_machine(args.commit)
        wrong = write_and_print(args.results, machine, survey, load, cases, times)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong and args.check else 0


def write_and_print(
    folder: Path,
    machine: Machine,
    survey: Survey,
    load: float,
    cases: Sequence[ScanCase],
    times: list[ScanTime],
) -> list[str]:
    """Keep the rows, print links, table and what is wrong."""
    store = RowStore(folder / f"host_scans_{machine.slug}.csv", COLUMNS, KEY)
    rows = rows_of(machine, survey, load, cases, times)
    kept = [store.put(row) for row in rows]
    links = [link_line(survey.carrier, name, link) for name, link in survey.links.items()]
    print(section("Links", [*links, rates_line(survey.rates)]))
    print(f"\n{format_table(kept, SHOWN)}\n")
    within_cores = survey.topology.size <= survey.topology.cores
    wrong = problems(rows, within_cores)
    bound = "within 25 percent" if within_cores else "in the order of the medians"
    print("\n".join(wrong) if wrong else f"all predictions are {bound}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
