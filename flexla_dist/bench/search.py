"""The searches of `flexla-dist bench`: compiling candidates, and tuning on a GPU."""

from __future__ import annotations

import argparse
import subprocess
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from flexla_dist.bench.calls import DIRECTIONS, BenchCall
from flexla_dist.bench.candidates import subjects
from flexla_dist.bench.outcomes import Provenance, compile_tasks, segment_task
from flexla_dist.bench.search_state import SearchState
from flexla_dist.bench.tune import Tuner
from flexla_dist.compiler.aot import CompiledInfo, Target
from flexla_dist.compiler.aot_pool import CompilePool, Result
from flexla_dist.compiler.executor.choosing import arch_of
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.tuned.database import read, user_file
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import make_inputs

__all__ = ["DIRECTIONS", "compile_only", "real_call", "tune"]


def real_call(
    op: LinearAttentionOp, problem: Problem, directions: tuple[str, ...], device: str
) -> BenchCall:
    """A call like a described one, with seeded tensors, that was made once."""
    inputs = problem.inputs.values()
    given = make_inputs(
        op.spec,
        batch=problem.batch,
        tokens=problem.tokens,
        heads=min(x.shape[2] for x in inputs),
        value_heads=problem.heads,
        sizes=problem.sizes,
        dtype=next(iter(inputs)).dtype,
        device=device,
    )
    call = BenchCall(op, given, directions)
    call()
    return call


def compile_only(
    args: argparse.Namespace, op: LinearAttentionOp, problem: Problem, directions: tuple[str, ...]
) -> int:
    """Compile the candidates of a described call; 1 where time was up before the last."""

    begin, executor = time.perf_counter(), op.executor("triton")
    assert isinstance(executor, TritonExecutor)
    found = subjects(executor, problem, directions, args.grid, args.arch)
    count = sum(len(subject.candidates) for subject in found)
    print(f"{op.spec.name}: {len(found)} kernels, {count} candidates", flush=True)
    tasks = compile_tasks(op.graphs, problem, executor.tuned, found)
    tasks.append(segment_task(op.graphs, problem, executor.tuned, directions))
    failed = made = 0
    with CompilePool(tasks, ("cuda", int(args.arch.removeprefix("sm_"))), args.jobs) as pool:
        for at in range(len(tasks)):
            if args.seconds is not None and time.perf_counter() - begin > args.seconds:
                print(f"time is up: {len(tasks) - at} of {len(tasks)} left; run again to go on")
                return 1
            kernel = found[at].emitted.name if at < len(found) else ""
            results = [x for x in pool.wait(at) if not kernel or _is_of(x, kernel)]
            made += len(results)
            for result in results:
                failed += not isinstance(result, CompiledInfo)
                print(f"  {at + 1}/{len(tasks)} {result}", flush=True)
    print(f"{made} compiled, {failed} failed, {time.perf_counter() - begin:.0f} s")
    return 0


def _is_of(result: Result, kernel: str) -> bool:
    return result.startswith(f"{kernel} ") if isinstance(result, str) else result.kernel == kernel


def tune(args: argparse.Namespace, call: BenchCall, described: Problem) -> int:
    """Search the configurations of a call; `described` is the same without memory."""
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
            tasks = compile_tasks(executor.graphs, described, tuner.base, todo)
            pool = stack.enter_context(CompilePool(tasks, _target(), args.jobs))
        spent = time.perf_counter() - begin
        left = tuner.run(todo, state, pool, None if args.seconds is None else args.seconds - spent)
    print(tuner.verify())
    print(
        f"{len(tuner.written)} entries written to {file}, {left} kernels left, "
        f"{time.perf_counter() - begin:.0f} s"
    )
    return 0


def _target() -> Target:
    """The present GPU as Triton names it."""
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
