"""Device verbs by plain addresses: stock Triton on any GPU, and its interpreter.

Contract: see `memory`. Every peer can be addressed, so a message is written straight into the
peer's memory and its flag is one released store.
"""

import triton
import triton.language as tl

from flexla_dist.comm.device.memory import fence, floats_at, poll_ge, word_at


@triton.jit
def remote_ptr(remote, base, peer, offset):
    """Pointer to fp32 values in the part of `peer`."""
    return floats_at(remote, offset)


@triton.jit
def message_ptr(remote, base, peer, offset, staging):
    """Where to write what `put_signal` completes: the peer's own memory."""
    return remote_ptr(remote, base, peer, offset)


@triton.jit
def signal_set(remote, base, peer, offset, value):
    """Set a flag in the part of `peer`, after all that this program wrote."""
    fence()
    tl.atomic_xchg(word_at(remote, offset), value, sem="release", scope="sys")


@triton.jit
def put_signal(remote, base, peer, offset, staging, nbytes, flag, value):
    """Complete a message that was written through `message_ptr`, then set its flag."""
    signal_set(remote, base, peer, flag, value)


@triton.jit
def wait_ge(flag, value, alarm, limit, data):
    """(1 or 0, data): did the flag reach `value` in time; read what it announces by `data`."""
    return poll_ge(flag, value, alarm, limit), data
