"""A kernel in stock Triton that puts a tile with NVSHMEM, signals, and waits for its own signal."""

import triton
import triton.language as tl
from triton.language import core

SIGNAL_SET = 9
COMPARE_GE = 3
TILE = 64
SIGNAL_BYTE = 2 * TILE * 4


@core.extern
def put_with_signal(target, source, nbytes, signal, value, operation, peer, _semantic=None):
    """Put bytes to a peer, then set its signal; every thread of the block comes here."""
    i64, i32, u64 = core.dtype("int64"), core.dtype("int32"), core.dtype("uint64")
    return core.extern_elementwise(
        "",
        "",
        [target, source, nbytes, signal, value, operation, peer],
        {(i64, i64, i64, i64, u64, i32, i32): ("nvshmemx_putmem_signal_block", i32)},
        is_pure=False,
        _semantic=_semantic,
    )


@core.extern
def wait_for_signal(signal, comparison, value, _semantic=None):
    """Return when this rank's own signal compares so."""
    i64, i32, u64 = core.dtype("int64"), core.dtype("int32"), core.dtype("uint64")
    return core.extern_elementwise(
        "",
        "",
        [signal, comparison, value],
        {(i64, i32, u64): ("nvshmem_signal_wait_until", u64)},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit(do_not_specialize=["rank", "size", "epoch"])
def put_to_next(heap, result, rank, size, epoch, TILE: tl.constexpr):
    """Fill the own first tile, put it to the next rank's second, read what came from before.

    heap: address of this rank's part: two tiles of float32, then the signal.
    """
    offsets = tl.arange(0, TILE)
    own = heap.to(tl.pointer_type(tl.float32))
    tl.store(own + offsets, (100 * rank + epoch).to(tl.float32) + tl.zeros((TILE,), tl.float32))
    tl.debug_barrier()
    signal = (heap + 2 * TILE * 4).to(tl.int64)
    peer = ((rank + 1) % size).to(tl.int32)
    put_with_signal(
        (heap + TILE * 4).to(tl.int64),
        heap.to(tl.int64),
        tl.full((), TILE * 4, tl.int64),
        signal,
        epoch.to(tl.uint64),
        tl.full((), 9, tl.int32),
        peer,
    )
    wait_for_signal(signal, tl.full((), 3, tl.int32), epoch.to(tl.uint64))
    tl.debug_barrier()
    tl.store(result + offsets, tl.load(own + TILE + offsets))
