"""Device verbs by NVSHMEM: stock Triton linked with `libnvshmem_device.bc`.

Contract: see `memory`. A peer that can be addressed (same host) is written directly; for the others
a message is written to this rank's staging memory and put with its signal by the whole block.
Ranks are NVSHMEM's processing elements, and it knows memory by its address on this one.
"""

import triton
import triton.language as tl
from triton.language import core

from flexla_dist.comm.device.memory import fence, floats_at, poll_ge, word_at


@core.extern
def putmem_signal_block(target, source, nbytes, flag, value, operation, element, _semantic=None):
    """Copy memory to another element, then signal; all threads of a block call it."""
    i32, i64, u64 = core.dtype("int32"), core.dtype("int64"), core.dtype("uint64")
    return core.extern_elementwise(
        "",
        "",
        [target, source, nbytes, flag, value, operation, element],
        {(i64, i64, i64, i64, u64, i32, i32): ("nvshmemx_putmem_signal_block", i32)},
        is_pure=False,
        _semantic=_semantic,
    )


@core.extern
def signal_op(flag, value, operation, element, _semantic=None):
    """Signal another element; one thread calls it."""
    i32, i64, u64 = core.dtype("int32"), core.dtype("int64"), core.dtype("uint64")
    return core.extern_elementwise(
        "",
        "",
        [flag, value, operation, element],
        {(i64, u64, i32, i32): ("nvshmemx_signal_op", i32)},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def thread_index():
    """Number of this thread in its block."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def remote_ptr(remote, base, peer, offset):
    """Pointer to fp32 values in the part of `peer`, which must be one that can be addressed."""
    return floats_at(remote, offset)


@triton.jit
def message_ptr(remote, base, peer, offset, staging):
    """Where to write what `put_signal` completes: the peer's memory, or this rank's staging."""
    return floats_at(tl.where(remote != 0, remote + offset, base + staging), 0)


@triton.jit
def signal_set(remote, base, peer, offset, value):
    """Set a flag in the part of `peer`, after all that this program wrote."""
    fence()
    if remote != 0:
        tl.atomic_xchg(word_at(remote, offset), value, sem="release", scope="sys")
    else:
        if thread_index() == 0:
            signal_op(base + offset, value.to(tl.uint64), 9, peer.to(tl.int32))  # 9: set
        fence()


@triton.jit
def put_signal(remote, base, peer, offset, staging, nbytes, flag, value):
    """Complete a message that was written through `message_ptr`, then set its flag."""
    fence()
    if remote != 0:
        tl.atomic_xchg(word_at(remote, flag), value, sem="release", scope="sys")
    else:
        putmem_signal_block(
            base + offset,
            base + staging,
            nbytes,
            base + flag,
            value.to(tl.uint64),
            9,  # set
            peer.to(tl.int32),
        )
        fence()


@triton.jit
def wait_ge(flag, value, alarm, limit, data):
    """(1 or 0, data): did the flag reach `value` in time; read what it announces by `data`."""
    return poll_ge(flag, value, alarm, limit), data
