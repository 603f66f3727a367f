"""Step 0: all kernels of the other steps, compiled side by side into Triton's cache.

    python -m scaling_runs.multi_gpu_compile --sizes full --ranks 8 --jobs 32

Kernels of operators by `CompilePool`, kernels of the exchange by the launch that warms them. What
fails here is only told: the step that needs it says more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flexla_dist.comm import nodes_of_size
from flexla_dist.comm.device.layout import Layout, Signature
from flexla_dist.comm.device.plan import Place
from flexla_dist.comm.device.workspace import Memory, Workspace
from flexla_dist.comm.device_exchange import signature_of
from flexla_dist.comm.engines import span_of
from flexla_dist.compiler.aot import (
    CompileTask,
    LaunchRecord,
    Target,
    compile_launch,
    describe_call,
)
from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from scaling_runs.compiling import compile_only, gpu_target
from scaling_runs.multi_gpu_sizes import SIZES, Sizes
from scaling_runs.weak_cases import compiled, example_element, inputs_of
from scaling_runs.weak_grid import CallShape, Point

EVEN, UNEVEN = 8192, 523  # tokens of a shard
_FORK = multiprocessing.get_context("fork")


def operator_tasks(sizes: Sizes) -> list[CompileTask]:
    """Calls of the timed variants first, then of those that are compared or trained. Shards that
    are compared do not end with a whole chunk, those that are timed do."""
    first = [v for v in (*sizes.timed, *sizes.more_timed) if v in sizes.compiled]
    rest = [v for v in sizes.compiled if v not in first]
    tasks = [_task(v, sizes.shape, sizes.dtype, UNEVEN) for v in (*first, *rest)]
    tasks += [
        _task(v, text, sizes.dtype, EVEN) for v in first for text in (sizes.shape, sizes.wide)
    ]
    heads, dim = sizes.train_heads, sizes.train_dim
    trained = [v for v in sizes.trained if v in sizes.compiled]
    return tasks + [_task(v, f"1x{heads}x{dim}x{dim}", "float32", EVEN) for v in trained]


def _task(variant: str, text: str, dtype: str, tokens: int) -> CompileTask:
    shape = CallShape.parse(text)
    heads = 1 if variant == "hgrn" else shape.H
    graphs = compile(get_variant(variant)).graphs
    problem = describe_call(
        graphs,
        batch=shape.B,
        tokens=tokens,
        heads=heads,
        sizes={"K": shape.K, "V": shape.V, "D": shape.H * shape.V},
        dtype=getattr(torch, dtype),
    )
    return CompileTask(graphs, problem)


def signatures(sizes: Sizes) -> list[Signature]:
    """What the device engine exchanges in the steps, each once."""
    found: dict[Signature, None] = {}
    for variant in sizes.compiled:
        for text in (sizes.shape, sizes.wide):
            shape = vars(CallShape.parse(text))
            point = Point(
                "chain", variant, "weak", "barrier", "fwd", 1, 1, 1, **shape, dtype=sizes.dtype
            )
            given = inputs_of(point, 1, torch.device("cpu"), 1)
            inputs = {n: x.detach().float() for n, x in given.inputs.items()}
            given.inputs.update(inputs)
            found[signature_of(span_of(example_element(compiled(variant), given)), False)] = None
    return list(found)


class _Noted:
    """Stands for a kernel: notes launches instead of running them."""

    def __init__(self, function: Any, records: dict[str, LaunchRecord], name: str) -> None:
        self.function, self.records, self.name = function, records, name

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return self._note

    def _note(self, *arguments: Any, **keywords: Any) -> None:
        key = f"{self.name} {sorted(keywords.items())}"
        self.records[key] = LaunchRecord(
            "exchange", self.name, self.function, arguments, keywords, key
        )


def exchange_records(sizes: Sizes, ranks: int) -> Iterator[LaunchRecord]:
    """The launches by which an exchanger of so many ranks warms its kernels."""
    nodes = nodes_of_size(ranks, sizes.node_size(ranks) or ranks)
    device = torch.device("cpu")
    for signature in signatures(sizes):
        for strategy in sizes.strategies:
            first = Layout.of(signature, strategy, ranks, nodes, False)
            memory = Memory((torch.zeros(64, dtype=torch.uint8),), torch.zeros(ranks).long())
            layouts = (first, first.moved_by(first.nbytes))
            programs = min(sum(first.panels), 132)
            space = Workspace.make(signature, layouts, memory, "p2p", programs, 1000, 0)
            records: dict[str, LaunchRecord] = {}
            space.kernel = _Noted(space.kernel, records, f"{strategy} of {signature}")
            place = Place.of(0, 0, (False,) * (ranks - 1), nodes, (False, 1, 1, ()), False)
            space.warm(torch.tensor([place.row()], dtype=torch.int64, device=device))
            yield from records.values()


_LAUNCHES: list[LaunchRecord] = []  # of this process; forked ones find them by number


def _compile(work: tuple[int, Target]) -> str:
    number, target = work
    try:
        compile_launch(_LAUNCHES[number], target)
    except Exception as error:
        return f"{_LAUNCHES[number].kernel}: {type(error).__name__}: {error}"
    return ""


def compile_exchanges(sizes: Sizes, ranks: int, target: Target, jobs: int) -> int:
    """Compile the exchange kernels; how many failed."""
    _LAUNCHES[:] = exchange_records(sizes, ranks)
    failed = 0
    begin = time.perf_counter()
    if _LAUNCHES:
        with _FORK.Pool(min(jobs, len(_LAUNCHES))) as pool:
            for text in pool.imap_unordered(_compile, [(i, target) for i in range(len(_LAUNCHES))]):
                failed += bool(text)
                if text:
                    print(text[:500], flush=True)
    spent = time.perf_counter() - begin
    print(f"{len(_LAUNCHES)} kernels of exchanges, {failed} failed, {spent:.0f} s", flush=True)
    return failed


def _jobs() -> int:
    """As many as cores, at least 16 and not more than memory is likely to hold."""
    return min(64, max(16, len(os.sched_getaffinity(0))))


def main(words: Sequence[str] | None = None) -> int:
    """Compile everything that the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", choices=tuple(SIZES), default="full")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=_jobs(), help="processes that compile")
    parser.add_argument("--until", type=float, help="time (of time.time) to stop at")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    sizes, target = SIZES[options.sizes], gpu_target()
    failed = compile_exchanges(sizes, options.ranks, target, options.jobs)
    tasks = operator_tasks(sizes)
    if tasks:
        seconds = None if options.until is None else options.until - time.time()
        failed += compile_only(tasks, target, options.jobs, seconds)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
