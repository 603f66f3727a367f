"""Verbs that every dialect shares: this rank's own memory, and looking at its own flags.

Contract of the verbs of all dialects. `base` is the address of this rank's part of a symmetric
block, `bases` the table of all parts as this rank sees them, `remote` an entry of it: 0 where a
kernel cannot address the peer. Offsets are bytes and mean the same on every rank. Flags are 64-bit
words that only grow and have one writer. A signal is seen after all that its writer wrote before.
"""

# ruff: noqa: SIM102 (in a kernel `and` evaluates both sides)

import triton
import triton.language as tl

from flexla_dist.comm.device.timing import pause


@triton.jit
def word_at(base, offset):
    """Pointer to the 64-bit word at a byte offset of a part."""
    return (base + offset).to(tl.pointer_type(tl.int64))


@triton.jit
def floats_at(base, offset):
    """Pointer to fp32 values at a byte offset of a part, a multiple of 16."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def put_tile(pointer, tile):
    """Write a block of fp32 values row by row, without gaps."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    tl.store(pointer + rows * COLUMNS + columns, tile)


@triton.jit
def get_tile(pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Read a block that `put_tile` wrote."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointer + rows * COLUMNS + columns)


@triton.jit
def fence():
    """What all threads wrote so far comes before what one of them releases next."""
    tl.debug_barrier()


@triton.jit
def poll_ge(flag, value, alarm, limit):
    """Look at a flag of this rank until it is at least `value`: 1, or 0 if that did not happen.

    Gives up after `limit` looks, or when the alarm word is set; a negative limit takes the flag as
    set. The compiler lets the first thread look and tell the others.
    """
    looks = tl.zeros_like(limit)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen < value) & (looks < limit):
        pause()
        if looks % 64 == 0:
            if tl.atomic_add(alarm, 0, sem="acquire", scope="sys") != 0:
                looks = limit
        looks += 1
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return ((seen >= value) | (limit < 0)).to(tl.int32)
