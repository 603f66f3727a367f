#!/usr/bin/env python3
"""What limits each kernel of a call, ours and FLA's: time, share, bytes, FLOPs, hardware counters.

    python scaling_runs/limits.py --seconds 150 --lift-fla-guard --commit 1a2b3c4
    python scaling_runs/limits.py --variants gla --directions fwd --impl ours --no-counters
    python scaling_runs/limits.py --compile-only --jobs 2      fill Triton's cache, no GPU needed

Rows go to scaling_runs/results/limits_<gpu>.csv, one a launch and one (`all`) a call, and are kept
until a newer run of the case. `us`: PyTorch's profiler, median of several calls. `moved_mb`,
`gflop`: counted from our plan, every tensor once for each kernel; `bound`: which of them takes
longer at an H200's measured rates. `floor_mb`, `floor_gflop` of a call: inputs, outputs and
gradients once, and the products that no plan can do without. `ncu_us` and what follows it: counters
of one replayed launch by Nsight Compute; of a call, the sum, or the mean weighted with the time.
Where the tool cannot read them those columns are empty and `note` says why.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from scaling_runs.bench import Shape, compile_task
from scaling_runs.compiling import compile_only
from scaling_runs.implementations import Unavailable
from scaling_runs.limits_calls import make_case
from scaling_runs.limits_kernels import profile_call
from scaling_runs.limits_ncu import Tool, counters, find_tool
from scaling_runs.limits_rows import COLUMNS, KEY, LimitRows
from scaling_runs.machine import RESULTS, describe_machine
from scaling_runs.rows import RowStore, format_table
from scaling_runs.single_gpu import DIRECTIONS, names_among

VARIANTS = ("gla", "gated_delta_rule", "simple_gla", "kda", "linear_attn", "hgrn")
IMPLS = ("ours", "fla")
SHOWN = (
    *("variant", "direction", "impl", "kernel", "launches", "us", "share", "tbs", "tflops"),
    *("tensor_pct", "dram_pct", "note"),
)
LEAST = 10.0  # seconds that must be left to count anything
TUNED = "TRITON_CACHE_AUTOTUNING"  # what FLA tunes is found again by the process that counts


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", type=names_among(VARIANTS), default=VARIANTS)
    parser.add_argument("--directions", type=names_among(DIRECTIONS), default=DIRECTIONS)
    parser.add_argument("--impl", type=names_among(IMPLS), default=IMPLS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    parser.add_argument("--calls", type=int, default=10, help="profiled calls of a case")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after this")
    parser.add_argument(
        "--counter-seconds", type=float, default=45.0, help="of each library's counted calls"
    )
    parser.add_argument("--no-counters", action="store_true", help="leave ncu out")
    parser.add_argument("--again", action="store_true", help="also what this run has")
    parser.add_argument("--lift-fla-guard", action="store_true")
    parser.add_argument("--compile-only", action="store_true", help="compile ours, run nothing")
    parser.add_argument("--target", type=int, default=90, help="capability for --compile-only")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument("--commit", help="commit to note, where there is no git history")
    return parser.parse_args(words)


def cases(options: argparse.Namespace, impl: str) -> list[tuple[Shape, str]]:
    """Calls of one library, forward passes first."""
    size, batch, tokens, heads = options.size, options.batch, options.tokens, options.heads
    return [
        (Shape(variant, direction, batch, tokens, heads, size, size, "bfloat16"), impl)
        for direction in options.directions
        for variant in options.variants
    ]


def time_cases(rows: LimitRows, options: argparse.Namespace, impl: str, end: float) -> int:
    """Profile what has no row yet; how many cases were left for want of time."""
    left = 0
    for shape, _ in cases(options, impl):
        if not options.again and rows.is_new(shape, impl):
            continue
        if time.perf_counter() > end:
            left += 1
            continue
        label = f"{shape.variant} {shape.direction} {impl}"
        try:
            ready = make_case(shape, impl, options.lift_fla_guard)
            with ready.around:
                launches = profile_call(ready.case, options.calls)
                call_ms = triton.testing.do_bench(
                    ready.case, warmup=10, rep=60, return_mode="median"
                )
        except Unavailable as why:
            print(f"{label}: {why}", flush=True)
            continue
        except Exception as failure:
            text = " ".join(str(failure).split())[:300]
            print(f"{label}: FAILED {type(failure).__name__}: {text}", flush=True)
            if "illegal memory access" in text:
                raise
            continue
        whole = rows.write(shape, impl, ready.version, ready.plan(), launches, call_ms)
        print(f"{label}: {whole['us']} us in {whole['launches']} launches", flush=True)
        torch.cuda.empty_cache()
    return left


def count_cases(
    rows: LimitRows, options: argparse.Namespace, impl: str, tool: Tool | None, end: float
) -> Tool | None:
    """Counters of the cases that have none. The tool is looked for when it is first wanted."""
    wanted = {
        f"{shape.variant}:{shape.direction}:{impl}": shape
        for shape, _ in cases(options, impl)
        if rows.is_new(shape, impl) and not rows.is_counted(shape, impl)
    }
    seconds = min(options.counter_seconds, end - time.perf_counter())
    if not wanted:
        return tool
    if seconds < LEAST and (tool is None or not tool.why_not):
        print(f"{impl}: no time left for counters", flush=True)
        return tool
    tool = find_tool() if tool is None else tool
    if tool.why_not:
        print(f"{impl}: no counters: {tool.why_not}", flush=True)
        for shape in wanted.values():
            rows.note(shape, impl, f"no counters: {tool.why_not}")
        return tool
    words = [f"--{name}={getattr(options, name)}" for name in ("tokens", "heads", "batch", "size")]
    words += ["--lift-fla-guard"] if options.lift_fla_guard else []
    found, problem = counters(tool, list(wanted), words, seconds)
    for name, shape in wanted.items():
        said = "" if found.get(name) else problem or "the time ended before this call"
        counted = rows.count(shape, impl, found.get(name, []), said)
        print(f"{name}: {'counted' if counted else 'no counters'}", flush=True)
    return tool


def main(words: Sequence[str] | None = None) -> int:
    """Measure what the options ask for: ours, then FLA's."""
    options = parse(words)
    if options.compile_only:
        tasks = [compile_task({shape: ["ours"]}) for shape, _ in cases(options, "ours")]
        wanted = [task for task in tasks if task is not None]
        return int(compile_only(wanted, ("cuda", options.target), options.jobs, None) > 0)
    if not torch.cuda.is_available():
        print("limits.py needs a CUDA device", file=sys.stderr)
        return 2
    os.environ.setdefault(TUNED, "1")
    end = time.perf_counter() + options.seconds
    machine = describe_machine(options.commit)
    store = RowStore(options.results / f"limits_{machine.slug}.csv", COLUMNS, KEY)
    rows = LimitRows(store, machine)
    left, tool = 0, Tool("", {}, "not asked for") if options.no_counters else None
    for impl in options.impl:
        left += time_cases(rows, options, impl, end)
        torch.cuda.empty_cache()
        tool = count_cases(rows, options, impl, tool, end)
    shown: Sequence[Mapping[str, str]] = rows.written()
    print(format_table(shown, SHOWN))
    print(f"\n{len(shown)} rows, {left} calls left; {store.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
