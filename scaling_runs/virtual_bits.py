#!/usr/bin/env python3
"""Checks the exchange of states on one GPU: every variant on virtual ranks, errors and bits.

    python scaling_runs/virtual_bits.py --compile-only --jobs 2      kernels ahead, without a GPU
    python scaling_runs/virtual_bits.py --seconds 90                 50 runs each, on a GPU
    python scaling_runs/virtual_bits.py --points 4x1000 --variants kda --strategies chain
    TRITON_INTERPRET=1 python scaling_runs/virtual_bits.py --rehearse --points 2x40 --repeats 2 \\
        --variants gla --results some/folder                         in the interpreter

A point is W x tokens of a rank; 1000 is no whole number of chunks. Forward and backward of the
whole sequence run over W virtual ranks. Output and all gradients are compared with the unsharded
operator in float64 under the bounds of DESIGN section 8, over the tensor and in every chunk; every
further run with the first one, bit by bit. The first run has uninitialised memory full of NaN.
`used` is the largest share of a bound, `worst` where it is; `ok` wants it within 1, and all runs
the same. Rows go to scaling_runs/results/virtual_bits_<gpu>.csv point by point; rows of the present
commit are not made again. The status is 1 if a row is not ok, 3 if the time was up first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.comm.device.workspace import INTERPRETED
from flexla_dist.comm.strategies import STRATEGIES
from flexla_dist.spec.variants import get_variant, variant_names
from flexla_dist.testing.inputs import make_inputs
from flexla_dist.testing.poison import poisoned_memory
from scaling_runs.compiling import CompileCount, compile_launches, compile_only, gpu_target
from scaling_runs.machine import RESULTS, Machine, describe_machine
from scaling_runs.rows import RowStore, format_table
from scaling_runs.virtual_compile import (
    Exchanged,
    exchange_records,
    problem_of,
    signature_for,
    task_of,
)
from scaling_runs.virtual_judge import differs, judge, reference
from scaling_runs.virtual_run import VirtualRanks
from scaling_runs.weak_cases import compiled

KEY = ("gpu", "variant", "W", "T", "B", "H", "K", "V", "dtype", "strategy")
ERRORS = ("o", "dq", "dk", "dv", "dg", "dbeta", "dx", "ddt", "dparams")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "variant", "W", "T", "B", "H", "K", "V"),
    *("dtype", "strategy", "runs", "same_bits", "ok", "used", "worst", *ERRORS, "seconds"),
)
SHOWN = ("variant", "W", "T", "strategy", "runs", "same_bits", "ok", "used", "worst", "seconds")
POINTS = "4x1000,8x1024,2x1024,4x1024,8x1000,2x1000"  # most important first
TOGETHER = 10  # runs between two looks at the exchange


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default=",".join(variant_names()), help="comma-separated")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    parser.add_argument("--points", default=POINTS, help="W x tokens of a rank, in order")
    parser.add_argument("--repeats", type=int, default=50, help="runs whose bits are compared")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    parser.add_argument("--seconds", type=float, help="start nothing after this time")
    parser.add_argument("--again", action="store_true", help="also rows of the present commit")
    parser.add_argument("--compile-only", action="store_true", help="compile kernels, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--rehearse", action="store_true", help="float32, without a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    options = parser.parse_args(words)
    for name, known in (("variants", variant_names()), ("strategies", tuple(STRATEGIES))):
        found = getattr(options, name).split(",")
        unknown = [x for x in found if x not in known]
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)} is not among {', '.join(known)}")
        setattr(options, name, found)
    try:
        options.points = [
            (int(ranks), int(tokens))
            for ranks, tokens in (word.split("x") for word in options.points.split(","))
        ]
    except ValueError:
        parser.error(f"--points is {options.points!r}; expected something like 4x1000,8x1024")
    if options.rehearse and options.results == RESULTS:
        parser.error("--rehearse runs an interpreter: give its rows a folder with --results")
    options.dtype = torch.float32 if options.rehearse else torch.bfloat16
    return options


class Case:
    """A variant on W virtual ranks, and what it is compared with."""

    def __init__(self, options: argparse.Namespace, variant: str, ranks: int, tokens: int):
        self.options, self.variant = options, variant
        self.device = torch.device("cpu" if options.rehearse else "cuda")
        size = options.size
        self.call = make_inputs(
            get_variant(variant),
            batch=1,
            tokens=ranks * tokens,
            heads=options.heads,
            value_heads=options.heads,
            sizes={"K": size, "V": size, "D": size},
            dtype=options.dtype,
            device=self.device,
        )
        self.ranks = VirtualRanks(compiled(variant), self.call, ranks)
        if options.rehearse:
            self.ranks.executor.segment_chunks = 1
        generator = torch.Generator(self.device).manual_seed(5)
        shape = self.ranks.problems[0].output_shape()
        shape = (shape[0], ranks * tokens, *shape[2:])
        self.seed = torch.randn(shape, generator=generator, device=self.device).to(options.dtype)
        self.want = reference(compiled(variant), self.call, self.seed)

    def judge(self, strategy: str) -> dict[str, object]:
        """Columns of a row."""
        begin = time.perf_counter()
        exchanger = self.ranks.exchanger(strategy, timeout=20.0)
        with poisoned_memory():
            first = self.ranks.run(exchanger, self.seed)
        exchanger.check()
        differ = []
        for number in range(1, self.options.repeats):
            differ.append(differs(first, self.ranks.run(exchanger, self.seed)))
            if number % TOGETHER == 0:
                exchanger.check()
        exchanger.check()
        wrong = [n + 1 for n, x in enumerate(torch.stack(differ).tolist() if differ else ()) if x]
        errors = judge(first, self.want, self.call, self.options.dtype)
        found: dict[str, object] = {**errors.ratios, "used": errors.used, "worst": errors.worst}
        same = "same" if not wrong else f"DIFFERENT from run {wrong[0]} on, {len(wrong)} runs"
        good = errors.good and not wrong
        found |= {"runs": self.options.repeats, "same_bits": same, "ok": "yes" if good else "NO"}
        return found | {"seconds": time.perf_counter() - begin}


def compile_ahead(options: argparse.Namespace) -> int:
    """Every kernel that the points launch, into Triton's cache; how many failed."""
    exchanges, tasks = [], []
    groups = ((0, options.heads),)
    for ranks, tokens in options.points:
        for variant in options.variants:
            shape = (1, tokens, options.heads, options.size)
            problem = problem_of(variant, *shape, options.dtype)
            signature = signature_for(variant, problem)
            exchanges += [Exchanged(signature, s, ranks) for s in options.strategies]
            tasks.append(task_of(variant, problem, groups))
    target = gpu_target()
    failed = compile_launches(exchange_records(exchanges), target, options.jobs, options.seconds)
    return failed + compile_only(tasks, target, options.jobs, options.seconds)


class Program:
    """Goes through the points and keeps rows."""

    def __init__(self, options: argparse.Namespace, machine: Machine):
        self.options, self.machine = options, machine
        self.store = RowStore(options.results / f"virtual_bits_{machine.slug}.csv", COLUMNS, KEY)
        self.written: list[dict[str, str]] = []
        self.begin = time.perf_counter()

    def run(self) -> int:
        """All points; the status."""
        for ranks, tokens in self.options.points:
            for variant in self.options.variants:
                named = [
                    (s, self._name(variant, ranks, tokens, s)) for s in self.options.strategies
                ]
                left = [(s, name) for s, name in named if not self._known(name)]
                case = None
                for strategy, name in left:
                    if self._late():
                        return 3
                    case = case or Case(self.options, variant, ranks, tokens)
                    self._put({**name, **case.judge(strategy)})
        return int(any(row["ok"] != "yes" for row in self.written))

    def _name(self, variant: str, ranks: int, tokens: int, strategy: str) -> dict[str, object]:
        o = self.options
        name = {"variant": variant, "W": ranks, "T": tokens, "B": 1, "H": o.heads, "K": o.size}
        name |= {"V": o.size, "dtype": str(o.dtype).removeprefix("torch."), "strategy": strategy}
        return {**self.machine.columns(), **name}

    def _known(self, name: dict[str, object]) -> bool:
        """Rows of as many runs at the present commit are taken as they are."""
        row = self.store.get(name)
        if row is None or self.options.again or not self.machine.measured_same_code(row):
            return False
        if int(row["runs"]) < self.options.repeats:
            return False
        self.written.append(row)
        return True

    def _late(self) -> bool:
        limit = self.options.seconds
        late = limit is not None and time.perf_counter() - self.begin > limit
        if late:
            print("time is up", flush=True)
        return late

    def _put(self, row: dict[str, object]) -> None:
        self.written.append(self.store.put(row))
        shown = self.written[-1]
        print(" ".join(f"{name}={shown[name]}" for name in SHOWN), flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Check everything that the options ask for."""
    options = parse(words)
    if options.compile_only:
        return int(compile_ahead(options) > 0)
    if not options.rehearse and not torch.cuda.is_available():
        print("virtual_bits.py needs a CUDA device; --rehearse needs none", file=sys.stderr)
        return 2
    if options.rehearse and not INTERPRETED:
        print("virtual_bits.py: --rehearse needs TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    count = CompileCount()
    program = Program(options, describe_machine(options.commit))
    status = program.run()
    bad = [row for row in program.written if row["ok"] != "yes"]
    if bad:
        print(format_table(bad, (*SHOWN, *ERRORS)))
    print(f"{len(program.written)} rows, {len(bad)} not ok; {program.store.path}")
    print(f"kernels found in the cache {count.found}, compiled here {count.compiled}")
    return 1 if bad else status


if __name__ == "__main__":
    sys.exit(main())
