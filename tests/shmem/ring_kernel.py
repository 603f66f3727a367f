"""Kernels that write to other ranks by raw addresses; interpreted on the CPU, compiled on a GPU."""

import torch
import triton
import triton.language as tl

from flexla_dist.comm.heaps import Block, LocalHeap, SymmetricHeap

TILE = 64
FLAG_BYTE = 2 * TILE * 4  # two tiles, for even and odd epochs, then a flag
RING_BYTES = FLAG_BYTE + 4
PATIENCE = 2_000_000


@triton.jit(do_not_specialize=["rank", "size", "value"])
def write_to_all(bases, rank, size, value):
    """Write `value + peer` as 64 bits to place `rank` of every peer's part."""
    for peer in range(size):
        there = tl.load(bases + peer).to(tl.pointer_type(tl.int64))
        tl.store(there + rank, value + peer)


@triton.jit(do_not_specialize=["rank", "size", "epoch"])
def hand_on(bases, result, rank, size, epoch, TILE: tl.constexpr, PATIENCE: tl.constexpr):
    """Write `100 * rank + epoch` to the next rank, wait for what the rank before wrote here."""
    offsets = tl.arange(0, TILE) + (epoch % 2) * TILE
    there = tl.load(bases + (rank + 1) % size)
    tl.store(there.to(tl.pointer_type(tl.float32)) + offsets, (100 * rank + epoch).to(tl.float32))
    tl.debug_barrier()
    flag = (there + 2 * TILE * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    here = tl.load(bases + rank)
    own = (here + 2 * TILE * 4).to(tl.pointer_type(tl.int32))
    seen = tl.atomic_add(own, 0, sem="acquire", scope="sys")
    looks = 0
    while (seen < epoch) & (looks < PATIENCE):
        seen = tl.atomic_add(own, 0, sem="acquire", scope="sys")
        looks += 1
    tile = tl.load(here.to(tl.pointer_type(tl.float32)) + offsets)
    tl.store(result + tl.arange(0, TILE), tile)


def check_ring(heap: SymmetricHeap, block: Block, epochs: int) -> None:
    """Hand a tile on `epochs` times without a reset; every rank sees its neighbour's of each."""
    before = (heap.rank - 1) % heap.size
    result = torch.empty(TILE, device=heap.device)
    if heap.device.type == "cuda":
        # Loaded once beforehand: a rank that compiles would keep the others spinning.
        alone = LocalHeap(1, heap.device).allocate("ring", RING_BYTES)
        hand_on[(1,)](alone.bases, result, 0, 1, 1, TILE, PATIENCE)
        heap.barrier()
    for epoch in range(1, epochs + 1):
        hand_on[(1,)](block.bases, result, heap.rank, heap.size, epoch, TILE, PATIENCE)
        got, wanted = result.cpu(), torch.full((TILE,), 100.0 * before + epoch)
        assert torch.equal(got, wanted), (heap.rank, epoch, got[:4], wanted[:4])
        if heap.size > 1:
            # The tile after next overwrites this one: nobody may be two epochs ahead.
            heap.barrier()
