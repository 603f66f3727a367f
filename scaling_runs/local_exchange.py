#!/usr/bin/env python3
"""Measures links, rates and exchanges of virtual ranks on one GPU, and compares the predictions.

    python scaling_runs/local_exchange.py                        about two minutes on a GPU
    python scaling_runs/local_exchange.py --ranks 4 --kinds dense --heads 32
    TRITON_INTERPRET=1 python scaling_runs/local_exchange.py --rehearse --ranks 2,3 --heads 1 \\
        --size 16 --results some/folder                          in the interpreter, without a GPU

Messages between virtual ranks of one launch are timed as the chooser times links, products as the
kernels of an exchange make them. Then exchanges alone, replayed from a graph, with every cut
crossed and with none: the difference is what the chooser predicts. Links go to
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
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.comm.chooser.heap_transport import (
    HeapTransport,
    measure_heap_link,
    measure_kernel_rates,
)
from flexla_dist.comm.chooser.links import Link
from flexla_dist.comm.chooser.report import link_line, rates_line, section
from flexla_dist.comm.device.workspace import INTERPRETED
from flexla_dist.comm.device_exchange import DeviceExchanger, Span, SpanState
from flexla_dist.comm.heaps import LocalHeap, make_heap
from flexla_dist.comm.topology import SAME_PROCESS
from scaling_runs.machine import RESULTS, describe_machine
from scaling_runs.model.local_heap import Device, exchange_rows, report

STRATEGIES = ("chain", "log_scan", "all_gather")
KINDS = ("none", "scalar", "rows", "full", "dense")
IN_A_GRAPH, REPLAYS = 10, 30


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    parser.add_argument("--kinds", default="scalar,dense", help="kinds of M, comma-separated")
    parser.add_argument("--ranks", default="2,4,8", help="virtual ranks, comma-separated")
    parser.add_argument("--heads", default="1,8,32,128", help="heads times rows, comma-separated")
    parser.add_argument("--size", type=int, default=128, help="K and V, default 128")
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
    for _ in range(REPLAYS):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        times.append(1e3 * begin_event.elapsed_time(end_event) / IN_A_GRAPH)
    return times


def measure_exchanges(options: argparse.Namespace, device: torch.device) -> None:
    """Rows of all exchanges that the options name."""
    machine = describe_machine(options.commit)
    store = exchange_rows(options.results, machine.slug)
    for ranks in map(int, options.ranks.split(",")):
        heap = LocalHeap(ranks, device)
        for kind in options.kinds.split(","):
            for heads in map(int, options.heads.split(",")):
                spans = spans_of(kind, heads, options.size, ranks, device)
                for strategy in options.strategies.split(","):
                    exchanger = DeviceExchanger(heap, strategy, timeout=20.0)
                    calls = {
                        crossing: partial(exchanger.prefix_all, spans, [crossing] * (ranks - 1))
                        for crossing in (False, True)
                    }
                    found = {c: samples(call, device) for c, call in calls.items()}
                    exchanger.check()
                    fifths = statistics.quantiles(found[True], n=5)
                    row = machine.columns() | {"kind": kind, "heads": heads, "K": options.size}
                    row |= {"W": ranks, "strategy": strategy}
                    row |= {"median_us": statistics.median(found[True]), "p20_us": fifths[0]}
                    row |= {"p80_us": fifths[3], "apart_us": statistics.median(found[False])}
                    store.put(row)
        heap.close()


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
    if not options.rehearse and not torch.cuda.is_available():
        print("local_exchange.py needs a CUDA device; --rehearse needs none", file=sys.stderr)
        return 2
    if options.rehearse and not INTERPRETED:
        print("local_exchange.py: --rehearse needs TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.rehearse else "cuda")
    slug = describe_machine(options.commit).slug
    known = measure_device(options, device)
    print(known.keep(options.results, slug))
    lines = [link_line("device", SAME_PROCESS, known.link), rates_line(known.rates)]
    lines.append(f"panel: {1e9 * known.link.panel_beta:.4g} ns a byte")
    print(section("Virtual ranks of one device", lines), flush=True)
    measure_exchanges(options, device)
    text, good = report(options.results, slug)
    print(f"\n{text}", flush=True)
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
