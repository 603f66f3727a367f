#!/usr/bin/env python3
"""Everything that is measured on the GPUs of one host, step by step, inside ten minutes.

    scaling_runs/multi_gpu.sh                        on a machine with 2, 4 or 8 GPUs
    scaling_runs/multi_gpu.sh --rehearse --results runs/rehearsal     on CPU processes, tiny shapes
    scaling_runs/multi_gpu.sh --one-gpu              by two processes on one GPU, the device engine
    scaling_runs/multi_gpu.sh --only check,links --seconds 300 --commit abc1234

Each step is a set of processes of its own with a time limit; one that fails, hangs or is late is
ended, started again past the point that ended it while its time lasts, and the next step begins.
Rows go to scaling_runs/results/multi_gpu_<gpu>.csv and weak_scaling_<gpu>.csv after every point, so
that a second run goes on where the first was; logs of every rank to runs/multi_gpu.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.comm.heaps.torch_symm import OVERLAP
from scaling_runs.machine import RESULTS, ROOT, UNKNOWN, Machine, describe_machine
from scaling_runs.multi_gpu_ranks import Limits, Outcome, run_ranks, tail
from scaling_runs.multi_gpu_rows import Rows
from scaling_runs.multi_gpu_sizes import SIZES
from scaling_runs.multi_gpu_summary import summary

RESERVE = 6.0  # seconds kept for the summary
NOT_RIGHT = ("begun", "failed", "wrong", "late", "stuck")
LEAST = 12.0  # a step with less time than this is left out
QUIET = {  # multicast over NVLink can disable a shared host
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
NVSHMEM = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_SYMMETRIC_SIZE": "8G"}  # one host
TUNED = {"TRITON_CACHE_AUTOTUNING": "1"}  # what another system tunes is kept between steps


@dataclass(frozen=True)
class Step:
    """limit: seconds of all attempts together. stall: seconds without a row or an output after
    which a step counts as hanging. attempts: how often it is started. soft: seconds before the
    limit at which it begins nothing more. one_may_die: a rank is killed in it."""

    name: str
    limit: float
    stall: float = 60.0
    attempts: int = 1
    soft: float = 8.0
    one_may_die: bool = False


STEPS = (  # what tells most first
    Step("compile", 60.0, stall=60.0),
    Step("check", 110.0, stall=45.0, attempts=3),
    Step("weak", 150.0, stall=45.0, attempts=3),
    Step("killed_device", 35.0, one_may_die=True),
    Step("killed_host", 35.0, one_may_die=True),
    Step("train", 40.0, stall=40.0, attempts=2),
    Step("links", 35.0, stall=30.0, attempts=2),
    Step("long", 50.0, stall=40.0, attempts=2),
    Step("check_nvshmem", 80.0, stall=60.0, attempts=2),
    Step("other_code", 60.0, stall=60.0),
    # What is left of the whole time: it goes on where `weak` was.
    Step("weak_more", 600.0, stall=60.0, attempts=4),
)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        prog="multi_gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="CPU processes, tiny shapes; wants --results"
    )
    parser.add_argument(
        "--one-gpu", action="store_true", help="processes that share one GPU, small"
    )
    parser.add_argument("--short", action="store_true", help="with --rehearse: one case of each")
    parser.add_argument("--ranks", type=int, help="default: all GPUs; 4 in a rehearsal")
    parser.add_argument("--seconds", type=float, help="of the whole run; 540, 3000 in a rehearsal")
    parser.add_argument("--only", default=",".join(names), help=f"steps of {', '.join(names)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "multi_gpu", help="folder")
    parser.add_argument("--copy", type=Path, help="copy rows and ends of logs here after each step")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    options = parser.parse_args(words)
    options.steps = options.only.split(",")
    unknown = [name for name in options.steps if name not in names]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not among {', '.join(names)}")
    if options.short and not options.rehearse:
        parser.error("--short goes with --rehearse")
    if options.rehearse and options.results == RESULTS:
        parser.error("--rehearse measures an interpreter: give its rows a folder with --results")
    if options.rehearse and options.one_gpu:
        parser.error("--rehearse and --one-gpu: give one of them")
    if options.ranks is None:
        shared = 4 if options.rehearse else 2
        alone = options.rehearse or options.one_gpu
        options.ranks = shared if alone else torch.cuda.device_count()
    if options.ranks < 2:
        parser.error(f"{options.ranks} ranks: it wants at least 2 GPUs, or --rehearse")
    wanted = 1 if options.one_gpu else options.ranks
    if not options.rehearse and wanted > torch.cuda.device_count():
        parser.error(f"{wanted} GPUs are needed, there are {torch.cuda.device_count()} GPUs")
    if options.seconds is None:
        options.seconds = 3000.0 if options.rehearse else 540.0
    return options


class Program:
    """Runs the steps and keeps what they leave behind."""

    def __init__(self, options: argparse.Namespace, machine: Machine) -> None:
        self.options, self.machine = options, machine
        self.begun = time.monotonic()
        name = "one_gpu" if options.one_gpu else "full"
        if options.rehearse:
            name = "short" if options.short else "rehearsal"
        self.sizes = SIZES[name]
        carrier = "cpu:gloo cuda:nccl" if name == "full" else "gloo"
        self.rows = self._open(carrier)
        self.logs: Path = options.logs
        self.logs.mkdir(parents=True, exist_ok=True)

    def _open(self, carrier: str) -> Rows:
        options = self.options
        return Rows(options.results, self.machine, options.ranks, self.sizes.name, carrier)

    @property
    def left(self) -> float:
        """Seconds that steps may still take."""
        return self.options.seconds - RESERVE - (time.monotonic() - self.begun)

    def run(self) -> int:
        """All steps; 1 where one has failed or a row of this commit is not right."""
        bad = 0
        for step in STEPS:
            engine = step.name.removeprefix("killed_")
            fits = engine == step.name or engine in self.sizes.engines
            if step.name in self.options.steps and fits:
                bad += not self._step(step)
                self._copy()
        rows = self._open("").of_this_run()
        short, whole = summary(rows, self._weak_file(), self.options.ranks)
        self._summary_file().write_text(whole + "\n")
        print(f"\n{short}\n\n{time.monotonic() - self.begun:.0f} s; all rows as tables: ", end="")
        print(self._summary_file(), flush=True)
        self._copy()
        own = [row for row in rows if row["commit"] == self.machine.commit]
        return int(bad > 0 or any(row["status"] in NOT_RIGHT for row in own))

    def _step(self, step: Step) -> bool:
        """One step, with its further attempts; True where it did what it can."""
        limit = min(step.limit * (10.0 if self.options.rehearse else 1.0), self.left)
        end, outcome = time.monotonic() + limit, Outcome("no time", 0.0, ())
        for attempt in range(step.attempts):
            remaining = end - time.monotonic()
            if remaining < LEAST:
                break
            outcome = self._attempt(step, remaining, attempt + 1)
            print(f"[{step.name}] {outcome.status}, {outcome.seconds:.0f} s", flush=True)
            if outcome.status in ("ok", "wrong"):  # to its end; rows say what was wrong
                break
            self._tell(step, attempt)
        if outcome.status == "no time":
            print(f"[{step.name}] left out: no time", flush=True)
        rows = self._open("")  # the step's ranks have written since
        note = f"exit codes {' '.join(map(str, outcome.codes))}"
        rows.put("step", outcome.status, quantity=step.name, value=outcome.seconds, unit="s",
                 note=note)  # fmt: skip
        return outcome.status in ("ok", "no time")

    def _attempt(self, step: Step, remaining: float, attempt: int) -> Outcome:
        options = self.options
        until = time.time() + max(LEAST / 2, remaining - step.soft)
        shared = ["--sizes", self.sizes.name, "--until", f"{until:.1f}"]
        logs = [self.logs / f"{step.name}.{rank}.log" for rank in range(options.ranks)]
        limits = Limits(remaining, step.stall * (10.0 if options.rehearse else 1.0))
        if step.name == "compile":
            words = ["-m", "scaling_runs.multi_gpu_compile", *shared, "--ranks", str(options.ranks)]
            return run_ranks(words, 1, self._environment(False), logs, limits, options.results)
        with tempfile.TemporaryDirectory(prefix="multi_gpu_") as folder:
            words = ["-m", "scaling_runs.multi_gpu_part", step.name, *shared]
            words += ["--results", str(options.results), "--folder", folder]
            words += ["--commit", self.machine.commit, "--attempt", str(attempt)]
            words += ["--one-gpu"] if options.one_gpu else []
            outcome = run_ranks(
                words,
                options.ranks,
                self._environment(options.rehearse),
                logs,
                limits,
                options.results,
                step.one_may_die,
            )
            if step.one_may_die:
                keep_killed(self._open(""), Path(folder), step.name, options.ranks)
        return outcome

    def _environment(self, interpret: bool) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {**os.environ, **QUIET, **NVSHMEM, "PYTHONPATH": os.pathsep.join(paths)}
        found |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **TUNED}
        if self.options.one_gpu:
            found[OVERLAP] = "1"
        found.pop("TRITON_INTERPRET", None)
        return found | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpret else {})

    def _tell(self, step: Step, attempt: int) -> None:
        """What the ranks of a step that did not end well said last."""
        for rank in range(self.options.ranks):
            text = tail(self.logs / f"{step.name}.{rank}.log").strip().splitlines()[-6:]
            print(f"  rank {rank}, attempt {attempt + 1}: " + "\n    ".join(text), flush=True)

    def _weak_file(self) -> Path:
        return self.options.results / f"weak_scaling_{self.machine.slug}.csv"

    def _summary_file(self) -> Path:
        return self.options.results / f"multi_gpu_{self.machine.slug}.txt"

    def _copy(self) -> None:
        if self.options.copy is None:
            return
        self.options.copy.mkdir(parents=True, exist_ok=True)
        for path in (self.rows.store.path, self._weak_file(), self._summary_file()):
            if path.exists():
                shutil.copy(path, self.options.copy)
        ends = [f"==== {log.name}\n{tail(log)}\n" for log in sorted(self.logs.glob("*.log"))]
        (self.options.copy / "multi_gpu_logs.txt").write_text("".join(ends))


def keep_killed(rows: Rows, folder: Path, step: str, ranks: int) -> None:
    """A row of what the ranks left behind that were not killed: in time they raise the right error,
    and their devices come to rest."""
    found: dict[str, dict] = {
        path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")
    }
    engine = step.removeprefix("killed_")
    name = {"engine": engine, "quantity": "seconds to the error on the others"}
    dead = found.pop("killed", None)
    if dead is None:
        said = next((str(entry["error"]) for entry in found.values()), "no rank was killed")
        rows.put("killed", "refused" if found else "failed", **name, note=said)
        return
    seconds = {rank: entry["at"] - dead["at"] for rank, entry in found.items()}
    heard = [entry for entry in found.values() if "RemoteRankError" in entry["error"]]
    resting = [entry["rest"] - dead["at"] for entry in heard if "rest" in entry]
    others = list(seconds.values())
    columns: Mapping[str, object] = {
        "value": max(others, default=""),
        "unit": "s",
        "first": seconds.get("rank0", ""),
        "last": seconds.get(f"rank{ranks - 1}", ""),
        "note": f"{len(heard)} of {ranks - 1} others raised RemoteRankError, the devices of "
        f"{len(resting)} came to rest, in {max(resting, default=0.0):.1f} s; "
        + next((str(entry["error"]) for entry in found.values()), "")[:200],
    }
    good = len(heard) == len(resting) == ranks - 1
    rows.put("killed", "ok" if good else "wrong", **name, **columns)


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps that the options name."""
    options = parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    machine = describe_machine(options.commit)
    if machine.commit == UNKNOWN:  # rows must be known again within this run at least
        machine = replace(machine, commit=f"unknown at {time.strftime('%Y-%m-%d %H:%M:%S')}")
    if options.rehearse:
        machine = replace(machine, gpu="cpu")
    return Program(options, machine).run()


if __name__ == "__main__":
    sys.exit(main())
