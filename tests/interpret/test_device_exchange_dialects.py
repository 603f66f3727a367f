"""The emitted source of the other dialects, executed across processes by doubles."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from flexla_dist.comm.device.source import Dialect, exchange_source, load_source
from flexla_dist.comm.device.workspace import Workspace
from flexla_dist.comm.device_exchange import DeviceExchanger
from flexla_dist.comm.heaps import SymmetricHeap, make_heap
from flexla_dist.testing.ranks import run_ranks

from . import device_exchange_cases as cases

DOUBLE = Path(__file__).parents[1] / "triton_dist_double"
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


class RecordingHeap:
    """A heap that remembers the blocks it gave, and hides addresses of peers from kernels."""

    dialect: Any = "p2p"

    def __init__(self, heap: SymmetricHeap, addressable: bool) -> None:
        self.inner, self.addressable = heap, addressable
        self.name, self.rank, self.size, self.device = heap.name, heap.rank, heap.size, heap.device
        self.blocks: list[tuple[int, list[int]]] = []

    def allocate(self, label: str, nbytes: int) -> Any:
        block = self.inner.allocate(label, nbytes)
        self.blocks.append((nbytes, block.bases.tolist()))
        if self.addressable:
            return block
        own = torch.arange(self.size) == self.rank
        return replace(block, bases=torch.where(own, block.bases, 0))

    def barrier(self) -> None:
        self.inner.barrier()

    def close(self) -> None:
        self.inner.close()


def scan(group: DeviceExchanger, rank: int, size: int, bind: Any, rounds: int = 3) -> float:
    g = torch.Generator().manual_seed(size)
    worst = 0.0
    for kind in ("rows", "dense"):
        spans = [cases.random_span(kind, 2, cases.Sizes(H=1), g) for _ in range(size)]
        bind(group.prepare(spans[rank]))
        for number in range(rounds):
            step = group.suffix if number % 2 else group.prefix
            found = step(spans[rank], [True] * (size - 1))
            wanted = cases.expected(spans, [True] * (size - 1), bool(number % 2))[rank]
            worst = max(worst, cases.error_of(found, wanted))
    group.check()
    group.heap.close()
    return worst


def triton_dist_rank(rank: int, size: int, strategy: str, addressable: bool) -> float:
    sys.path.insert(0, str(DOUBLE))
    from triton_dist.memory import bind

    heap = RecordingHeap(make_heap(None, "cpu"), addressable)
    group = DeviceExchanger(heap, strategy, (0,) * size, 60.0, dialect="triton_dist")
    return scan(group, rank, size, lambda workspace: bind(rank, size, heap.blocks))


@pytest.mark.parametrize(
    ("strategy", "addressable"),
    [("chain", True), ("chain", False), ("log_scan", False), ("hierarchical", True)],
)
def test_triton_dist_source_runs(strategy: str, addressable: bool) -> None:
    """Peers on one host are written to and notified; the others get puts with a signal."""
    errors = run_ranks(triton_dist_rank, 3, strategy, addressable)
    assert max(errors) <= cases.TOLERANCE, errors


def nvshmem_rank(rank: int, size: int, strategy: str) -> float:
    """The source of the dialect, with NVSHMEM's own functions replaced by copies."""
    sys.path.insert(0, str(DOUBLE))
    from triton_dist.language.extra import libshmem_device
    from triton_dist.memory import bind, number

    heap = RecordingHeap(make_heap(None, "cpu"), addressable=False)
    group = DeviceExchanger(heap, strategy, (0,) * size, 60.0)

    def pointer(address: Any, dtype: Any) -> Any:
        return tl.cast(tl.full([], number(address), tl.int64), tl.pointer_type(dtype))

    def put(target: Any, source: Any, nbytes: Any, flag: Any, value: Any, op: Any, pe: Any) -> None:
        floats = pointer(target, tl.float32), pointer(source, tl.float32)
        word = pointer(flag, tl.uint64)
        libshmem_device.putmem_signal_block(*floats, nbytes, word, value, op, pe)

    def signal(flag: Any, value: Any, op: Any, pe: Any) -> None:
        word = pointer(flag, tl.uint64)
        libshmem_device.putmem_signal_block(word, word, 0, word, value, op, pe)

    def install(workspace: Workspace) -> None:
        bind(rank, size, heap.blocks)
        dialect: Dialect = "nvshmem"
        text = exchange_source(workspace.signature, workspace.layouts[0], dialect)
        module: ModuleType = load_source(text)
        replaced = {
            "putmem_signal_block": put,
            "signal_op": signal,
            "thread_index": lambda: 0,
        }
        for name, function in replaced.items():
            setattr(module, name, function)
        workspace.kernel = module.exchange

    group.dialect = "triton_dist"  # the layout with staging memory
    return scan(group, rank, size, install)


@pytest.mark.parametrize("strategy", ["chain", "all_gather"])
def test_nvshmem_source_runs(strategy: str) -> None:
    errors = run_ranks(nvshmem_rank, 2, strategy)
    assert max(errors) <= cases.TOLERANCE, errors
