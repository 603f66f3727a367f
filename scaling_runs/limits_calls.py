#!/usr/bin/env python3
"""Calls for Nsight Compute to watch: one call of each case, after calls that compile and tune.

    ncu --profile-from-start off ... python scaling_runs/limits_calls.py --cases gla:fwd:ours

`limits.py` starts it. Between the cases a marker kernel runs whose grid is the case's number + 1,
so that the launches that the tool lists can be told apart. It ends before a case that would begin
after `--seconds`, and goes on past one that fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling_runs.bench import Case, Shape, gradient_seed, make_call
from scaling_runs.implementations import Fla, implementations

MARKER = "limits_marker"


@triton.jit
def limits_marker(out_ptr):
    """Says by its grid which case comes next."""
    tl.store(out_ptr + tl.program_id(0), 1.0)


@dataclass(frozen=True)
class Ready:
    """A call, what must be entered around it, and how rows name it."""

    case: Case
    around: AbstractContextManager[None]
    version: str
    plan: Callable[[], str]


def make_case(shape: Shape, name: str, lift_guard: bool) -> Ready:
    """A call ready to run.

    Raises:
        Unavailable: the implementation cannot run it.
    """
    call = make_call(shape)
    seed = gradient_seed(shape, call) if shape.direction == "fwdbwd" else None
    impl = implementations(lift_guard)[name]
    prepared = impl.prepare(shape.variant, call, shape.direction)
    around = impl.lifted(prepared.version) if isinstance(impl, Fla) else nullcontext()
    plan = prepared.plan if name == "ours" else str
    return Ready(Case(prepared.forward, call, seed), around, prepared.version, plan)


def watched(shape: Shape, name: str, lift_guard: bool, number: int, marks: Tensor) -> None:
    """Warm up a call, then make it once where the tool watches."""
    ready = make_case(shape, name, lift_guard)
    with ready.around:
        for _ in range(3):
            ready.case()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        try:
            limits_marker[(number + 1,)](marks)
            ready.case()
            torch.cuda.synchronize()
        finally:
            torch.cuda.profiler.stop()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", required=True, help="variant:direction:implementation,...")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--lift-fla-guard", action="store_true")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases."""
    options = parse(words)
    begin = time.perf_counter()
    marks = torch.zeros(1024, device="cuda")
    for number, text in enumerate(options.cases.split(",")):
        if time.perf_counter() - begin > options.seconds:
            break
        variant, direction, name = text.split(":")
        batch, tokens, heads, size = options.batch, options.tokens, options.heads, options.size
        shape = Shape(variant, direction, batch, tokens, heads, size, size, "bfloat16")
        try:
            watched(shape, name, options.lift_fla_guard, number, marks)
        except Exception as failure:
            print(f"{text}: {type(failure).__name__}: {failure}", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
