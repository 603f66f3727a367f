"""What every symmetric heap must do, checked with plain stores to peers' addresses."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flexla_dist.comm.heaps import Block, HeapError, HeapMismatch, SymmetricHeap


def write_all(heap: SymmetricHeap, block: Block, epoch: int) -> None:
    """Write to the parts of all ranks, by their addresses."""
    if heap.device.type == "cuda":
        from .ring_kernel import write_to_all

        value = 1_000_000 * epoch + 100 * heap.rank
        write_to_all[(1,)](block.bases, heap.rank, heap.size, value)
        return
    for peer, base in enumerate(block.bases.tolist()):
        place = ctypes.c_int64.from_address(base + 8 * heap.rank)
        place.value = 1_000_000 * epoch + 100 * heap.rank + peer


def check_written(heap: SymmetricHeap, block: Block, epoch: int) -> None:
    """Compare this rank's part with what all ranks wrote to it."""
    got = block.view(torch.int64, (heap.size,)).tolist()
    assert got == [1_000_000 * epoch + 100 * rank + heap.rank for rank in range(heap.size)]


def check_heap(heap: SymmetricHeap) -> None:
    """Allocation, peer writes, use over and over, mismatches on all ranks, closing."""
    first = heap.allocate("first", 8 * heap.size)
    second = heap.allocate("second", 5000)
    for block in (first, second):
        assert block.bases.dtype == torch.int64 and block.bases.shape == (heap.size,)
        assert int(block.bases[heap.rank]) == block.local.data_ptr()
        assert block.local.dtype == torch.uint8 and block.local.shape == (block.nbytes,)
        assert not block.local.any()
    assert second.view(torch.float32, (4, 5), offset=16).shape == (4, 5)
    heap.barrier()
    for epoch in range(10):
        write_all(heap, first, epoch)
        heap.barrier()
        check_written(heap, first, epoch)
        heap.barrier()
    assert not second.local.any(), "a write to the first block reached the second"
    if heap.size > 1:
        with pytest.raises(HeapMismatch, match="128"):
            heap.allocate("third", 64 * (1 + (heap.rank == heap.size - 1)))
        with pytest.raises(HeapMismatch, match="ours"):
            heap.allocate(f"ours{heap.rank}", 64)
    again = heap.allocate("after the mistake", 8 * heap.size)
    write_all(heap, again, 7)
    heap.barrier()
    check_written(heap, again, 7)
    heap.close()
    heap.close()
    with pytest.raises(HeapError, match="has been closed"):
        heap.allocate("late", 8)
