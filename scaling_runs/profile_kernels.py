#!/usr/bin/env python3
"""Times every kernel of one call on the GPU, with registers, spills and shared memory of ours.

python scaling_runs/profile_kernels.py gla --tokens 16384 --direction fwdbwd
python scaling_runs/profile_kernels.py kda --impl fla
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.compiler.aot import CompiledInfo, compile_ahead
from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant, variant_names
from scaling_runs.bench import Case, Shape, gradient_seed, make_call
from scaling_runs.compiling import gpu_target
from scaling_runs.implementations import Fla, implementations
from scaling_runs.rows import format_table
from scaling_runs.single_gpu import DIRECTIONS

COLUMNS = ("kernel", "calls", "us", "share", "tiles", "warps", "regs", "stack", "shared")


@dataclass(frozen=True)
class KernelTime:
    """Device time of one kernel in one call: launches and their microseconds together."""

    kernel: str
    calls: float
    us: float


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variant", choices=variant_names())
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--direction", choices=DIRECTIONS, default="fwdbwd")
    parser.add_argument("--impl", choices=("ours", "fla", "torch_compile"), default="ours")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    parser.add_argument("--calls", type=int, default=10, help="calls to average over")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile our kernels")
    parser.add_argument("--lift-fla-guard", action="store_true")
    return parser.parse_args(words)


def kernel_times(case: Case, calls: int) -> list[KernelTime]:
    """Kernels of a call, longest first."""
    for _ in range(3):
        case()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            case()
        torch.cuda.synchronize()
    found = [
        KernelTime(event.key, event.count / calls, event.self_device_time_total / calls)
        for event in profile.key_averages()
        if event.self_device_time_total > 0 and event.device_type != torch.autograd.DeviceType.CPU
    ]
    return sorted(found, key=lambda kernel: -kernel.us)


def table_rows(
    times: Sequence[KernelTime], compiled: Sequence[CompiledInfo]
) -> list[dict[str, object]]:
    """Rows to print; resources are those of the kernels of the same name."""
    total = sum(kernel.us for kernel in times)
    rows: list[dict[str, object]] = []
    for kernel in times:
        mine = [info for info in compiled if info.kernel == kernel.kernel]
        row: dict[str, object] = {
            "kernel": kernel.kernel[:60],
            "calls": f"{kernel.calls:g}",
            "us": f"{kernel.us:.1f}",
            "share": f"{kernel.us / total:.1%}",
        }
        if mine:
            row |= {
                "tiles": " ".join(
                    f"{k.removeprefix('tile_')}{v}" for k, v in mine[0].tiles.items()
                ),
                "warps": mine[0].warps,
                "regs": _each(info.regs for info in mine),
                "stack": _each(info.stack_bytes for info in mine),
                "shared": _each(info.shared_bytes for info in mine),
            }
        rows.append(row)
    rows.append({"kernel": "all", "us": f"{total:.1f}"})
    return rows


def _each(values: Iterable[object]) -> str:
    return "/".join(dict.fromkeys(str(value) for value in values))


def resources(shape: Shape, jobs: int) -> list[CompiledInfo]:
    """What the kernels of the call use; the call finds them in Triton's cache."""
    return compile_ahead(
        compile(get_variant(shape.variant)),
        batch=shape.B,
        tokens=shape.T,
        heads=shape.heads,
        sizes=shape.sizes,
        dtype=getattr(torch, shape.dtype),
        directions=("forward", "backward") if shape.direction == "fwdbwd" else ("forward",),
        target=gpu_target(),
        jobs=jobs,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Profile and print."""
    options = parse(words)
    if not torch.cuda.is_available():
        print("profile_kernels.py needs a CUDA device", file=sys.stderr)
        return 2
    shape = Shape(
        options.variant,
        options.direction,
        options.batch,
        options.tokens,
        options.heads,
        options.size,
        options.size,
        options.dtype,
    )
    compiled = resources(shape, options.jobs) if options.impl == "ours" else []
    call = make_call(shape)
    seed = gradient_seed(shape, call) if shape.direction == "fwdbwd" else None
    impl = implementations(options.lift_fla_guard)[options.impl]
    prepared = impl.prepare(shape.variant, call, shape.direction)
    with impl.lifted(prepared.version) if isinstance(impl, Fla) else nullcontext():
        times = kernel_times(Case(prepared.forward, call, seed), options.calls)
    print(format_table(table_rows(times, compiled), COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
