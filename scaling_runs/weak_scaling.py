#!/usr/bin/env python3
"""Weak and strong scaling of our strategies and the baselines, on any number of ranks.

    torchrun --standalone --nproc_per_node=2 scaling_runs/weak_scaling.py --config \\
        configs/weak_scaling/cpu.yaml
    ./launch/weak_scaling.sh --ranks 8 -- --config configs/weak_scaling/8_gpus.yaml
    sbatch --nodes=16 launch/weak_scaling.sbatch --config configs/weak_scaling/128_gpus.yaml
    mpirun -n 2 python scaling_runs/weak_scaling.py --launcher mpi --config ...

A grid is a YAML file and options over it. Every point is first compared with the unsharded operator
(outputs and gradients) and its bytes with the formula; a point that is wrong is not timed. Rows go
to scaling_runs/results/weak_scaling_<gpu>.csv after each point, so that a stopped run goes on where
it was. A point on P ranks runs on the first P of the world; the others wait.

placements: `barrier`, the ranks meet before each call; `stream`, calls in a row; `step`, inside a
training step; `exchange`, states alone. Times are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from flexla_dist.comm import nodes_of_ids, nodes_of_size
from flexla_dist.comm.links import host_name
from flexla_dist.testing.inputs import CallInputs
from flexla_dist.train.arguments import ArgumentProblem
from flexla_dist.train.config import MeshConfig, TrainConfig
from flexla_dist.train.launch import LAUNCHERS, Ranks, detect_launcher, start
from scaling_runs.baselines import Refused, Settings, Traffic, get_system
from scaling_runs.baselines.device import checked_once
from scaling_runs.machine import RESULTS
from scaling_runs.model.calibrate import PhaseTimes, measure_links
from scaling_runs.rows import format_table
from scaling_runs.weak_cases import Case, CheckFailed, Known, Setup, check_system, inputs_of
from scaling_runs.weak_grid import Grid, GridProblem, Point, add_options, read_grid
from scaling_runs.weak_rows import (
    Results,
    byte_columns,
    describe_run,
    measured_times,
    peak_mib,
)
from scaling_runs.weak_step import StepCase
from scaling_runs.weak_time import Clock, Times

SHOWN = (
    *("system", "variant", "mode", "placement", "direction", "P", "T", "B", "H"),
    *("median_ms", "p20_ms", "p80_ms", "received_bytes", "rel_err", "status"),
)

# Other people's code fails on all ranks alike, for example by refusing a version of Triton; it is
# noted, and the run goes on.
FOREIGN = ("fla_cp",)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="YAML file of the grid")
    add_options(parser)
    parser.add_argument("--launcher", choices=("auto", *LAUNCHERS), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--again", action="store_true", help="also measure what is done")
    parser.add_argument("--keep", action="store_true", help="rows of other commits count as done")
    parser.add_argument("--check-only", action="store_true", help="compare, time nothing")
    parser.add_argument("--list", action="store_true", help="show the points, start nothing")
    parser.add_argument("--time-limit", type=float, help="start no point after these seconds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    return parser.parse_args(words)


def grid_of(options: argparse.Namespace) -> Grid:
    """The grid that the options describe."""
    return read_grid(
        options.config, {item.name: getattr(options, item.name) for item in fields(Grid)}
    )


@dataclass
class Measured:
    """What is known of a point so far: its status, its samples, its other columns."""

    status: str = "ok"
    samples: list[float] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)

    def columns(self) -> dict[str, object]:
        """Columns of its row."""
        times = measured_times(Times.of(self.samples)) if self.samples else {}
        return {**times, **self.values}


class Program:
    """One rank's part in a run."""

    def __init__(self, grid: Grid, options: argparse.Namespace, ranks: Ranks) -> None:
        self.grid, self.options, self.ranks = grid, options, ranks
        self.begun = time.perf_counter()
        self.nodes = _nodes(ranks.world, grid.node_size)
        self.settings = Settings(grid.blocks, grid.panels, grid.node_size, grid.timeout)
        text = f"panels={grid.panels} blocks={grid.blocks} layers={grid.layers}"
        if grid.node_size is not None:
            text += f" node_size={grid.node_size}"
        launcher = options.launcher
        if launcher == "auto":
            launcher = detect_launcher(os.environ)
        self.provenance = describe_run(launcher, self.nodes, text, options.commit)
        limit = timedelta(seconds=max(3600.0, grid.timeout))
        sizes = sorted({n for n in grid.ranks if n < ranks.world})
        self.groups: dict[int, Any] = {
            n: dist.new_group(list(range(n)), timeout=limit) for n in sizes
        }
        self.groups[ranks.world] = dist.group.WORLD
        if grid.phases and 1 not in self.groups:
            self.groups[1] = dist.new_group([0], timeout=limit)
        self.phases = PhaseTimes(self.provenance, ranks.device, options.results)
        self.checked: dict[tuple, float | str | None] = {}
        self.known: Known = {}
        self._given: tuple[tuple, CallInputs] | None = None
        self.shown: list[dict[str, str]] = []

    def run(self) -> int:
        """Measure all pending points; the exit status."""
        results = None
        if self.ranks.rank == 0:
            results = Results(self.options.results, self.provenance)
        points = self._pending(results)
        if self.grid.phases and self.ranks.world > 1 and points:
            folder, seconds = self.options.results, self.grid.seconds
            measure_links(self.provenance, self.ranks.device, seconds, folder, self._say)
        done = failed = 0
        turns: Callable[[Point], tuple] = lambda point: point.group  # noqa: E731
        if self.grid.rounds == 1 and not self.grid.phases:
            turns = lambda point: tuple(vars(point).values())  # noqa: E731
        for _, group in groupby(points, key=turns):
            together = list(group)
            if self._out_of_time():
                self._say(f"time is over: {len(points) - done} points left")
                break
            found = self._measure_group(together, results)
            for point in together:
                done += 1
                failed += found[point].status == "failed"
                self._keep(point, found[point], results, f"[{done}/{len(points)}]")
        if results is not None:
            print(format_table(self.shown, SHOWN))
            print(f"\n{len(self.shown)} rows in {results.store.path}", flush=True)
        return int(failed > 0)

    def _measure_group(self, points: list[Point], results: Results | None) -> dict[Point, Measured]:
        """Points that differ in the system alone, which take turns."""
        found = {point: Measured() for point in points}
        first = points[0]
        takes_part = self.grid.phases and self.ranks.rank < first.P
        for number in range(self.grid.rounds):
            if takes_part:
                self._sample_phases(first)
            for point in points:
                if results is not None and number == 0:
                    results.put(point, "begun", {})
                if self.ranks.rank < point.P and found[point].status == "ok":
                    self._measure_or_note(point, found[point], results)
                self._everyone()
        if takes_part and results is not None:
            for ranks in {1, first.P}:
                self.phases.keep(replace(first, P=ranks))
        return found

    def _measure_or_note(self, point: Point, found: Measured, results: Results | None) -> None:
        """One round of a point; what ends the program is noted where this rank can."""
        try:
            self._measure(point, found)
        except Exception as why:
            if results is not None:
                results.put(point, "failed", {"note": short_text(why)})
            raise

    def _sample_phases(self, point: Point) -> None:
        """Local parts on all ranks of the point beside each other, and on the first alone."""
        seconds = self.grid.seconds
        self.phases.sample(point, self.groups[point.P], seconds)
        if self.ranks.rank == 0 and point.P > 1:
            self.phases.sample(replace(point, P=1), self.groups[1], seconds)
        Clock(self.groups[point.P], self.ranks.device).meet()

    def _keep(self, point: Point, found: Measured, results: Results | None, count: str) -> None:
        if results is None:
            return
        values = found.columns()
        self.shown.append(results.put(point, found.status, values))
        times = f"{values['median_ms']} ms" if "median_ms" in values else ""
        text = " ".join(filter(None, (times, str(values.get("note", "")))))
        self._say(f"{count} {point.words()}: {found.status} {text}")

    def _pending(self, results: Results | None) -> list[Point]:
        """The points to measure, the same on all ranks."""
        found: list[Any] = [None]
        if results is not None:
            fitting = [p for p in self.grid.points() if self.ranks.world >= p.P]
            left_out = sorted({n for n in self.grid.ranks if n > self.ranks.world})
            if left_out:
                self._say(f"{self.ranks.world} ranks run: points on {left_out} are left out")
            pending = results.pending(fitting, self.options.again, self.options.keep)
            self._say(f"{len(pending)} of {len(fitting)} points to measure")
            found = [pending]
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return found[0]

    def _measure(self, point: Point, found: Measured) -> None:
        """One round of a point, on a rank that takes part."""
        setup = Setup(self.groups[point.P], self.ranks.device, self.settings, self.nodes[: point.P])
        if get_system(point.system).note:
            found.values["note"] = get_system(point.system).note
        try:
            error = self._check(point, setup)
            found.values["rel_err"] = "" if error is None else f"{error:.2e}"
            if not self.options.check_only:
                self._time(point, setup, found)
        except Refused as why:
            found.status, found.values["note"] = "refused", str(why)
        except CheckFailed as why:
            found.status, found.values["note"] = "failed", str(why)
        except Exception as why:
            if point.system not in FOREIGN:
                raise
            found.status, found.values["note"] = "failed", short_text(why)

    def _check(self, point: Point, setup: Setup) -> float | None:
        """Compare a small call with the unsharded operator, once for each system and size."""
        key = (point.system, point.variant, point.P, point.H, point.K, point.V)
        if key not in self.checked:
            try:
                self.checked[key] = check_system(point, setup, self.known)
            except CheckFailed as why:
                self.checked[key] = str(why)
        found = self.checked[key]
        if isinstance(found, str):
            raise CheckFailed(found)
        return found

    def _time(self, point: Point, setup: Setup, found: Measured) -> None:
        """Samples of a point; its bytes at its first round."""
        clock, seconds = Clock(setup.group, setup.device), self.grid.seconds
        given = self._inputs(point, setup)
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)
        if point.placement == "step":
            call: Any = StepCase(point, setup, self.grid.layers)
        elif point.placement == "exchange":
            call = Case(point, setup, given).exchange()
        else:
            case = Case(point, setup, given)
            call = case.call()
            if not found.samples and case.system.engine != "device":
                counted, formula = case.traffic()
                received = self._same_bytes(point, clock, counted, formula)
                found.values |= byte_columns(counted, formula, received)
        streaming = point.placement == "stream"
        take = clock.stream_samples if streaming else clock.barrier_samples
        with self._checks(point, setup):
            found.samples += take(call, seconds)
        peak = peak_mib(setup.device)
        if peak is not None:
            found.values["peak_mib"] = f"{peak:.0f}"

    def _inputs(self, point: Point, setup: Setup) -> CallInputs | None:
        """The inputs of a call: kept for systems and directions that are timed one after another.
        Only before others memory is given back, as that takes long. None for training steps."""
        rank = self.ranks.rank
        key = tuple(vars(replace(point, system="", direction="")).values())
        if self._given is None or self._given[0] != key or point.placement == "step":
            self._given = None
            gc.collect()
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()
        if point.placement == "step":
            return None
        if self._given is None:
            self._given = (key, inputs_of(point, point.lengths[rank], setup.device, 1 + rank))
        return self._given[1]

    @staticmethod
    def _checks(point: Point, setup: Setup) -> AbstractContextManager[None]:
        """Calls of an operator alone leave the checks of their exchanges to the end."""
        system = get_system(point.system)
        engine = system.engine
        by_kernels = engine == "device" or (engine == "auto" and setup.device.type == "cuda")
        if point.placement == "step" or system.family != "ours":
            return nullcontext()
        return checked_once(setup.group, setup.device, by_kernels)

    def _same_bytes(
        self, point: Point, clock: Clock, found: Traffic, expected: Traffic | None
    ) -> int:
        """The most bytes that a rank receives. Raises CheckFailed on all ranks where the counted
        bytes of any rank are not those of the formula."""
        wrong = expected is not None and (found.sent, found.received) != (
            expected.sent,
            expected.received,
        )
        most, anywhere = clock.largest([float(found.received), float(wrong)])
        if anywhere:
            text = "" if expected is None else f", by formula {expected.sent}, {expected.received}"
            raise CheckFailed(
                f"{point.system}: bytes sent and received differ from the formula on some rank; on "
                f"rank {self.ranks.rank} counted {found.sent}, {found.received}{text}"
            )
        return int(most)

    def _out_of_time(self) -> bool:
        """Whether the time limit is over on the first rank."""
        limit = self.options.time_limit
        if limit is None:
            return False
        over = torch.tensor([float(time.perf_counter() - self.begun > limit)])
        dist.broadcast(over, src=0)
        return bool(over)

    def _everyone(self) -> None:
        """Wait for all ranks of the world, on the CPU."""
        dist.all_reduce(torch.zeros(1))

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)


def short_text(error: Exception) -> str:
    """An error in one line for a row."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _nodes(world: int, node_size: int | None) -> tuple[int, ...]:
    """Node number of every rank, from the setting or from the hosts' names."""
    if node_size is not None:
        return nodes_of_size(world, node_size)
    names: list[Any] = [None] * world
    dist.all_gather_object(names, host_name())
    return nodes_of_ids(names)


def main(words: Sequence[str] | None = None) -> int:
    """Join the ranks and measure."""
    options = parse(words)
    try:
        grid = grid_of(options)
        if options.list:
            for point in grid.points():
                print(point.words(), f"- {get_system(point.system).title}")
            return 0
        mesh = MeshConfig(timeout=max(3600.0, grid.timeout))
        ranks = start(
            TrainConfig(
                device=options.device, threads=grid.threads, launcher=options.launcher, mesh=mesh
            )
        )
    except (GridProblem, ArgumentProblem, Refused) as problem:
        print(f"weak_scaling.py: {problem}", file=sys.stderr)
        return 2
    status = Program(grid, options, ranks).run()
    gc.collect()  # what still holds a group goes before the groups do
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
