"""Device verbs by Triton-Distributed; imported only where that package is installed.

Contract: see `memory`. A peer of the same host is written through `dl.symm_at` and notified; for
the others a message is written to this rank's staging memory and put with its signal by the whole
block. `dl.wait` has no limit and waits for equality, so it is called only after a bounded look has
seen the flag; it then gives the token that orders the reads behind it.
"""

# ruff: noqa: SIM102 (in a kernel `and` evaluates both sides)

import triton
import triton.language as tl
import triton_dist.language as dl
from triton_dist.language.extra import libshmem_device

from flexla_dist.comm.device.memory import fence, floats_at, poll_ge, word_at


@triton.jit
def remote_ptr(remote, base, peer, offset):
    """Pointer to fp32 values in the part of `peer`, which must be one that can be addressed."""
    return tl.multiple_of(dl.symm_at(floats_at(base, offset), peer.to(tl.int32)), 16)


@triton.jit
def message_ptr(remote, base, peer, offset, staging):
    """Where to write what `put_signal` completes: the peer's memory, or this rank's staging."""
    pointer = floats_at(base, staging)
    if remote != 0:
        pointer = remote_ptr(remote, base, peer, offset)
    return tl.multiple_of(pointer, 16)


@triton.jit
def signal_set(remote, base, peer, offset, value):
    """Set a flag in the part of `peer`, after all that this program wrote."""
    fence()
    flag, element = word_at(base, offset), peer.to(tl.int32)
    if remote != 0:
        dl.notify(flag, element, signal=value, sig_op="set", comm_scope="intra_node")
    else:
        dl.notify(flag, element, signal=value, sig_op="set", comm_scope="inter_node")


@triton.jit
def put_signal(remote, base, peer, offset, staging, nbytes, flag, value):
    """Complete a message that was written through `message_ptr`, then set its flag."""
    if remote != 0:
        signal_set(remote, base, peer, flag, value)
    else:
        fence()
        libshmem_device.putmem_signal_block(
            floats_at(base, offset),
            floats_at(base, staging),
            nbytes,
            word_at(base, flag),
            value,
            libshmem_device.NVSHMEM_SIGNAL_SET,
            peer.to(tl.int32),
        )
        fence()


@triton.jit
def wait_ge(flag, value, alarm, limit, data):
    """(1 or 0, data): did the flag reach `value` in time; read what it announces by `data`."""
    arrived = poll_ge(flag, value, alarm, limit)
    if arrived != 0:
        if tl.load(flag) == value:
            token = dl.wait(flag, 1, "sys", "acquire", waitValue=value)
            data = dl.consume_token(data, token)
    return arrived, data
