"""Kernels of virtual ranks, compiled on a machine with or without a GPU before they are needed.

Contract: every launch of an exchange is noted as the programs make it, on tensors without memory,
and compiled for a target into Triton's cache; nothing runs. What a launch is told by numbers
(ranks, heads, offsets, limits) is in no key; strategy, kinds and tiles of M, delay, how many rounds
doubling takes, and that all ranks are in one launch, are. `tests/unit/test_virtual_compile.py`
compares the keys with those that launches look up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flexla_dist.comm.chooser import heap_kernels, heap_transport
from flexla_dist.comm.chooser.heap_transport import (
    HeapTransport,
    measure_heap_link,
    measure_kernel_rates,
)
from flexla_dist.comm.device import workspace as workspaces
from flexla_dist.comm.device.layout import Layout, Signature
from flexla_dist.comm.device.plan import Place
from flexla_dist.comm.device.workspace import Memory, Workspace
from flexla_dist.comm.device_exchange import Span, signature_of
from flexla_dist.comm.heaps import LocalHeap
from flexla_dist.compiler.aot import (
    CompileTask,
    LaunchRecord,
    _RecordingExecutor,
    describe_call,
)
from flexla_dist.compiler.executor.planned_launches import Heads
from flexla_dist.compiler.executor.problem import Problem
from scaling_runs.virtual_run import span_of
from scaling_runs.weak_cases import compiled

META = torch.device("meta")
PROCESSORS = 132  # of an H200; how many messages a launch has at once follows from it


@dataclass(frozen=True)
class Exchanged:
    """An exchange between virtual ranks; delays: of messages, in ns, each a kernel of its own."""

    signature: Signature
    strategy: str
    ranks: int
    delays: tuple[int, ...] = (0,)


class Noted:
    """Stands for a kernel: notes launches instead of running them."""

    def __init__(
        self, function: Any, records: dict[str, LaunchRecord], name: str, sound: bool = True
    ) -> None:
        self.function, self.records = function, records
        self.name, self.sound = name, sound

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return self.note

    def note(self, *arguments: Any, **keywords: Any) -> None:
        """A launch."""
        told = zip(self.function.params, arguments, strict=False)
        kinds = [
            str(x.dtype) if isinstance(x, torch.Tensor) else type(x) if p.do_not_specialize else x
            for p, x in told
        ]
        key = f"{self.function.cache_key} {kinds} {sorted(keywords.items())}"
        self.records[key] = LaunchRecord(
            "exchange", self.name, self.function, arguments, keywords, key, self.sound
        )


def exchange_launches(one: Exchanged) -> list[LaunchRecord]:
    """The launches by which a `DeviceExchanger` of virtual ranks warms its kernels."""
    records: dict[str, LaunchRecord] = {}
    nodes, ranks = (0,) * one.ranks, one.ranks
    first = Layout.of(one.signature, one.strategy, ranks, nodes, False)
    layouts = (first, first.moved_by(first.nbytes))
    parts = (torch.empty(64, dtype=torch.uint8, device=META),) * ranks
    memory = Memory(parts, torch.empty(ranks, dtype=torch.int64, device=META))
    place = Place.of(0, 0, (False,) * (ranks - 1), nodes, (False, 1, 1, ()), False)
    plan = torch.empty(ranks, len(place.row()), dtype=torch.int64, device=META)
    for delay in one.delays:
        space = Workspace.make(one.signature, layouts, memory, "p2p", 1, 1000, delay)
        space.kernel = Noted(space.kernel, records, f"{one.strategy} of {one.signature}")
        space.warm(plan)
    return list(records.values())


@contextmanager
def _noting(records: dict[str, LaunchRecord]) -> Iterator[None]:
    """Kernels that time messages are noted, for a device of so many processors."""
    places = [
        (heap_kernels, "rounds_of_messages"),
        (heap_kernels, "products"),
        (workspaces, "_look"),
    ]
    held = [(place, name, getattr(place, name)) for place, name in places]
    real = heap_transport.processors
    for place, name, function in held:
        setattr(place, name, Noted(function, records, name, sound=False))
    heap_transport.processors = lambda device: PROCESSORS
    try:
        yield
    finally:
        heap_transport.processors = real
        for place, name, function in held:
            setattr(place, name, function)


def link_launches() -> list[LaunchRecord]:
    """Launches that measure links and rates of virtual ranks, and how fast waits look."""
    records: dict[str, LaunchRecord] = {}
    cpu = torch.device("cpu")
    with _noting(records):
        workspaces.looks_per_second(cpu)
        measure_heap_link(HeapTransport(LocalHeap(2, cpu)), repeats=1)
        measure_kernel_rates(cpu)
    return list(records.values())


def problem_of(
    variant: str, batch: int, tokens: int, heads: int, size: int, dtype: torch.dtype
) -> Problem:
    """A call of one rank, without memory. Vectors of a state alone are as long as all heads."""
    return describe_call(
        compiled(variant).graphs,
        batch=batch,
        tokens=tokens,
        heads=heads,
        sizes={"K": size, "V": size, "D": size, "M": size},
        dtype=dtype,
    )


def task_of(variant: str, problem: Problem, groups: tuple[Heads, ...]) -> CompileTask:
    """Kernels of a rank: of its shard alone, and where it stops for what crosses ranks."""
    return CompileTask(compiled(variant).graphs, problem, groups=groups)


def signature_for(variant: str, problem: Problem) -> Signature:
    """What the ranks of such calls exchange, forward and backward."""
    executor = _RecordingExecutor(compiled(variant).graphs)
    opened = executor.open_forward(problem, problem.zero_state(), ((0, problem.heads),))
    span: Span = span_of(opened)
    return signature_of(span, False)


def exchange_records(exchanges: Sequence[Exchanged]) -> list[LaunchRecord]:
    """Launches of all of them, each once."""
    found = {r.key: r for one in dict.fromkeys(exchanges) for r in exchange_launches(one)}
    return list(found.values())
