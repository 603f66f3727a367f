"""Kernels that move tiles between ranks of a symmetric heap over and over, to be timed.

A round is one exchange of messages between a first rank and the others; its pattern is said by
numbers. A program serves every `programs`-th panel of its rank and takes no part in the others'.
Slots and flags alternate with the parity of the round: a rank sends round n + 2 only after it has
got a message of round n + 1, which its peer sends after it has read those of round n.
"""

# ruff: noqa: SIM102 (in a kernel `and` evaluates both sides)

import triton
import triton.language as tl

from flexla_dist.comm.device.memory import fence, floats_at, get_tile, put_tile, word_at
from flexla_dist.comm.device.p2p import remote_ptr, signal_set, wait_ge


@triton.jit(do_not_specialize=["before", "rounds", "limit"])
def rounds_of_messages(
    bases,
    sums,
    first_rank,
    ranks,
    programs,
    panels,
    before,
    rounds,
    limit,
    flags_bytes,
    COUNT: tl.constexpr,
    IN_TURN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """`rounds` rounds in which rank 0 sends COUNT messages to each other rank and each other one
    sends one to each; one message is a tile [BR, BC] of every panel.

    bases: [ranks] addresses of the parts; sums: [ranks * programs] what was read, so that it is.
    first_rank: the lowest rank played by this launch. before: rounds played since the memory was
    zeroed. IN_TURN: the others answer only what has come, else all send at once. limit: looks at
    a flag. A part has its flags [ranks, COUNT, 2, panels] in `flags_bytes` bytes, then tiles alike.
    """
    rank = first_rank + tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    base = tl.load(bases + rank)
    alarm = word_at(base, 0)
    tile = tl.zeros([BR, BC], dtype=tl.float32)
    total = tl.zeros([BR, BC], dtype=tl.float32)
    for number in range(rounds):
        epoch = (before + number + 1).to(tl.int64)
        parity = (before + number) % 2
        if IN_TURN:
            if rank != 0:
                total += _take(
                    base, alarm, rank, ranks, program, programs, panels, epoch, parity,
                    limit, flags_bytes, COUNT, BR, BC,
                )  # fmt: skip
        _put(
            bases, tile, rank, ranks, program, programs, panels, epoch, parity, flags_bytes,
            COUNT, BR, BC,
        )  # fmt: skip
        if IN_TURN:
            if rank == 0:
                total += _take(
                    base, alarm, rank, ranks, program, programs, panels, epoch, parity,
                    limit, flags_bytes, COUNT, BR, BC,
                )  # fmt: skip
        else:
            total += _take(
                base, alarm, rank, ranks, program, programs, panels, epoch, parity,
                limit, flags_bytes, COUNT, BR, BC,
            )  # fmt: skip
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _put(
    bases,
    tile,
    rank,
    ranks,
    program,
    programs,
    panels,
    epoch,
    parity,
    flags_bytes,
    COUNT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Send this program's panels to every other rank."""
    base = tl.load(bases + rank)
    messages = tl.where(rank == 0, COUNT, 1)
    for panel in range(program, panels, programs):
        for step in range(1, ranks):
            peer = (rank + step) % ranks
            remote = tl.load(bases + peer)
            for message in range(messages):
                place = ((rank * COUNT + message) * 2 + parity) * panels + panel
                put_tile(remote_ptr(remote, base, peer, flags_bytes + place * BR * BC * 4), tile)
                signal_set(remote, base, peer, 64 + place * 8, epoch)


@triton.jit
def _take(
    base,
    alarm,
    rank,
    ranks,
    program,
    programs,
    panels,
    epoch,
    parity,
    limit,
    flags_bytes,
    COUNT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Wait for this program's panels of every other rank; the sum of what came."""
    total = tl.zeros([BR, BC], dtype=tl.float32)
    for panel in range(program, panels, programs):
        for step in range(1, ranks):
            peer = (rank + ranks - step) % ranks
            for message in range(tl.where(peer == 0, COUNT, 1)):
                place = ((peer * COUNT + message) * 2 + parity) * panels + panel
                data = floats_at(base, flags_bytes + place * BR * BC * 4)
                arrived, data = wait_ge(word_at(base, 64 + place * 8), epoch, alarm, limit, data)
                if arrived == 0:
                    tl.store(alarm, epoch)
                total += get_tile(data, BR, BC)
    return total


@triton.jit(do_not_specialize=["rounds", "words"])
def products(
    matrices,
    states,
    copies,
    rounds,
    words,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    PREC: tl.constexpr,
):
    """Each program multiplies its state [K, COLUMNS] by its M [K, K] `rounds` times, both read from
    memory in slices of the inner dim, as a dense panel is applied; each time it copies `words` of M
    to its `copies` [K, COLUMNS] as a dense element is sent: no step before the last one has read,
    and not from a cache that other processors do not see."""
    rows = tl.arange(0, K)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inner = tl.arange(0, SLICE)
    number = tl.program_id(0).to(tl.int64)
    matrix, state = matrices + number * K * K, states + number * K * COLUMNS
    copy, step = copies + number * K * COLUMNS, tl.arange(0, 256)
    for _ in range(rounds):
        total = tl.zeros([K, COLUMNS], dtype=tl.float32)
        for at in range(0, K, SLICE):
            left = tl.load(matrix + rows * K + (at + inner)[None, :])
            right = tl.load(state + (at + inner)[:, None] * COLUMNS + columns)
            total = tl.dot(left, right, total, input_precision=PREC)
        fence()
        tl.store(state + rows * COLUMNS + columns, total)
        for start in range(0, words, 256):
            tl.store(copy + start + step, tl.load(matrix + start + step, cache_modifier=".cg"))
        fence()
