#!/usr/bin/env python3
"""Times the exchange of states on one GPU, between virtual ranks that share it.

    python scaling_runs/virtual_ranks.py                   scalar, diagonal and matrix decay, W = 4
    python scaling_runs/virtual_ranks.py --ranks 4,8,2 --tokens 16384,8192,32768,65536 --delays 0
    python scaling_runs/virtual_ranks.py --compile-only --jobs 2   kernels ahead, without a GPU
    python scaling_runs/virtual_ranks.py --strategies chain --delays 0,30,60 --seconds 300
    python scaling_runs/virtual_ranks.py --groups 1 ... --groups 2 ... --groups 8+24

For every variant, direction and strategy: the whole sequence over W ranks; the same with the
exchange's flags set beforehand (`ideal_same_plan`: what is left is the plan's own work); every
shard as a sequence of its own (`ideal_best`: no summaries, no exchange). `overhead` is the time
over that of ideal_same_plan. With `--delays` every message is held up that many microseconds;
`slope` is the added time over the added delay of W - 1 hops: the part that nothing hides.
`groups` are the heads of each group that is exchanged on its own, all or as `--groups` says;
ideal_same_plan has the same ones. In rows without groups all heads were exchanged at once.
`--programs` limits the programs that exchange for a rank: while they wait they take room from other
kernels.
`hop_us` is what is added over ideal_same_plan for each of W - 1 hops and each direction. Tokens and
ranks come in the order of their importance; rows of the present commit are not measured again.

Up to 131072 tokens together, calls are timed as CUDA graphs (`launch` = graph), because a host that
drives all ranks can be slower than the device; longer ones from the host. Up to `--check-tokens`,
output and gradients are compared with the unsharded operator in float64 on two heads under the
bounds of DESIGN section 8 (`used` is the largest share of a bound), and repeated calls with one
another, bit by bit. Rows go to scaling_runs/results/virtual_ranks_<gpu>.csv. All ranks share one
device: these times say what an exchange adds, not how fast W devices would be. The status is 1 if
results were wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.comm.strategies import STRATEGIES
from flexla_dist.parallel.engine import cut_heads
from flexla_dist.spec.variants import variant_names
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
from scaling_runs.virtual_measure import Measurement, state_mib

KEY: tuple[str, ...] = (
    "gpu",
    "variant",
    "direction",
    "B",
    "T",
    "H",
    "K",
    "V",
    "dtype",
    "W",
    "strategy",
    "impl",
)
KEY = (*KEY, "delay_us", "groups", "programs")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "variant", "direction", "B", "T", "H", "K", "V"),
    *("dtype", "W", "strategy", "impl", "delay_us", "median_ms", "p20_ms", "p80_ms"),
    *("overhead", "slope", "mib_sent", "rel_err", "same_bits", "groups", "programs"),
    *("launch", "used", "ok", "hop_us"),
)
SHOWN = ("variant", "direction", "T", "W", *COLUMNS[14:])
VARIANTS = ("simple_gla", "gla", "gated_delta_rule")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", type=lambda t: t.split(","), default=VARIANTS)
    parser.add_argument("--strategies", type=lambda t: t.split(","), default=tuple(STRATEGIES))
    parser.add_argument("--ranks", type=_numbers, default=(4,), help="comma-separated W")
    parser.add_argument("--delays", type=_numbers, default=(0, 30, 60), help="microseconds a hop")
    parser.add_argument(
        "--groups", type=_groups, help="how many groups of heads, or the sizes: 8+24"
    )
    parser.add_argument("--programs", type=int, help="of the exchange, for each rank")
    parser.add_argument("--tokens", type=_numbers, default=(16384,), help="of one rank, in order")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--check-tokens", type=int, default=65536, help="compare results up to so many, together"
    )
    parser.add_argument("--no-graph", action="store_true", help="time from the host")
    parser.add_argument("--milliseconds", type=float, default=100, help="of calls that are timed")
    parser.add_argument("--again", action="store_true", help="also rows of the present commit")
    parser.add_argument("--compile-only", action="store_true", help="compile kernels, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--seconds", type=float, help="start no measurement after this time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    options = parser.parse_args(words)
    for name, known in (("variants", variant_names()), ("strategies", tuple(STRATEGIES))):
        unknown = [x for x in getattr(options, name) if x not in known]
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)} is not among {', '.join(known)}")
    options.device = "cuda"
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _groups(text: str) -> int | tuple[int, ...]:
    return tuple(map(int, text.split("+"))) if "+" in text else int(text)


class Program:
    """Measures and keeps rows."""

    def __init__(self, options: argparse.Namespace, machine: Machine):
        self.options, self.machine = options, machine
        self.store = RowStore(options.results / f"virtual_ranks_{machine.slug}.csv", COLUMNS, KEY)
        self.written: list[dict[str, str]] = []
        self.begin = time.perf_counter()

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        limit = self.options.seconds
        return limit is not None and time.perf_counter() - self.begin > limit

    def run(self, point: Point) -> bool:
        """Everything of one point; False where the time was up first."""
        made: list[Measurement] = []

        def measurement() -> Measurement:
            if not made:
                made.append(Measurement(self.options, point.variant, point.ranks, point.tokens))
            return made[0]

        checked: dict[str, dict[str, object]] = {}
        for direction in ("fwd", "fwdbwd"):
            name = self._name(point, direction) | {"impl": "ideal_best", "delay_us": 0}
            name |= {"groups": "", "programs": "", "strategy": ""}
            self._row(name, partial(timed_alone, measurement, direction))
            for strategy in self.options.strategies:
                if self.late:
                    return False
                name = self._name(point, direction) | {"strategy": strategy}
                self._strategy(name, direction, strategy, measurement, checked)
        return True

    def _strategy(
        self,
        name: dict[str, object],
        direction: str,
        strategy: str,
        measurement: Callable[[], Measurement],
        checked: dict[str, dict[str, object]],
    ) -> None:
        """The ideal of a strategy, and its times by delay."""

        def ideal() -> dict[str, object]:
            m = measurement()
            return m.timed(direction, m.exchanger(strategy, waits=False))

        plan = self._row(name | {"impl": "ideal_same_plan", "delay_us": 0}, ideal)
        hops = (int(str(name["W"])) - 1) * (1 if direction == "fwd" else 2)
        first: list[tuple[int, float]] = []

        def ours(delay: int) -> dict[str, object]:
            m = measurement()
            if strategy not in checked:
                few = m.ranks.ranks * m.tokens <= self.options.check_tokens
                checked[strategy] = m.checks(strategy) if few else {}
            exchanger = m.exchanger(strategy, delay_ns=1000 * delay)
            times = m.timed(direction, exchanger)
            exchanger.check()
            median, least = float(str(times["median_ms"])), float(plan["median_ms"])
            found = {**times, **checked[strategy], "mib_sent": state_mib(m)}
            found |= {"overhead": median / least - 1, "hop_us": 1e3 * (median - least) / hops}
            if first:
                added, later = 1e3 * (median - first[0][1]), delay - first[0][0]
                found["slope"] = added / (later * hops)
            return found

        for delay in self.options.delays:
            named = name | {"impl": "ours", "delay_us": delay}
            row = self._row(named, partial(ours, delay))
            first = first or [(delay, float(row["median_ms"]))]

    def _name(self, point: Point, direction: str) -> dict[str, object]:
        """Columns that tell a row from others."""
        o = self.options
        groups = cut_heads(1 if o.groups is None else o.groups, o.heads)
        return {
            **self.machine.columns(), "variant": point.variant, "direction": direction,
            "B": o.batch, "T": point.tokens, "H": o.heads, "K": o.size, "V": o.size,
            "dtype": o.dtype, "W": point.ranks, "groups": "+".join(str(n) for _, n in groups),
            "programs": "" if o.programs is None else o.programs,
        }  # fmt: skip

    def _row(
        self, name: dict[str, object], measure: Callable[[], dict[str, object]]
    ) -> dict[str, str]:
        """The row of a name: of the present commit, or measured, kept and shown."""
        known = self.store.get(name)
        if known is None or self.options.again or not self.machine.measured_same_code(known):
            known = self.store.put(name | measure())
            shown = " ".join(f"{k}={v}" for k, v in known.items() if k in SHOWN and v)
            print(shown, flush=True)
        self.written.append(known)
        return known


def timed_alone(measurement: Callable[[], Measurement], direction: str) -> dict[str, object]:
    """Columns of shards that are sequences of their own."""
    return measurement().timed(direction, None)


@dataclass(frozen=True)
class Point:
    """A variant, virtual ranks, and tokens of each."""

    variant: str
    ranks: int
    tokens: int


def points(options: argparse.Namespace) -> list[Point]:
    """All that the options name; first those whose numbers are named first."""
    axes = (options.tokens, options.ranks)
    places = sorted(product(*(range(len(axis)) for axis in axes)), key=sum)
    return [
        Point(variant, options.ranks[at_rank], options.tokens[at_token])
        for at_token, at_rank in places
        for variant in options.variants
    ]


def compile_ahead(options: argparse.Namespace) -> int:
    """Every kernel that the points launch, into Triton's cache; how many failed."""
    exchanges, tasks = [], []
    groups = cut_heads(1 if options.groups is None else options.groups, options.heads)
    delays = tuple(1000 * delay for delay in dict.fromkeys((0, *options.delays)))
    for point in points(options):
        shape = (options.batch, point.tokens, options.heads, options.size)
        problem = problem_of(point.variant, *shape, getattr(torch, options.dtype))
        signature = signature_for(point.variant, problem)
        exchanges += [Exchanged(signature, s, point.ranks, delays) for s in options.strategies]
        tasks.append(task_of(point.variant, problem, groups))
    target = gpu_target()
    failed = compile_launches(exchange_records(exchanges), target, options.jobs, options.seconds)
    return failed + compile_only(tasks, target, options.jobs, options.seconds)


def main(words: Sequence[str] | None = None) -> int:
    """Measure everything that the options ask for."""
    options = parse(words)
    if options.compile_only:
        return int(compile_ahead(options) > 0)
    if not torch.cuda.is_available():
        print("virtual_ranks.py needs a CUDA device", file=sys.stderr)
        return 2
    count = CompileCount()
    program = Program(options, describe_machine(options.commit))
    every = points(options)
    for number, point in enumerate(every):
        try:
            done = not program.late and program.run(point)
        except torch.cuda.OutOfMemoryError as full:
            print(f"{point} does not fit: {str(full).splitlines()[0]}", flush=True)
            done = True
        if not done:
            print(f"time is up: {len(every) - number} of {len(every)} points left", flush=True)
            break
        torch.cuda.empty_cache()
    print(format_table(program.written, SHOWN))
    print(f"\n{len(program.written)} rows; {program.store.path}")
    print(f"kernels found in the cache {count.found}, compiled here {count.compiled}")
    return int(any(row["ok"].startswith("NO") for row in program.written))


if __name__ == "__main__":
    sys.exit(main())
