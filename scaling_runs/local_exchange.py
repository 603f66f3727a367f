#!/usr/bin/env python3
"""Measures links, rates and exchanges of virtual ranks on one GPU, and compares the predictions.

    python scaling_runs/local_exchange.py --compile-only --jobs 2   kernels ahead, without a GPU
    python scaling_runs/local_exchange.py --seconds 60           on a GPU
    python scaling_runs/local_exchange.py --ranks 4 --kinds dense --heads 32
    TRITON_INTERPRET=1 python scaling_runs/local_exchange.py --rehearse --ranks 2,3 --heads 1 \\
        --size 16 --results some/folder                          in the interpreter, without a GPU

Messages between virtual ranks of one launch are timed as the chooser times links, products as the
kernels of an exchange make them. Then exchanges alone, replayed from a graph, with every cut
crossed and with none: the difference is what the chooser predicts. `hop_us` is that of a chain for
each of its W - 1 hops, `mib_hop` what a rank sends to another one in one message of all heads. The
values of an option come in the order of their importance; rows of the present commit are not
measured again. Links go to
scaling_runs/results/local_links_<gpu>.json, rows to local_exchange_<gpu>.csv; the table has
measured and predicted microseconds side by side, also of rows of virtual_ranks.py where there are
some, and is printed again by `python -m scaling_runs.model --local-heap --host <gpu>`. With --check
the exit status is 1 unless every exchange is within 25 percent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.comm.chooser.heap_transport import (
    HeapTransport,
    measure_heap_link,
    measure_kernel_rates,
)
from flexla_dist.comm.chooser.links import Link
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.report import link_line, rates_line, section
from flexla_dist.comm.device.workspace import INTERPRETED
from flexla_dist.comm.device_exchange import DeviceExchanger, Span, SpanState, signature_of
from flexla_dist.comm.heaps import LocalHeap, make_heap
from flexla_dist.comm.topology import SAME_PROCESS
from scaling_runs.compiling import CompileCount, compile_launches, gpu_target
from scaling_runs.machine import RESULTS, describe_machine
from scaling_runs.model.local_heap import Device, exchange_rows, report
from scaling_runs.virtual_compile import (
    Exchanged,
    exchange_records,
    link_launches,
)

STRATEGIES = ("chain", "log_scan", "all_gather")
KINDS = ("none", "scalar", "rows", "full", "dense")
IN_A_GRAPH, REPLAYS, MOST_REPLAYS = 10, 8, 30
STEADY = 0.04  # replays whose 20th and 80th percentile are so near each other are enough


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    parser.add_argument("--kinds", default="scalar,dense", help="kinds of M, comma-separated")
    parser.add_argument("--ranks", default="4,8,2", help="virtual ranks, comma-separated")
    parser.add_argument("--heads", default="32,8,128,1", help="heads times rows, comma-separated")
    parser.add_argument("--size", type=int, default=128, help="K and V, default 128")
    parser.add_argument("--seconds", type=float, help="start no measurement after this time")
    parser.add_argument("--again", action="store_true", help="also rows of the present commit")
    parser.add_argument("--compile-only", action="store_true", help="compile kernels, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--rehearse", action="store_true", help="tiny, without a GPU")
    parser.add_argument("--check", action="store_true", help="fail where a prediction is wrong")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    options = parser.parse_args(words)
    for name, known in (("strategies", STRATEGIES), ("kinds", KINDS)):
        unknown = [x for x in getattr(options, name).split(",") if x not in known]
        if unknown:
            parser.error(f"--{name}: {', '.join(unknown)} is not among {', '.join(known)}")
    if options.rehearse and options.results == RESULTS:
        parser.error("--rehearse measures an interpreter: give its rows a folder with --results")
    return options


def spans_of(kind: str, heads: int, size: int, ranks: int, device: torch.device) -> list[Span]:
    """One segment a rank, tensors of the ranks behind each other, as kernels take them in place."""
    generator = torch.Generator().manual_seed(0)

    def made(*dims: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.rand(ranks, 1, 1, heads, *dims, generator=generator)
        return (scale * values).to(device)

    local = made(size, size)
    gates: dict[str, tuple[int, int]] = {"scalar": (1, 1), "rows": (size, 1), "full": (size, size)}
    decay = made(*gates[kind]) if kind in gates else None
    matrix = made(size, size, scale=1 / size) if kind == "dense" else None
    return [
        Span(
            (
                SpanState(
                    local[rank],
                    None if decay is None else decay[rank],
                    None if matrix is None else matrix[rank],
                ),
            )
        )
        for rank in range(ranks)
    ]


def samples(call: Callable[[], object], device: torch.device) -> list[float]:
    """Microseconds of a call: on a GPU of many in a graph, so that launches do not show."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
        return times
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            call()
    times = []
    while len(times) < REPLAYS or (len(times) < MOST_REPLAYS and not steady(times)):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        times.append(1e3 * begin_event.elapsed_time(end_event) / IN_A_GRAPH)
    return times


def steady(times: Sequence[float]) -> bool:
    """Whether further samples would hardly move the median."""
    fifths = statistics.quantiles(times, n=5)
    return fifths[3] - fifths[0] <= STEADY * statistics.median(times)


@dataclass(frozen=True)
class Case:
    """An exchange of `heads` heads between `ranks` virtual ranks."""

    kind: str
    heads: int
    ranks: int
    strategy: str

    @property
    def columns(self) -> dict[str, object]:
        """As columns of a row."""
        return {"kind": self.kind, "heads": self.heads, "W": self.ranks, "strategy": self.strategy}


def cases(options: argparse.Namespace) -> list[Case]:
    """All that the options name; first those whose values are named first."""
    axes = [
        options.kinds.split(","),
        [int(word) for word in options.heads.split(",")],
        [int(word) for word in options.ranks.split(",")],
        options.strategies.split(","),
    ]
    places = sorted(product(*(range(len(axis)) for axis in axes)), key=sum)
    return [Case(*(axis[i] for axis, i in zip(axes, place, strict=True))) for place in places]


def measure_exchanges(
    options: argparse.Namespace, device: torch.device, until: float | None
) -> None:
    """Rows of all exchanges that the options name, until a time of the clock."""
    machine = describe_machine(options.commit)
    store = exchange_rows(options.results, machine.slug)
    left = []
    for case in cases(options):
        name = {**machine.columns(), **case.columns, "K": options.size}
        known = store.get(name)
        if options.again or known is None or not machine.measured_same_code(known):
            left.append((case, name))
    heaps: dict[int, LocalHeap] = {}
    for number, (case, name) in enumerate(left):
        if until is not None and time.perf_counter() > until:
            print(f"time is up: {len(left) - number} exchanges left", flush=True)
            break
        heap = heaps.setdefault(case.ranks, LocalHeap(case.ranks, device))
        row = store.put(name | measure_one(case, options.size, heap))
        shown = (*case.columns, "median_us", "apart_us", "hop_us")
        print(" ".join(f"{n}={row[n]}" for n in shown if row[n]), flush=True)


def measure_one(case: Case, size: int, heap: LocalHeap) -> dict[str, object]:
    """Columns of an exchange alone."""
    spans = spans_of(case.kind, case.heads, size, case.ranks, heap.device)
    exchanger = DeviceExchanger(heap, case.strategy, timeout=20.0)
    found = {
        crossing: samples(
            partial(exchanger.prefix_all, spans, [crossing] * (case.ranks - 1)), heap.device
        )
        for crossing in (False, True)
    }
    exchanger.check()
    fifths = statistics.quantiles(found[True], n=5)
    median, apart = (statistics.median(found[crossing]) for crossing in (True, False))
    payload = Payload.of_heads(case.kind, case.heads, size, size)
    chain = case.strategy == "chain"
    sent = payload.state if chain else payload.element
    return {
        "median_us": median,
        "p20_us": fifths[0],
        "p80_us": fifths[3],
        "apart_us": apart,
        "hop_us": (median - apart) / (case.ranks - 1) if chain else None,
        "mib_hop": sent / 2**20,
    }


def compile_ahead(options: argparse.Namespace) -> int:
    """Every kernel that is launched, into Triton's cache; how many failed."""
    exchanges = []
    for case in cases(options):
        [span] = spans_of(case.kind, case.heads, options.size, 1, torch.device("cpu"))
        exchanges.append(Exchanged(signature_of(span, False), case.strategy, case.ranks))
    records = [*link_launches(), *exchange_records(exchanges)]
    return compile_launches(records, gpu_target(), options.jobs, options.seconds)


def measure_device(options: argparse.Namespace, device: torch.device) -> Device:
    """Links and rates, kept in their file."""
    if options.rehearse:
        from flexla_dist.testing.ranks import run_ranks

        link = run_ranks(rehearsed_link, 2)[0]
        return Device(link, measure_kernel_rates(device, (1, 3)))
    return Device(
        measure_heap_link(HeapTransport(LocalHeap(2, device))), measure_kernel_rates(device)
    )


def rehearsed_link(rank: int, size: int) -> Link:
    """A link between two processes, because interpreted programs of one launch cannot wait for
    each other: it stands for that of a GPU, and tells nothing of one."""
    heap = make_heap(None, "cpu", "posix_shm")
    transport = HeapTransport(heap, rounds=(1, 2))
    found = measure_heap_link(transport, sizes=(4 << 10, 16 << 10), repeats=2)
    heap.close()
    return replace(found, source=f"{found.source}, processes and the interpreter")


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write, print."""
    options = parse(words)
    if options.compile_only:
        return int(compile_ahead(options) > 0)
    begin = time.perf_counter()
    until = None if options.seconds is None else begin + options.seconds
    if not options.rehearse and not torch.cuda.is_available():
        print("local_exchange.py needs a CUDA device; --rehearse needs none", file=sys.stderr)
        return 2
    if options.rehearse and not INTERPRETED:
        print("local_exchange.py: --rehearse needs TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.rehearse else "cuda")
    count = CompileCount()
    slug = describe_machine(options.commit).slug
    known = measure_device(options, device)
    print(known.keep(options.results, slug))
    lines = [link_line("device", SAME_PROCESS, known.link), rates_line(known.rates)]
    lines.append(
        f"panel: {1e9 * known.link.panel_beta:.4g} ns a byte, {1e6 * known.link.credit:.4g} us a "
        f"credit, {1e6 * known.rates.step:.4g} us a step of copying"
    )
    print(section("Virtual ranks of one device", lines), flush=True)
    measure_exchanges(options, device, until)
    spent = time.perf_counter() - begin
    print(f"{spent:.0f} s, kernels found {count.found}, compiled here {count.compiled}")
    text, good = report(options.results, slug)
    print(f"\n{text}", flush=True)
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
