"""What a rank does on an emulated host: measure links, check systems, time them.

    python scaling_runs/namespaces.py --hosts 4        starts it; it is of no use alone

Local parts last as long as they are told, and pauses need no core: so ranks of several hosts run
on one machine as if each had a core, and what is measured is the order of each program, its waits
and its messages over the emulated network. Links are measured in the same way before.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flexla_dist.comm import apply, combine, nodes_of_ids, zero_state
from flexla_dist.train.config import TrainConfig
from flexla_dist.train.launch import Ranks, start
from scaling_runs.baselines import SYSTEMS, Settings
from scaling_runs.emulated.probe import reached
from scaling_runs.emulated.shape import Shape
from scaling_runs.machine import RESULTS
from scaling_runs.model.calibrate import Links, link_columns
from scaling_runs.model.emulated import (
    LINK_COLUMNS,
    ROW_COLUMNS,
    TABLE,
    EmulatedRows,
    compare_emulated,
    emulated_table,
    judge_emulated,
    parts_text,
)
from scaling_runs.model.paced import VARIANT, PacedCall, paced_systems
from scaling_runs.model.programs import PROGRAMS
from scaling_runs.model.workload import Kernels
from scaling_runs.rows import format_table
from scaling_runs.weak_cases import Setup, check_system, compiled, example_element
from scaling_runs.weak_grid import Point
from scaling_runs.weak_rows import describe_run, measured_times

CPU = torch.device("cpu")
PARTS = Kernels(0.010, 0.020, 0.015, 0.030, 0.0, 0.0)
REACHED = 0.85
SYSTEMS_OF_MODEL = tuple(name for name in PROGRAMS if name in SYSTEMS)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scaling_runs.emulated.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rate", type=float, required=True, help="bits a second of a host's port, for the rows")
    add("--latency-us", type=float, required=True, help="added between hosts, for the rows")
    add("--delay", choices=("netem", "relay"), required=True, help="what adds it, for the rows")
    add("--systems", default=",".join(SYSTEMS_OF_MODEL), help="comma-separated")
    add("--heads", type=int, default=32, help="a head has 64 x 64 numbers of state")
    add("--width", type=int, default=64, help="K = V")
    add("--tokens", type=int, default=64, help="of a rank")
    add("--seconds", type=float, default=1.0, help="of timed calls of a system and direction")
    add("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    add("--commit", help="commit to note where there is no git history")
    options = parser.parse_args(words)
    unknown = [name for name in options.systems.split(",") if name not in SYSTEMS_OF_MODEL]
    if unknown:
        known = ", ".join(SYSTEMS_OF_MODEL)
        parser.error(f"--systems: {', '.join(unknown)} is not among {known}")
    return options


class Measurement:
    """One rank's part."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        names: list[Any] = [None] * ranks.world
        dist.all_gather_object(names, socket.gethostname())
        self.nodes = nodes_of_ids(names)
        each = int(os.environ["LOCAL_WORLD_SIZE"])
        self.shape = Shape(self.nodes[-1] + 1, each, options.rate, 1e-6 * options.latency_us)
        if self.shape.world != ranks.world:
            raise SystemExit(
                f"{ranks.world} ranks are on hosts {names}; expected {each} of each in a row"
            )
        self.load = os.getloadavg()[0]
        self.run = describe_run("namespaces", self.nodes, "", options.commit)
        self.groups = {
            "inside": dist.new_group(list(range(each))),
            "between": dist.new_group(list(range(0, ranks.world, each))),
        }

    def measure(self) -> list[dict[str, str]]:
        """Links, then all systems both ways; the rows on rank 0, elsewhere none."""
        store = None
        if self.ranks.rank == 0:
            store = EmulatedRows.of(self.options.results, self.run.machine.slug)
        for where, group in self.groups.items():
            self._links(where, group, store)
        call = self._call()
        names = self._names()
        errors = {name: self._checked(name, call) for name in names}
        rows = []
        for direction in ("fwd", "fwdbwd"):
            for name in names:
                times = paced_systems([name], self.options.seconds, call, direction)[name]
                if store is None:
                    continue
                row = self._shared(ROW_COLUMNS) | {"system": name, "direction": direction}
                row |= {"P": call.ranks, "T": call.tokens, "H": call.heads, "K": call.width}
                row |= {"parts_ms": parts_text(call.kernels), "rel_err": errors[name]}
                rows.append(store.systems.put(row | measured_times(times)))
                print(f"{name} {direction}: {times.median_ms:.2f} ms", flush=True)
        return rows

    def _names(self) -> list[str]:
        """The systems; hierarchical only where it is not the chain itself."""
        wanted = self.options.systems.split(",")
        return [n for n in wanted if n != "hierarchical" or self.shape.ranks > 1]

    def _links(self, where: str, group: Any, store: EmulatedRows | None) -> None:
        """Alpha and bandwidth of every kind of message in a group, if this rank is in it."""
        takes_part = dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1
        if takes_part:
            found = Links(CPU, self.options.seconds / 4, group).measure()
            for kind, times in found.items():
                if store is None:
                    continue
                row = self._shared(LINK_COLUMNS) | {"where": where, "link": kind}
                # Steps of gloo's ring wait for each other: their times are no straight line.
                some = (where, kind) == ("between", "gather")
                kept = store.links.put(row | link_columns(times, some))
                numbers = f"{kept['alpha_us']} us + n / {kept['gigabytes']} GB/s"
                print(f"{where} {kind}: {numbers}", flush=True)
        dist.barrier()

    def _call(self) -> PacedCall:
        """The call, with the seconds that its element takes to apply and compose on rank 0."""
        o = self.options
        call = PacedCall(self.ranks.world, o.heads, o.tokens, o.width, PARTS)
        element = example_element(compiled(VARIANT), call.inputs(0))
        state = zero_state(element)
        times = [_median(lambda: apply(element, state)), _median(lambda: combine(element, element))]
        found = torch.tensor(times, dtype=torch.float64)
        dist.broadcast(found, src=0)
        own = dict(zip(("apply", "combine"), found.tolist(), strict=True))
        return replace(call, kernels=replace(PARTS, **own))

    def _checked(self, name: str, call: PacedCall) -> str:
        """Largest error of outputs and gradients of a system against the unsharded operator."""
        point = Point(
            name, VARIANT, "weak", "barrier", "fwdbwd", call.ranks, call.tokens,
            call.ranks * call.tokens, 1, call.heads, call.width, call.width, "float32",
        )  # fmt: skip
        setup = Setup(dist.group.WORLD, CPU, Settings(timeout=60.0), self.nodes)
        error = check_system(point, setup)
        return "" if error is None else f"{error:.2e}"

    def _shared(self, columns: Sequence[str]) -> dict[str, object]:
        shape, own = self.shape, self.run.columns(self.ranks.world)
        row: dict[str, object] = {n: value for n, value in own.items() if n in columns}
        return row | {
            "load": f"{self.load:.2f}",
            "delay": self.options.delay,
            "hosts": shape.hosts,
            "ranks_per_host": shape.ranks,
            "rate_mbit": f"{shape.rate / 1e6:g}",
            "latency_us": f"{1e6 * shape.latency:g}",
        }

    def compare(self, rows: Sequence[Mapping[str, str]]) -> bool:
        """Print the rows beside the model; whether it passed."""
        store = EmulatedRows.of(self.options.results, self.run.machine.slug)
        found = compare_emulated(rows, store.links.rows())
        print(f"\n{format_table(emulated_table(found, self.run.cores), TABLE)}\n")
        verdict = judge_emulated(found, self.run.cores)
        for line in verdict.wrong_pairs:
            print("order differs:", line)
        print(f"{self.shape.words()}, by {self.options.delay}: {verdict.summary()}", flush=True)
        return verdict.passed


def _median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(25):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main(words: Sequence[str] | None = None) -> int:
    """Measure; 1 where the model does not fit, 2 where the network does not keep its rate."""
    options = parse(words)
    torch.set_num_threads(1)
    ranks = start(TrainConfig(threads=1, device="cpu"))
    measurement = Measurement(options, ranks)
    share = reached(measurement.shape, ranks.rank)
    if share < REACHED:
        if ranks.rank == 0:
            print(
                f"the emulated network gives {share:.0%} of its rate when all hosts send at once, "
                f"expected at least {REACHED:.0%}: nothing is measured. This machine is too busy "
                "or too slow for it; give a lower --rate, or fewer hosts",
                file=sys.stderr,
            )
        dist.barrier()
        dist.destroy_process_group()
        return 2
    if ranks.rank == 0:
        print(f"all hosts at once reach {share:.0%} of the rate", flush=True)
    rows = measurement.measure()
    passed = ranks.rank != 0 or measurement.compare(rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
