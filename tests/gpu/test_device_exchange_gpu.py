"""The exchange kernel on a GPU: virtual ranks in one launch, processes on one GPU, NVSHMEM's verbs.

Measurements are printed: `pytest -s -k time`.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from flexla_dist.comm.device import nvshmem as verbs
from flexla_dist.comm.device_exchange import DeviceExchanger, Span, SpanState
from flexla_dist.comm.errors import ExchangeTimeout
from flexla_dist.comm.heaps import LocalHeap, make_heap
from flexla_dist.testing.ranks import run_ranks

from ..interpret import device_exchange_cases as cases

pytestmark = pytest.mark.gpu
TOLERANCE = {"dense": 5e-5, "two_states": 5e-5}  # TF32x3 products, chained
OVERLAP = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def on_gpu(spans: Sequence[Span]) -> list[Span]:
    """The spans on the GPU, their tensors behind each other, so that they are used in place."""

    def moved(tensors: list[Tensor | None]) -> list[Tensor | None]:
        if tensors[0] is None:
            return tensors
        return list(torch.stack([t for t in tensors if t is not None]).cuda())

    columns = []
    for index in range(len(spans[0].states)):
        states = [span.states[index] for span in spans]
        parts = (moved([getattr(s, n) for s in states]) for n in ("local", "decay", "matrix"))
        columns.append([SpanState(*part) for part in zip(*parts, strict=True)])
    return [replace(span, states=tuple(c[i] for c in columns)) for i, span in enumerate(spans)]


def virtual(size: int, strategy: str, **settings: Any) -> DeviceExchanger:
    nodes = tuple(rank // 2 for rank in range(size))
    return DeviceExchanger(LocalHeap(size, "cuda"), strategy, nodes, 10.0, **settings)


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("strategy", cases.STRATEGIES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_virtual_ranks(size: int, strategy: str, kind: str) -> None:
    g = torch.Generator().manual_seed(size)
    group = virtual(size, strategy)
    for sizes, segments in ((cases.Sizes(2, 4, 128, 128), 4), (cases.Sizes(1, 3, 50, 70), 1)):
        spans = [cases.random_span(kind, segments, sizes, g) for _ in range(size)]
        spans[size // 2] = replace(spans[size // 2], reset=True, live=1)
        crossing = [cut != size - 2 or size == 2 for cut in range(size - 1)]
        for reverse in (False, True):
            scan = group.suffix_all if reverse else group.prefix_all
            found = scan(on_gpu(spans), crossing)
            group.check()
            wanted = cases.expected(spans, crossing, reverse)
            for a, b in zip(found, wanted, strict=True):
                error = cases.error_of(tuple(t.cpu() for t in a), b)
                assert error <= TOLERANCE.get(kind, 1e-5), (reverse, sizes, error)


@pytest.mark.parametrize("kind", ["dense", "rows"])
@pytest.mark.parametrize("K", [192, 256])
def test_large_states(kind: str, K: int) -> None:
    g = torch.Generator().manual_seed(K)
    for strategy in ("chain", "log_scan"):
        group = virtual(3, strategy)
        spans = [cases.random_span(kind, 3, cases.Sizes(1, 2, K, K), g) for _ in range(3)]
        found = group.prefix_all(on_gpu(spans), [True, True])
        group.check()
        for a, b in zip(found, cases.expected(spans, [True, True]), strict=True):
            assert cases.error_of(tuple(t.cpu() for t in a), b) <= TOLERANCE.get(kind, 1e-5)


@pytest.mark.parametrize("kind", ["scalar", "dense"])
@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_same_bits_over_many_exchanges(strategy: str, kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    group = virtual(4, strategy)
    spans = on_gpu([cases.random_span(kind, 4, cases.Sizes(1, 8, 128, 128), g) for _ in range(4)])
    first = group.prefix_all(spans, [True] * 3)
    for _ in range(200):
        again = group.prefix_all(spans, [True] * 3)
    group.check()
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["scalar", "rows", "dense", "two_states"])
@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_groups_of_heads_have_the_bits_of_all(strategy: str, kind: str) -> None:
    g = torch.Generator().manual_seed(9)
    group = virtual(4, strategy)
    spans = on_gpu([cases.random_span(kind, 4, cases.Sizes(2, 8, 64, 64), g) for _ in range(4)])
    for number in range(20):
        scan = group.suffix_all if number % 2 else group.prefix_all
        wanted, found = scan(spans, [True] * 3), None
        for heads in ((0, 2), (2, 5), (7, 1)):
            found = scan(spans, [True] * 3, heads=heads, into=found)
        assert found is not None
        for a, b in zip(found, wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    group.check()


def test_graph_replays_are_new_exchanges() -> None:
    g = torch.Generator().manual_seed(2)
    group = virtual(4, "chain")
    wholes = [cases.random_span("rows", 2, cases.Sizes(1, 4, 64, 64), g) for _ in range(4)]
    spans = on_gpu(wholes)
    group.prefix_all(spans, [True] * 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = group.prefix_all(spans, [True] * 3)
    for number in range(5):
        for span in spans:
            span.states[0].local.mul_(2)
        graph.replay()
        group.check()
        scaled = [
            Span((SpanState(w.states[0].local * 2 ** (number + 1), w.states[0].decay),))
            for w in wholes
        ]
        for a, b in zip(found, cases.expected(scaled, [True] * 3), strict=True):
            assert cases.error_of(tuple(t.cpu() for t in a), b) <= 1e-5


def test_expired_wait_is_told() -> None:
    g = torch.Generator().manual_seed(3)
    group = virtual(3, "chain")
    group.timeout = 0.05
    spans = on_gpu([cases.random_span("rows", 2, cases.Sizes(1, 1, 16, 16), g) for _ in range(3)])
    workspace = group.prepare(spans[0])
    # The sender believes that a later epoch lies unread in the next slot, so it waits for that.
    layout, part = workspace.layouts[0], workspace.memory.parts[0]
    epoch = 1 + int(part[layout.epochs : layout.epochs + 8].view(torch.int64))
    word = layout.sent + 8 * (epoch % 2)
    part[word : word + 8].view(torch.int64).fill_(epoch + 4)
    group.prefix_all(spans, [True, True])
    with pytest.raises(ExchangeTimeout, match="rank 0 waited for rank 1"):
        group.check()
    first = group.prefix_all(spans, [True, True])
    group.check()
    assert all(t.isfinite().all() for state in first for t in state)


def microseconds(group: DeviceExchanger, spans: list[Span], crossing: list[bool]) -> float:
    """Median time of an exchange on the device, replayed so that the host does not show."""
    for _ in range(3):
        group.prefix_all(spans, crossing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            group.prefix_all(spans, crossing)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    group.check()
    return statistics.median(times)


@pytest.mark.parametrize("kind", ["scalar", "dense"])
@pytest.mark.parametrize("heads", [1, 32])
def test_time_of_a_hop(kind: str, heads: int) -> None:
    """A longer line costs one hop a rank more; every program waits for one state at a time."""
    g = torch.Generator().manual_seed(4)
    for strategy in cases.STRATEGIES:
        times = {}
        for size in (2, 8):
            sizes = cases.Sizes(1, heads, 128, 128)
            spans = on_gpu([cases.random_span(kind, 1, sizes, g) for _ in range(size)])
            crossing = [True] * (size - 1)
            ideal = microseconds(virtual(size, strategy, programs=16, waits=False), spans, crossing)
            times[size] = microseconds(virtual(size, strategy, programs=16), spans, crossing)
            print(
                f"{strategy} {kind} H={heads} W={size}: {times[size]:.1f} us, "
                f"{ideal:.1f} without waits"
            )
        print(f"{strategy} {kind} H={heads}: {(times[8] - times[2]) / 6:.2f} us a hop")


def test_time_with_delays() -> None:
    """The artificial delay comes on top of every hop of a chain."""
    g = torch.Generator().manual_seed(5)
    spans = on_gpu([cases.random_span("scalar", 1, cases.Sizes(1, 4, 128, 128), g)] * 4)
    times = [
        microseconds(virtual(4, "chain", delay_ns=ns), spans, [True] * 3)
        for ns in (0, 30000, 60000)
    ]
    print(f"chain of 4 with 0, 30 and 60 us a hop: {times} us")
    assert 60 <= times[1] - times[0] <= 130 and 140 <= times[2] - times[0] <= 260


def two_processes(rank: int, size: int, strategy: str) -> float:
    torch.cuda.set_device(0)
    group = DeviceExchanger(make_heap(None, "cuda:0", "torch_symm"), strategy, timeout=60.0)
    g = torch.Generator().manual_seed(6)
    worst = 0.0
    for kind in ("rows", "dense"):
        spans = [cases.random_span(kind, 2, cases.Sizes(1, 2, 64, 64), g) for _ in range(size)]
        own = on_gpu([spans[rank]])[0]
        for number in range(6):
            scan = group.suffix if number % 2 else group.prefix
            found = scan(own, [True] * (size - 1))
            wanted = cases.expected(spans, [True] * (size - 1), bool(number % 2))[rank]
            worst = max(worst, cases.error_of(tuple(t.cpu() for t in found), wanted))
    group.check()
    group.heap.close()
    return worst


@pytest.mark.parametrize("strategy", ["chain", "all_gather"])
def test_two_processes_on_one_gpu(strategy: str) -> None:
    errors = run_ranks(two_processes, 2, strategy, environment=OVERLAP)
    assert max(errors) <= 5e-5, errors


@triton.jit
def to_itself(bases, base, result, limit, SIZE: tl.constexpr):
    """Put a message to oneself by NVSHMEM's own put, wait for its signal, signal back."""
    rank = tl.load(bases) * 0
    remote = rank  # as if the peer could not be addressed
    message = verbs.message_ptr(remote, base, rank, 4096, 8192)
    inside = tl.arange(0, SIZE)
    tl.store(message + inside, inside.to(tl.float32))
    verbs.put_signal(remote, base, rank, 4096, 8192, rank + 4 * SIZE, rank, rank + 1)
    flag, alarm = (
        (base + 0).to(tl.pointer_type(tl.int64)),
        (base + 64).to(tl.pointer_type(tl.int64)),
    )
    data = tl.multiple_of((base + 4096).to(tl.pointer_type(tl.float32)), 16)
    arrived, data = verbs.wait_ge(flag, 1, alarm, limit, data)
    tl.store(result + inside, tl.load(data + inside))
    verbs.signal_set(remote, base, rank, 128, rank + 7)
    tl.store(result + SIZE, arrived.to(tl.float32))


def nvshmem_alone(rank: int, size: int) -> None:
    from flexla_dist.comm.heaps.nvshmem_runtime import device_library

    heap = make_heap(None, "cuda:0", "nvshmem")
    block = heap.allocate("message", 16384)
    result = torch.zeros(257, device="cuda")
    to_itself[(1,)](
        block.bases,
        int(block.bases[0].item()),
        result,
        1 << 20,
        SIZE=256,
        extern_libs={"libnvshmem_device": device_library()},
    )
    torch.cuda.synchronize()
    heap.barrier()
    assert result[256].item() == 1 and torch.equal(result[:256].cpu(), torch.arange(256.0))
    assert block.view(torch.int64, (1,), 128).item() == 7
    group = DeviceExchanger(heap, "chain", timeout=10.0, dialect="nvshmem")
    g = torch.Generator().manual_seed(7)
    span = cases.random_span("rows", 3, cases.Sizes(1, 2, 64, 64), g)
    found = group.prefix(on_gpu([span])[0], [])
    group.check()
    wanted = cases.expected([span], [])[0]
    assert cases.error_of(tuple(t.cpu() for t in found), wanted) <= 1e-5
    heap.close()


@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="needs nvshmem4py-cu13")
def test_nvshmem_puts_and_signals() -> None:
    run_ranks(nvshmem_alone, 1, environment={"NVSHMEM_REMOTE_TRANSPORT": "none"})
