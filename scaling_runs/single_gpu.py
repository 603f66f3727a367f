#!/usr/bin/env python3
"""Times our kernels, FLA, torch.compile and causal softmax attention on one GPU, in one run.

    python scaling_runs/single_gpu.py                     six variants, 1024 to 262144 tokens
    python scaling_runs/single_gpu.py --tokens 16384 --variants gla,simple_gla --impl ours,fla
    python scaling_runs/single_gpu.py --seconds 500 --lift-fla-guard --jobs 16
    python scaling_runs/single_gpu.py --compile-only      fill Triton's cache, no GPU needed
    python scaling_runs/single_gpu.py --preset sweep      GLA and softmax attention over B and T
    python scaling_runs/single_gpu.py --preset shapes     other shapes of the six variants

Rows go to scaling_runs/results/single_gpu_<gpu>.csv; a newer run replaces the rows of the same key.
B = 1, H = 32, K = V = 128 in bfloat16 (hgrn: D = 4096). `rel_err` compares the first heads with the
float64 torch executor. Rows of today at this commit are kept: a stopped run goes on where it was.
A preset has its own shapes, most important first, ours before other libraries. A point that does
not fit into memory is a row with a note.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.compiler.aot_pool import CompilePool
from flexla_dist.spec.variants import variant_names
from scaling_runs import single_presets
from scaling_runs.bench import COLUMNS, KEY, Bench, Point, Shape, compile_task, fits
from scaling_runs.compiling import compile_only, gpu_target
from scaling_runs.implementations import SOFTMAX, implementations
from scaling_runs.machine import RESULTS, describe_machine
from scaling_runs.measure import POINT_SECONDS
from scaling_runs.rows import RowStore, format_table

SHOWN = ("variant", "direction", "B", "T", "H", "HV", "V", *COLUMNS[13:22], "note")
VARIANTS = ("linear_attn", "simple_gla", "gla", "gated_delta_rule", "kda", "hgrn", SOFTMAX)
TOKENS = (1024, 4096, 16384, 65536, 262144)
DIRECTIONS = ("fwd", "fwdbwd")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*variant_names(), SOFTMAX)
    names = ("ours", "fla", "flashqla", "torch_compile", "sdpa")
    parser.add_argument(
        "--preset", choices=single_presets.PRESETS, help="its own batch, tokens, heads and size"
    )
    parser.add_argument("--variants", type=names_among(known), default=VARIANTS)
    parser.add_argument("--tokens", type=_numbers, default=TOKENS, help="comma-separated T")
    parser.add_argument("--directions", type=names_among(DIRECTIONS), default=DIRECTIONS)
    parser.add_argument("--impl", type=names_among(names), default=names)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--value-heads", type=int, default=0, help="where --heads are groups")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    parser.add_argument("--seconds", type=float, help="start no measurement after this time")
    parser.add_argument(
        "--point-seconds",
        type=float,
        default=POINT_SECONDS,
        help="calls of more than 40 ms are repeated less often, to about this time a point",
    )
    parser.add_argument("--again", action="store_true", help="also measure what this run has")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile our kernels")
    parser.add_argument("--compile-only", action="store_true", help="compile ours, run nothing")
    parser.add_argument("--target", type=int, default=90, help="capability for --compile-only")
    parser.add_argument("--no-errors", action="store_true", help="leave out rel_err")
    parser.add_argument(
        "--lift-fla-guard", action="store_true", help="also time backwards that FLA refuses here"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument(
        "--commit",
        help="commit to note; where there is no git history nothing is skipped without it",
    )
    return parser.parse_args(words)


def names_among(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads comma-separated names, all of which must be known."""

    def convert(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} is not among {', '.join(known)}"
            )
        return names

    return convert


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def points(options: argparse.Namespace) -> list[Point]:
    """By length, then variant, so that a short run has every variant; or those of a preset."""
    if options.preset is not None:
        given = (options.directions, options.variants, options.impl, options.dtype)
        return single_presets.points(options.preset, *given)
    batch, heads, size = options.batch, options.heads, options.size
    rest = (heads, size, size, options.dtype, options.value_heads)
    return [
        Point(
            tuple(Shape(variant, d, batch, tokens, *rest) for d in options.directions),
            tuple(options.impl),
        )
        for tokens in options.tokens
        for variant in options.variants
    ]


def compile_all(options: argparse.Namespace) -> int:
    """Compile our kernels of every point; 1 if one failed."""
    wanted = [
        {shape: ["ours"] for shape in point.shapes if fits(shape, "ours")}
        for point in points(options)
        if "ours" in point.impls
    ]
    tasks = [task for work in wanted if (task := compile_task(work)) is not None]
    return int(compile_only(tasks, ("cuda", options.target), options.jobs, options.seconds) > 0)


def main(words: Sequence[str] | None = None) -> int:
    """Measure everything that the options ask for."""
    options = parse(words)
    if options.compile_only:
        return compile_all(options)
    if not torch.cuda.is_available():
        print("single_gpu.py needs a CUDA device", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    machine = describe_machine(options.commit)
    store = RowStore(options.results / f"single_gpu_{machine.slug}.csv", COLUMNS, KEY)
    every = implementations(options.lift_fla_guard)
    bench = Bench(every, store, machine, limit_s=options.point_seconds)
    pending = [work for point in points(options) if (work := bench.work_of(point, options))]
    tasks = {i: task for i, work in enumerate(pending) if (task := compile_task(work)) is not None}
    left = 0
    with CompilePool(list(tasks.values()), gpu_target(), options.jobs) as pool:
        for index, work in enumerate(pending):
            if options.seconds is not None and time.perf_counter() - begin > options.seconds:
                left += len(work)
                continue
            if index in tasks:
                pool.wait(list(tasks).index(index))
            bench.run(work, not options.no_errors)
    print(format_table(bench.written, SHOWN))
    print(
        f"\n{len(bench.written)} rows, {left} shapes left, {time.perf_counter() - begin:.0f} s; "
        f"{store.path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
