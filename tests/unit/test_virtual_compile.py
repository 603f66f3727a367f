"""Kernels of virtual ranks that were compiled ahead have the names that launches look up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from triton.backends.compiler import GPUTarget
from triton.compiler import compiler as triton_compiler
from triton.runtime import driver

from flexla_dist.assembler import HOPPER_OPTIONS, assembling
from flexla_dist.comm import device_exchange
from flexla_dist.comm.chooser import heap_transport
from flexla_dist.comm.chooser.heap_transport import HeapTransport, measure_heap_link
from flexla_dist.comm.device import workspace as workspaces
from flexla_dist.comm.device_exchange import DeviceExchanger, signature_of
from flexla_dist.comm.heaps import LocalHeap
from flexla_dist.compiler import aot
from flexla_dist.compiler.aot import LaunchRecord, _RecordingExecutor, record_launches
from flexla_dist.compiler.executor import launch
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import make_inputs
from scaling_runs.local_exchange import spans_of
from scaling_runs.virtual_compile import (
    META,
    Exchanged,
    exchange_launches,
    exchange_records,
    link_launches,
    problem_of,
    signature_for,
    task_of,
)
from scaling_runs.virtual_run import VirtualRanks, span_of
from scaling_runs.weak_cases import compiled

CPU = torch.device("cpu")


class Name(Exception):
    """The name of a kernel in Triton's cache, found instead of the kernel."""


class Hopper:
    """Double of Triton's driver: an H200 is here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton names kernels and compiles none."""

    def found(name: str) -> Any:
        raise Name(name)

    monkeypatch.setattr(triton_compiler, "get_cache_manager", found)
    held = driver._active
    driver.set_active(Hopper())
    yield
    driver._active = held


def ahead(records: list[LaunchRecord]) -> set[str]:
    """Names under which kernels are compiled ahead."""
    found = set()
    for record in records:
        with pytest.raises(Name) as name:
            aot.compile_launch(record)
        found.add(str(name.value))
    return found


class Looked:
    """Stands for a kernel: launches it as far as the name that it has in the cache."""

    def __init__(self, function: Any, found: set[str], sound: bool):
        self.function, self.found, self.sound = function, found, sound

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **keywords: Any) -> None:
        self.function.device_caches.clear()
        with assembling(90 if self.sound else 0), pytest.raises(Name) as name:
            self.function[(1,)](*arguments, **keywords)
        self.found.add(str(name.value))


@pytest.mark.parametrize("strategy", ["chain", "log_scan", "all_gather"])
@pytest.mark.parametrize("kind", ["scalar", "dense"])
def test_exchanges(kind: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an exchange of real spans launches, forward and backward, of all heads and of some."""
    ranks, found = 4, set[str]()
    spans = spans_of(kind, 8, 128, ranks, CPU)
    monkeypatch.setattr(device_exchange, "INTERPRETED", True)  # the CPU plays the device
    monkeypatch.setattr(device_exchange, "looks_per_second", lambda device: 1e6)
    monkeypatch.setattr(workspaces, "sound_options", lambda device: HOPPER_OPTIONS)
    for settings in ({}, {"delay_ns": 30000}, {"waits": False}):
        exchanger = DeviceExchanger(LocalHeap(ranks, CPU), strategy, **settings)
        space = exchanger.prepare(spans[0])
        space.kernel = Looked(space.kernel, found, sound=True)
        exchanger.prefix_all(spans, [True] * 3)
        exchanger.suffix_all(spans, [True] * 3, heads=(2, 5))
    one = Exchanged(signature_of(spans[0], False), strategy, ranks, (0, 30000))
    wide = Exchanged(signature_of(spans_of(kind, 32, 128, ranks, CPU)[0], False), strategy, ranks)
    assert found <= ahead(exchange_launches(one)) and len(found) == 2
    assert ahead(exchange_launches(wide)) <= ahead(exchange_launches(one))


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures links and rates."""
    from flexla_dist.comm.chooser import heap_kernels

    found = set[str]()
    monkeypatch.setattr(heap_transport, "processors", lambda device: 132)
    for place, name in (
        (heap_kernels, "rounds_of_messages"),
        (heap_kernels, "products"),
        (workspaces, "_look"),
    ):
        monkeypatch.setattr(place, name, Looked(getattr(place, name), found, sound=False))
    measure_heap_link(HeapTransport(LocalHeap(2, CPU)), repeats=1)
    heap_transport.measure_kernel_rates(CPU)
    workspaces.looks_per_second(CPU)
    monkeypatch.undo()
    monkeypatch.setattr(triton_compiler, "get_cache_manager", _raise)
    assert found == ahead(link_launches())


def _raise(name: str) -> Any:
    raise Name(name)


@pytest.mark.parametrize("tokens", [64, 75])
@pytest.mark.parametrize("variant", ["simple_gla", "gated_delta_rule", "hgrn"])
def test_operators(variant: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks launch on tensors, in one or two groups of heads, and their shards alone."""
    options = launch.Launch.options
    monkeypatch.setattr(launch, "check_sizes", lambda *_: None)  # the CPU plays the device
    monkeypatch.setattr(launch.Launch, "options", lambda self, _: options(self, META))
    ranks, heads, size = 2, 8, 128
    op = LinearAttentionOp(compiled(variant).graphs, "triton", None)
    executor = op._executors["triton"] = _RecordingExecutor(op.graphs)
    call = make_inputs(
        op.spec, batch=1, tokens=tokens * ranks, heads=heads, value_heads=heads,
        sizes={"K": size, "V": size, "D": size}, dtype=torch.bfloat16,
    )  # fmt: skip
    problem = problem_of(variant, 1, tokens, heads, size, torch.bfloat16)
    seed = torch.ones_like(call.inputs["x" if variant == "hgrn" else "v"])
    for groups in (1, 2):
        executor.records = {}
        virtual = VirtualRanks(op, call, ranks, groups)
        virtual.run(Nobody(), seed)  # type: ignore[arg-type]
        virtual.alone_backward(virtual.alone(), virtual.seeds(seed))
        task = task_of(variant, problem, virtual.groups)
        want = [r for d in ("forward", "backward") for r in record_launches(task, d)]
        assert ahead(list(executor.records.values())) == ahead(want)
    opened = executor.open_forward(virtual.problems[0], virtual.problems[0].zero_state())
    assert signature_for(variant, problem) == signature_of(span_of(opened), False)


class Nobody:
    """Double of an exchange: nothing enters."""

    def prefix_all(self, spans: Any, crossing: Any, heads: Any, into: Any) -> Any:
        return [tuple(torch.zeros_like(s.local) for s in span.states) for span in spans]

    suffix_all = prefix_all


def test_each_launch_once() -> None:
    signature = signature_for(
        "gated_delta_rule", problem_of("gated_delta_rule", 1, 64, 8, 64, torch.bfloat16)
    )
    one = Exchanged(signature, "chain", 2, (0,))
    assert len(exchange_records([one, one, Exchanged(signature, "chain", 8, (0,))])) == 2
