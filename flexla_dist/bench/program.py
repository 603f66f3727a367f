"""The program `flexla-dist bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexla_dist.compiler.explain.arguments import (
    DTYPES,
    Usage,
    parse_shape,
    parse_sizes,
    refuse_twice,
)
from flexla_dist.compiler.explain.call import describe
from flexla_dist.compiler.explain.load import load_spec
from flexla_dist.errors import ArgumentError, FlexlaError
from flexla_dist.spec.variants.registry import variant_names

DEFAULT_SHAPE = "1,16384,32,128,128"
DEVICE = "cuda"
ARCHES = ("sm_80", "sm_90", "sm_100")
DESCRIPTION = """Times an operator on this machine's GPU: the whole call (median, 20th and 80th
percentile), and every kernel by itself in its place, with counted bytes against a copy's bandwidth
and its configuration. With --tune it searches the configuration of every kernel and writes the ones
that gain more than 3 % to a tuning database, which calls then use; a stopped search goes on where
it was. --tune --compile-only compiles the candidates for Triton's cache and needs no GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Time or tune; 2 for a spec, settings or a machine that do not fit."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except (FlexlaError, OSError) as error:
        print(f"flexla-dist bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.compile_only and not args.tune:
        raise Usage("--compile-only compiles the candidates of a search; give --tune as well")
    if args.json and args.tune:
        raise Usage("--json is of timings; a search writes JSON to its database anyway")
    if args.plan and args.tune:
        raise Usage("--plan is of timings; kernels are tuned in the plan that calls run")
    if args.runs < 1:
        raise Usage(f"--runs is {args.runs}; expected at least 1")
    if not (torch.cuda.is_available() or args.compile_only):
        raise Usage("timing kernels needs a CUDA device, and this machine shows none")
    op, problem = _described(args)
    from flexla_dist.bench import search  # needs Triton, which the operator has looked for

    directions = search.DIRECTIONS[args.direction]
    if args.compile_only:
        return search.compile_only(args, op, problem, directions)
    call = search.real_call(op, problem, directions, DEVICE)
    if args.tune:
        return search.tune(args, call, problem)
    from flexla_dist.bench.report import report

    found = report(call, args.runs)
    print(json.dumps(found.data(), indent=1) if args.json else found)
    return 0


def _described(args: argparse.Namespace) -> tuple[Any, Any]:
    """The operator, and the call by its shapes alone."""
    from flexla_dist.ops.op import compile

    shape, sizes = parse_shape(args.shape or DEFAULT_SHAPE), parse_sizes(args.size)
    if args.shape is not None:
        refuse_twice(shape, sizes)
    loaded = load_spec(args.spec)
    spec = getattr(loaded, "spec", loaded)
    chunk = getattr(loaded, "chunk_size", None) if args.chunk_size is None else args.chunk_size
    op = compile(spec, executor="triton", chunk_size=chunk, tuned=args.database)
    if args.plan is not None:
        choose_plan(op.executor("triton"), args.plan)
    heads, width = shape.get("H", 32), shape.get("K", 128)
    problem = describe(
        spec,
        batch=shape.get("B", 1),
        tokens=shape.get("T", 16384),
        heads=heads,
        value_heads=heads if args.value_heads is None else args.value_heads,
        sizes={"K": width, "V": shape.get("V", width), **sizes},
        other=width,
        dtype=DTYPES[args.dtype],
        cu_seqlens=None,
        chunk_size=chunk,
    )
    return op, problem


def choose_plan(executor: Any, plan: str) -> None:
    """Give an executor a plan of its forward pass; raises ArgumentError where it has none such."""
    from flexla_dist.compiler.schedule import can_fuse

    if plan == "fused" and not can_fuse(executor.spec, executor.graphs.kernel_forward):
        raise ArgumentError(
            f"{executor.spec.name} has no fused plan: its output sums over columns; use "
            "--plan unfused"
        )
    executor.plan = plan


# -- the command line -----------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexla-dist bench",
        allow_abbrev=False,
        description=DESCRIPTION,
        epilog=f"variants: {', '.join(variant_names())}",
    )
    add = parser.add_argument
    add("spec", metavar="VARIANT|FILE.py:SPEC", help="as for flexla-dist explain")
    add("--shape", metavar="B,T,H,K,V", help=f"sizes of the call (default: {DEFAULT_SHAPE})")
    add("--value-heads", metavar="HV", type=int, help="heads of v and the state (default: H)")
    add(
        "--size",
        metavar="DIM=N",
        action="append",
        default=[],
        help="another size, as D=4096",
    )
    add("--dtype", choices=[d for d in DTYPES if d != "fp64"], default="bf16")
    add("--chunk-size", metavar="C", type=int, help="tokens of a chunk")
    add("--plan", choices=("fused", "unfused"), help="of the forward pass (default: the spec's)")
    add("--direction", choices=("fwd", "fwdbwd"), default="fwdbwd")
    add("--runs", type=int, default=10, help="runs that each time is the median of (default: 10)")
    add("--json", action="store_true", help="print the timings as JSON")
    add(
        "--database",
        metavar="FILE",
        type=Path,
        help="the tuning database to use, and to write with --tune (default: tuned/<arch>.json in "
        "the package's cache folder); that of the package is asked second",
    )
    add("--tune", action="store_true", help="search configurations")
    add("--grid", choices=("near", "wide"), default="near", help="what --tune tries")
    add("--state", metavar="FILE", type=Path, help="of a search (default: beside the database)")
    add("--again", action="store_true", help="also tune kernels that the state knows")
    add("--seconds", type=float, help="start no other kernel after this time")
    add("--jobs", type=int, default=1, help="processes that compile; 0 compiles in place")
    add("--commit", help="commit to note in entries, where there is no git history")
    add("--compile-only", action="store_true", help="with --tune: compile candidates, run nothing")
    add("--arch", choices=ARCHES, default="sm_90", help="what --compile-only compiles for")
    return parser
