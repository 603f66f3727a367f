#!/usr/bin/env python3
"""Times the exchange of states on one GPU, between virtual ranks that share it.

    python scaling_runs/virtual_ranks.py                   scalar, diagonal and matrix decay, W = 4
    python scaling_runs/virtual_ranks.py --ranks 2,8 --variants gla --tokens 8192
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

Outputs and gradients are first compared with the unsharded operator on the batched executor, and
repeated calls with one another, bit by bit. Rows go to
scaling_runs/results/virtual_ranks_<gpu>.csv. All ranks share one device: these times say what an
exchange adds, not how fast W devices would be.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from torch import Tensor

from flexla_dist.comm.device_exchange import DeviceExchanger
from flexla_dist.comm.strategies import STRATEGIES
from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant, variant_names
from flexla_dist.testing.budget import measure
from flexla_dist.testing.inputs import CallInputs, make_inputs
from scaling_runs.machine import RESULTS, Machine, describe_machine
from scaling_runs.rows import RowStore, format_table
from scaling_runs.virtual_run import Outcome, VirtualRanks

KEY = ("gpu", "variant", "direction", "B", "T", "H", "K", "V", "dtype", "W", "strategy", "impl")
KEY = (*KEY, "delay_us", "groups", "programs")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "variant", "direction", "B", "T", "H", "K", "V"),
    *("dtype", "W", "strategy", "impl", "delay_us", "median_ms", "p20_ms", "p80_ms"),
    *("overhead", "slope", "mib_sent", "rel_err", "same_bits", "groups", "programs"),
)
SHOWN = ("variant", "direction", "T", "W", *COLUMNS[14:])
VARIANTS = ("simple_gla", "gla", "gated_delta_rule")
REPEATS = 5  # calls that are compared bit by bit


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
    parser.add_argument("--tokens", type=int, default=16384, help="of one rank")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--no-check", action="store_true", help="leave out errors and bits")
    parser.add_argument("--seconds", type=float, help="start no measurement after this time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    options = parser.parse_args(words)
    for name, known in (("variants", variant_names()), ("strategies", tuple(STRATEGIES))):
        unknown = [x for x in getattr(options, name) if x not in known]
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)} is not among {', '.join(known)}")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _groups(text: str) -> int | tuple[int, ...]:
    return tuple(map(int, text.split("+"))) if "+" in text else int(text)


def make_call(options: argparse.Namespace, variant: str, ranks: int) -> CallInputs:
    """Seeded arguments of the whole sequence."""
    return make_inputs(
        get_variant(variant),
        batch=options.batch,
        tokens=options.tokens * ranks,
        heads=options.heads,
        value_heads=options.heads,
        sizes={"K": options.size, "V": options.size},
        dtype=getattr(torch, options.dtype),
        device="cuda",
    )


class Measurement:
    """One variant on W virtual ranks."""

    def __init__(self, options: argparse.Namespace, variant: str, ranks: int):
        self.options, self.variant = options, variant
        self.call = make_call(options, variant, ranks)
        self.ranks = VirtualRanks(compile(get_variant(variant)), self.call, ranks, options.groups)
        like = self.call.inputs["v"]
        generator = torch.Generator("cuda").manual_seed(5)
        self.seed = torch.randn(like.shape, generator=generator, device="cuda", dtype=like.dtype)
        self.seeds = self.ranks.seeds(self.seed)

    def exchanger(self, strategy: str, **settings: Any) -> DeviceExchanger:
        """An exchange with the programs that were asked for."""
        return self.ranks.exchanger(strategy, programs=self.options.programs, **settings)

    def checks(self, strategy: str) -> tuple[float | None, str]:
        """Largest error against the batched executor on two heads, and whether bits repeat."""
        exchanger = self.exchanger(strategy)
        first = self.ranks.run(exchanger, self.seed)
        exchanger.check()
        same = all(equal(first, self.ranks.run(exchanger, self.seed)) for _ in range(REPEATS - 1))
        return self._error(first), "same" if same else "DIFFERENT"

    def _error(self, found: Outcome) -> float | None:
        def heads(x: Tensor) -> Tensor:
            return x.detach()[:, :, :2].float().requires_grad_()

        op = compile(get_variant(self.variant), executor="torch")
        inputs = {name: heads(x) for name, x in self.call.inputs.items()}
        params = {name: x.detach()[:2] for name, x in self.call.params.items()}
        output = op(**inputs, **params, **self.call.scalars)[0]
        grads = torch.autograd.grad(output, list(inputs.values()), self.seed[:, :, :2].float())
        wanted = [output, *grads]
        got = [found.output, *(found.gradients[name] for name in inputs)]
        return max(measure(a[:, :, :2], b.detach()).ratio for a, b in zip(got, wanted, strict=True))

    def both(self, exchanger: DeviceExchanger) -> None:
        """Forward and backward."""
        forward, entering = self.ranks.forward_with_states(exchanger)
        self.ranks.backward(exchanger, forward, entering, self.seeds)

    def alone(self) -> None:
        """Forward and backward of shards by themselves."""
        self.ranks.alone_backward(self.ranks.alone(), self.seeds)

    def timed(self, direction: str, exchanger: DeviceExchanger | None) -> tuple[float, ...]:
        """Median, 20th and 80th percentile in ms; without an exchanger, of shards alone."""
        call: Callable[[], object]
        if exchanger is None:
            call = self.ranks.alone if direction == "fwd" else self.alone
        elif direction == "fwd":
            call = lambda: self.ranks.forward(exchanger)  # noqa: E731
        else:
            call = lambda: self.both(exchanger)  # noqa: E731
        call()
        times = triton.testing.do_bench(call, warmup=50, rep=250, quantiles=[0.5, 0.2, 0.8])
        return tuple(times)


def equal(a: Outcome, b: Outcome) -> bool:
    """Bit by bit."""
    pairs = zip((a.output, *a.gradients.values()), (b.output, *b.gradients.values()), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


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

    def put(self, m: Measurement, **columns: object) -> None:
        """Keep and show a row."""
        o = self.options
        row = {
            **self.machine.columns(), "variant": m.variant, "B": o.batch,
            "T": o.tokens, "H": o.heads, "K": o.size, "V": o.size, "dtype": o.dtype,
            "W": m.ranks.ranks, "groups": "+".join(str(n) for _, n in m.ranks.groups),
            "programs": o.programs, **columns,
        }  # fmt: skip
        self.written.append(self.store.put(row))
        shown = " ".join(f"{k}={v}" for k, v in self.written[-1].items() if k in SHOWN and v)
        print(shown, flush=True)

    def run(self, variant: str, ranks: int) -> None:
        """Everything of one variant and W."""
        m = Measurement(self.options, variant, ranks)
        checked = {
            s: (None, "") if self.options.no_check else m.checks(s) for s in self.options.strategies
        }
        for direction in ("fwd", "fwdbwd"):
            best = m.timed(direction, None)
            self.put(m, direction=direction, impl="ideal_best", delay_us=0, groups="",
                     programs="", **columns_of(best))  # fmt: skip
            for strategy in self.options.strategies:
                if self.late:
                    print("time is up")
                    return
                self._strategy(m, direction, strategy, checked[strategy])

    def _strategy(
        self,
        m: Measurement,
        direction: str,
        strategy: str,
        checked: tuple[float | None, str],
    ) -> None:
        ideal = m.timed(direction, m.exchanger(strategy, waits=False))
        self.put(m, direction=direction, strategy=strategy, impl="ideal_same_plan", delay_us=0,
                 **columns_of(ideal))  # fmt: skip
        first: tuple[int, float] | None = None
        for delay in self.options.delays:
            exchanger = m.exchanger(strategy, delay_ns=1000 * delay)
            times = m.timed(direction, exchanger)
            exchanger.check()
            slope = None
            if first is None:
                first = (delay, times[0])
            else:
                hops = (m.ranks.ranks - 1) * (1 if direction == "fwd" else 2)
                slope = (times[0] - first[1]) * 1e3 / ((delay - first[0]) * hops)
            self.put(
                m, direction=direction, strategy=strategy, impl="ours", delay_us=delay,
                overhead=times[0] / ideal[0] - 1, slope=slope, rel_err=checked[0],
                same_bits=checked[1], mib_sent=state_mib(m), **columns_of(times),
            )  # fmt: skip


def columns_of(times: Sequence[float]) -> dict[str, float]:
    """Times by column."""
    return dict(zip(("median_ms", "p20_ms", "p80_ms"), times, strict=True))


def state_mib(m: Measurement) -> float:
    """MiB of the states that one hop of a chain carries."""
    return sum(s[:1].numel() * 4 for s in m.ranks.problems[0].zero_state()) / 2**20


def main(words: Sequence[str] | None = None) -> int:
    """Measure everything that the options ask for."""
    options = parse(words)
    if not torch.cuda.is_available():
        print("virtual_ranks.py needs a CUDA device", file=sys.stderr)
        return 2
    program = Program(options, describe_machine(options.commit))
    for ranks in options.ranks:
        for variant in options.variants:
            if not program.late:
                program.run(variant, ranks)
    print(format_table(program.written, SHOWN))
    print(f"\n{len(program.written)} rows; {program.store.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
