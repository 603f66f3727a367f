"""An interpreted kernel stores to its peers' shared memory by address, and waits for theirs."""

from __future__ import annotations

import pytest
import torch

from flexla_dist.comm.heaps import LocalHeap, make_heap
from flexla_dist.testing.ranks import run_ranks

from ..shmem.ring_kernel import PATIENCE, RING_BYTES, TILE, check_ring, hand_on


def ring(rank: int, size: int, epochs: int) -> None:
    heap = make_heap(None, "cpu")
    check_ring(heap, heap.allocate("ring", RING_BYTES), epochs)
    heap.close()


@pytest.mark.parametrize(("size", "epochs"), [(1, 5), (2, 50), (3, 20), (4, 20)])
def test_tiles_go_around_a_ring_of_processes(size: int, epochs: int) -> None:
    run_ranks(ring, size, epochs)


def test_virtual_ranks_reach_each_other() -> None:
    """Two ranks in turns: the second finds what the first has written, and the other way round."""
    heap = LocalHeap(2, "cpu")
    block = heap.allocate("ring", RING_BYTES)
    result = torch.zeros(TILE)
    hand_on[(1,)](block.bases, result, 0, 2, 1, TILE, 1)
    hand_on[(1,)](block.bases, result, 1, 2, 1, TILE, PATIENCE)
    assert torch.equal(result, torch.full((TILE,), 1.0))
    got = block.parts[0].view(torch.float32, (2, TILE))
    assert torch.equal(got[1], torch.full((TILE,), 101.0)) and not got[0].any()
