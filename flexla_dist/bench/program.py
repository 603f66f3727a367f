"""The program `flexla-dist bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
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
from flexla_dist.compiler.tuned.database import read, user_file
from flexla_dist.errors import FlexlaError
from flexla_dist.spec.variants.registry import variant_names

DEFAULT_SHAPE = "1,16384,32,128,128"
TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
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
    if not (torch.cuda.is_available() or args.compile_only):
        raise Usage("timing kernels needs a CUDA device, and this machine shows none")
    from flexla_dist.bench.calls import DIRECTIONS

    op, problem = _described(args)
    directions = DIRECTIONS[args.direction]
    if args.compile_only:
        return _compile_only(args, op, problem, directions)
    from flexla_dist.bench.calls import BenchCall
    from flexla_dist.testing.inputs import make_inputs

    first = next(iter(problem.inputs.values()))
    heads = {x.shape[2] for x in problem.inputs.values()} | {problem.heads}
    given = make_inputs(
        op.spec,
        batch=problem.batch,
        tokens=problem.tokens,
        heads=min(heads),
        value_heads=problem.heads,
        sizes=problem.sizes,
        dtype=first.dtype,
        device="cuda",
    )
    call = BenchCall(op, given, directions)
    call()
    if args.tune:
        return _tune(args, call)
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


# -- the search -----------------------------------------------------------------------------------


def _compile_only(args: argparse.Namespace, op: Any, problem: Any, directions: Any) -> int:
    from flexla_dist.bench.candidates import subjects
    from flexla_dist.bench.tune import compile_tasks
    from flexla_dist.compiler.aot import CompiledInfo
    from flexla_dist.compiler.aot_pool import CompilePool

    begin, executor = time.perf_counter(), op.executor("triton")
    found = subjects(executor, problem, directions, args.grid, args.arch)
    count = sum(len(subject.candidates) for subject in found)
    print(f"{op.spec.name}: {len(found)} kernels, {count} candidates", flush=True)
    tasks = compile_tasks(op.graphs, problem, executor.tuned, found)
    failed = made = 0
    with CompilePool(tasks, ("cuda", TARGETS[args.arch]), args.jobs) as pool:
        for at, subject in enumerate(found):
            if args.seconds is not None and time.perf_counter() - begin > args.seconds:
                print(f"time is up: {len(found) - at} kernels left; run again to go on")
                return 1
            results = [x for x in pool.wait(at) if _is_of(x, subject.emitted.name)]
            made += len(results)
            for result in results:
                failed += not isinstance(result, CompiledInfo)
                print(f"  {at + 1}/{len(found)} {result}", flush=True)
    print(f"{made} compiled, {failed} failed, {time.perf_counter() - begin:.0f} s")
    return 0


def _is_of(result: Any, kernel: str) -> bool:
    return result.startswith(f"{kernel} ") if isinstance(result, str) else result.kernel == kernel


def _tune(args: argparse.Namespace, call: Any) -> int:
    from flexla_dist.bench.candidates import subjects
    from flexla_dist.bench.search_state import SearchState
    from flexla_dist.bench.tune import Provenance, Tuner, compile_tasks
    from flexla_dist.compiler.aot_pool import CompilePool
    from flexla_dist.compiler.executor.choosing import arch_of

    device, executor = call.problem.device, call.executor
    arch, begin = arch_of(device), time.perf_counter()
    file = args.database or user_file(arch)
    state = SearchState(args.state or file.with_suffix(".state.jsonl"), args.again)
    provenance = Provenance(
        datetime.now(UTC).date().isoformat(),
        args.commit or _commit(),
        torch.cuda.get_device_name(device),
    )
    tuner = Tuner(call, file, read(file, arch), provenance, runs=args.runs)
    tuner.tune_segments(state)
    found = subjects(executor, call.problem, call.directions, args.grid, arch)
    todo = [subject for subject in found if not state.knows(subject.key)]
    count = sum(len(subject.candidates) for subject in todo)
    print(f"{len(todo)} of {len(found)} kernels to tune, {count} candidates", flush=True)
    with ExitStack() as stack:
        pool = None
        if todo and args.jobs > 0:
            _, described = _described(args)
            tasks = compile_tasks(executor.graphs, described, tuner.base, todo)
            pool = stack.enter_context(CompilePool(tasks, _target(), args.jobs))
        left = tuner.run(todo, state, pool, args.seconds)
    print(tuner.verify())
    print(
        f"{len(tuner.written)} entries written to {file}, {left} kernels left, "
        f"{time.perf_counter() - begin:.0f} s"
    )
    return 0


def _target() -> tuple[str, Any, int]:
    """The present GPU as Triton names it."""
    import triton

    found = triton.runtime.driver.active.get_current_target()
    return (found.backend, found.arch, found.warp_size)


def _commit() -> str:
    """The commit of this code, where there is a history."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


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
    add("--arch", choices=TARGETS, default="sm_90", help="what --compile-only compiles for")
    return parser
