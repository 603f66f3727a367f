"""Messages between programs of different ranks, in the verbs of a dialect.

A message is a header of 128 bytes, a state tile, and where the strategy needs it M. It lies in one
of two slots, by the parity of the exchange's number (its epoch); a flag of the slot says that it
arrived, a credit at the sender that its receiver has read it. Words of the header: 0 whether the
span ignores what enters it; 1 the tag, which tells exchanges apart; 2 and 3 the time of sending.

A `link` is what a program knows of one panel: (bases, base, errors, rank, size, limit, tag, panel,
epoch, slots, flags, credits, sent, staging). `errors` and `slots` to `staging` are byte offsets in
a part, the latter of where this panel's own begin. `index` numbers a panel's slots at the
receiver, `channel` the ways out of the sender.
"""

# ruff: noqa: RUF059
# Tuples are unpacked whole, so that their order is seen; in a kernel `and` evaluates both sides.

import triton
import triton.language as tl

from flexla_dist.comm.device.memory import fence, floats_at, get_tile, poll_ge, put_tile, word_at
from flexla_dist.comm.device.p2p import message_ptr, put_signal, signal_set, wait_ge
from flexla_dist.comm.device.timing import clock_ns


@triton.jit
def report(link, peer, what):
    """Tell every rank, once, that this one gave up waiting for `peer`, and stop their waits.

    what: 0 waited for a message, 1 for the credit to send one; 2 got one of another exchange.
    """
    bases, base, errors, rank, size, limit, tag, panel, epoch = link[:9]
    slots, flags, credits, sent, staging = link[9:]
    none = tl.zeros_like(epoch)
    claim = word_at(base, errors + 8)
    if tl.atomic_cas(claim, none, none + 1, sem="acq_rel", scope="gpu") == 0:
        record = errors + 64 + rank * 64
        for number in range(size):
            target = rank * 0 + number
            remote = tl.load(bases + target)
            signal_set(remote, base, target, record + 8, peer)
            signal_set(remote, base, target, record + 16, panel)
            signal_set(remote, base, target, record + 24, epoch)
            signal_set(remote, base, target, record + 32, none + what)
            signal_set(remote, base, target, record, none + 1)
            signal_set(remote, base, target, errors, none + 1)


@triton.jit
def reserve(link, peer, channel):
    """Wait until the peer has read what was last sent in this slot; gives its part's address.

    It does not depend on what will be sent, so it is done before that is waited for.
    """
    bases, base, errors, rank, size, limit, tag, panel, epoch = link[:9]
    slots, flags, credits, sent, staging = link[9:]
    word = (channel * 2 + epoch % 2) * 8
    last = word_at(base, sent + word)
    if poll_ge(word_at(base, credits + word), tl.load(last), word_at(base, errors), limit) == 0:
        report(link, peer, 1)
    tl.store(last, epoch)
    return tl.load(bases + peer)


@triton.jit
def open_message(link, remote, peer, index, MESSAGE: tl.constexpr):
    """Where to write the header of a message to `peer`."""
    bases, base, errors, rank, size, limit, tag, panel, epoch = link[:9]
    slots, flags, credits, sent, staging = link[9:]
    slot = slots + (index * 2 + epoch % 2) * MESSAGE
    return message_ptr(remote, base, peer, slot, staging)


@triton.jit
def close_message(
    link, remote, message, peer, index, nbytes, MESSAGE: tl.constexpr, DELAY: tl.constexpr
):
    """Say that the first `nbytes` of a message are there."""
    bases, base, errors, rank, size, limit, tag, panel, epoch = link[:9]
    slots, flags, credits, sent, staging = link[9:]
    tl.store(message.to(tl.pointer_type(tl.int32)) + 1, tag)
    if DELAY > 0:
        tl.store((message + 2).to(tl.pointer_type(tl.int64)), clock_ns())
    place = index * 2 + epoch % 2
    slot, flag = slots + place * MESSAGE, flags + place * 8
    put_signal(remote, base, peer, slot, staging, epoch * 0 + nbytes, flag, epoch)


@triton.jit
def receive(link, peer, index, MESSAGE: tl.constexpr, DELAY: tl.constexpr):
    """Wait for a message of this epoch: (1 or 0, pointer to its header)."""
    bases, base, errors, rank, size, limit, tag, panel, epoch = link[:9]
    slots, flags, credits, sent, staging = link[9:]
    place = index * 2 + epoch % 2
    arrived, message = wait_ge(
        word_at(base, flags + place * 8),
        epoch,
        word_at(base, errors),
        limit,
        floats_at(base, slots + place * MESSAGE),
    )
    if arrived == 0:
        report(link, peer, 0)
    else:
        if DELAY > 0:
            stamp = tl.load((message + 2).to(tl.pointer_type(tl.int64)))
            while clock_ns() - stamp < DELAY:
                pass
            fence()
    return arrived, message


@triton.jit
def message_at(link, index, MESSAGE: tl.constexpr):
    """Pointer to the header of a message that has been received."""
    bases, base, errors, rank, size, limit, tag, panel, epoch = link[:9]
    slots, flags, credits, sent, staging = link[9:]
    return floats_at(base, slots + (index * 2 + epoch % 2) * MESSAGE)


@triton.jit
def acknowledge(link, peer, channel, index, MESSAGE: tl.constexpr):
    """Give a slot back to its sender, after a look at the tag of what it sent.

    channel: the sender's number of the way to this rank; index: the slot.
    """
    bases, base, errors, rank, size, limit, tag, panel, epoch = link[:9]
    slots, flags, credits, sent, staging = link[9:]
    message = message_at(link, index, MESSAGE)
    if tl.load(message.to(tl.pointer_type(tl.int32)) + 1) != tag:
        report(link, peer, 2)
    remote = tl.load(bases + peer)
    signal_set(remote, base, peer, credits + (channel * 2 + epoch % 2) * 8, epoch)


@triton.jit
def send_state(link, remote, peer, index, state, MESSAGE: tl.constexpr, DELAY: tl.constexpr):
    """Send a state alone, to a peer whose slot is reserved; its header says nothing."""
    BR: tl.constexpr = state.shape[0]
    BC: tl.constexpr = state.shape[1]
    message = open_message(link, remote, peer, index, MESSAGE)
    put_tile(message + 32, state)
    close_message(link, remote, message, peer, index, 128 + 4 * BR * BC, MESSAGE, DELAY)


@triton.jit
def reset_at(message):
    """Pointer to the word that says whether an element's span ignores what enters it."""
    return message.to(tl.pointer_type(tl.int32))


@triton.jit
def receive_state(
    link,
    peer,
    index,
    BR: tl.constexpr,
    BC: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Wait for a state: (pointer to it, the state; NaN if it did not come, not to be mistaken)."""
    arrived, message = receive(link, peer, index, MESSAGE, DELAY)
    state = tl.where(arrived != 0, get_tile(message + 32, BR, BC), float("nan"))
    return message + 32, state
