"""Scan of a panel whose M acts entry by entry: everything stays in registers.

A panel is one tile of one head's state. `tile` is where it lies in this rank's tensors: blocks of
pointers to the first segment (local, decay, entering, entry), the steps from segment to segment,
the first segment in the order of the scan and the way from there (1 or -1), and masks. `place` is
this rank's position: (position, count, reset, live, segments, turn, part_position, part_count,
before, after, fresh, starts), see `plan`. A state is [BR, BC] and a factor (elementwise M)
[DR, DC], each 1 or as long as the state's. Without decay the factor is 1 and does not travel.

Every strategy sends what others wait for before it writes what only this rank needs.
"""

# ruff: noqa: RUF059, SIM102
# Tuples are unpacked whole, so that their order is seen; in a kernel `and` evaluates both sides.

import triton
import triton.language as tl

from flexla_dist.comm.device.links import (
    acknowledge,
    close_message,
    message_at,
    open_message,
    receive,
    receive_state,
    reserve,
    reset_at,
    send_state,
)
from flexla_dist.comm.device.memory import get_tile, put_tile


@triton.jit
def own_element(
    tile,
    place,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """(state entering if no rank is before, total, factor, alone) of this rank's segments.

    alone: what enters has no effect on what leaves; the total then holds all of it.
    """
    local, decay, entering, entry, state_step, decay_step, origin, way, mask, decay_mask = tile
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    given = tl.zeros([BR, BC], tl.float32)
    if ENTRY:
        if position == 0:
            given = tl.load(entry, mask=mask, other=0.0)
    total = given
    if reset != 0:
        total = tl.zeros([BR, BC], tl.float32)
    factor = tl.full([DR, DC], 1.0, tl.float32)
    for segment in range(place[10], segments):
        at = origin + segment * way
        value = tl.load(local + at * state_step, mask=mask, other=0.0)
        if DECAY:
            own = tl.load(decay + at * decay_step, mask=decay_mask, other=1.0)
            total = own * total + value
            factor = own * factor
        else:
            total += value
    return given, total, factor, ((reset != 0) | (position == 0)).to(tl.int32)


@triton.jit
def write_entering(tile, first, last, starts, state, DECAY: tl.constexpr, SEVERAL: tl.constexpr):
    """Write the states that enter segments first..last-1; `state` enters the first of them.

    SEVERAL: further documents start where the words at `starts` are set.
    """
    local, decay, entering, entry, state_step, decay_step, origin, way, mask, decay_mask = tile
    for segment in range(first, last):
        at = origin + segment * way
        if SEVERAL:
            state = tl.where(tl.load(starts + segment) != 0, 0.0, state)
        tl.store(entering + at * state_step, state, mask=mask)
        if segment + 1 < last:
            value = tl.load(local + at * state_step, mask=mask, other=0.0)
            if DECAY:
                own = tl.load(decay + at * decay_step, mask=decay_mask, other=1.0)
                state = own * state + value
            else:
                state += value


@triton.jit
def finish_elementwise(tile, place, state, BR: tl.constexpr, BC: tl.constexpr, DECAY: tl.constexpr):
    """Write what enters every segment: `state` up to a document's start, zero there."""
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    starts = place[11]
    write_entering(tile, segments * 0, live, starts, state, DECAY, SEVERAL=False)
    zero = tl.zeros([BR, BC], tl.float32)
    write_entering(tile, live, segments, starts, zero, DECAY, SEVERAL=True)


@triton.jit
def send_element(
    link,
    remote,
    peer,
    index,
    total,
    factor,
    alone,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Send a state and its factor, which is left out where the receiver will not use it."""
    BR: tl.constexpr = total.shape[0]
    BC: tl.constexpr = total.shape[1]
    message = open_message(link, remote, peer, index, MESSAGE)
    put_tile(message + 32, total)
    if DECAY:
        if alone == 0:
            put_tile(message + 32 + BR * BC, factor)
    tl.store(reset_at(message), alone)
    close_message(link, remote, message, peer, index, MESSAGE, MESSAGE, DELAY)


@triton.jit
def read_element(
    message,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
):
    """(state, factor, alone) of a received element."""
    factor = tl.full([DR, DC], 1.0, tl.float32)
    if DECAY:
        factor = get_tile(message + 32 + BR * BC, DR, DC)
    return get_tile(message + 32, BR, BC), factor, tl.load(reset_at(message))


@triton.jit
def apply_element(
    message,
    state,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Take a state through the span of a received element."""
    value, factor, alone = read_element(message, BR, BC, DR, DC, DECAY)
    return tl.where(alone != 0, value, factor * state + value)


@triton.jit
def doubling_elementwise(
    link,
    position,
    count,
    keep,
    turn,
    total,
    factor,
    alone,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Recursive doubling over a run of `count` ranks: (1 if all came, total, factor, alone).

    In round d the total so far goes to the rank 2^d further. What arrives stays in its slot; it is
    composed into the total only where another rank, or `keep`, needs that.
    """
    rank = link[3]
    complete = tl.full([], 1, tl.int32)
    distance = position * 0 + 1
    for number in range(ROUNDS):
        if position + distance < count:
            peer = rank + distance * turn
            remote = reserve(link, peer, number)
            send_element(link, remote, peer, number, total, factor, alone, MESSAGE, DELAY, DECAY)
        if position >= distance:
            arrived, message = receive(link, rank - distance * turn, number, MESSAGE, DELAY)
            complete = complete * arrived
            if (position + 2 * distance < count) | (keep != 0):
                if alone == 0:
                    value, earlier, alone = read_element(message, BR, BC, DR, DC, DECAY)
                    total = factor * value + total
                    factor = factor * earlier
        distance = distance * 2
    return complete, total, factor, alone


@triton.jit
def fold_elementwise(
    link,
    position,
    state,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
):
    """Take a state through what `doubling_elementwise` received, the furthest first."""
    distance = position * 0 + (1 << ROUNDS)
    for number in range(ROUNDS):
        distance = distance // 2
        if position >= distance:
            message = message_at(link, ROUNDS - 1 - number, MESSAGE)
            state = apply_element(message, state, BR, BC, DR, DC, DECAY)
    return state


@triton.jit
def acknowledge_rounds(link, position, turn, ROUNDS: tl.constexpr, MESSAGE: tl.constexpr):
    """Give back the slots of `doubling_elementwise`."""
    rank = link[3]
    distance = position * 0 + 1
    for number in range(ROUNDS):
        if position >= distance:
            acknowledge(link, rank - distance * turn, number, number, MESSAGE)
        distance = distance * 2


@triton.jit
def chain_elementwise(
    link,
    tile,
    place,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
    ENTRY: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """The state walks from rank to rank; one that ignores what enters sends without waiting."""
    rank = link[3]
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    state, total, factor, alone = own_element(tile, place, BR, BC, DR, DC, DECAY, ENTRY)
    remote, more = rank * 0, position + 1 < count
    if more:
        remote = reserve(link, rank + turn, 0)
    if more & (alone != 0):
        send_state(link, remote, rank + turn, 0, total, MESSAGE, DELAY)
    if position > 0:
        _, state = receive_state(link, rank - turn, 0, BR, BC, MESSAGE, DELAY)
        if more & (alone == 0):
            send_state(link, remote, rank + turn, 0, factor * state + total, MESSAGE, DELAY)
    finish_elementwise(tile, place, state, BR, BC, DECAY)
    if position > 0:
        acknowledge(link, rank - turn, 0, 0, MESSAGE)


@triton.jit
def log_scan_elementwise(
    link,
    tile,
    place,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
    ENTRY: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Exclusive scan in ROUNDS rounds of elements."""
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    state, total, factor, alone = own_element(tile, place, BR, BC, DR, DC, DECAY, ENTRY)
    complete, total, factor, alone = doubling_elementwise(
        link,
        position,
        count,
        position * 0,
        turn,
        total,
        factor,
        alone,
        BR,
        BC,
        DR,
        DC,
        DECAY,
        ROUNDS,
        MESSAGE,
        DELAY,
    )
    state = fold_elementwise(link, position, state, BR, BC, DR, DC, DECAY, ROUNDS, MESSAGE)
    state = tl.where(complete != 0, state, float("nan"))
    finish_elementwise(tile, place, state, BR, BC, DECAY)
    acknowledge_rounds(link, position, turn, ROUNDS, MESSAGE)


@triton.jit
def all_gather_elementwise(
    link,
    tile,
    place,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
    ENTRY: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Every rank puts its element to all that come after it, and folds those before it."""
    rank = link[3]
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    state, total, factor, alone = own_element(tile, place, BR, BC, DR, DC, DECAY, ENTRY)
    for number in range(position + 1, count):
        peer = rank + (number - position) * turn
        remote = reserve(link, peer, peer)
        send_element(link, remote, peer, rank, total, factor, alone, MESSAGE, DELAY, DECAY)
    for number in range(position * 0, position):
        peer = rank + (number - position) * turn
        arrived, message = receive(link, peer, peer, MESSAGE, DELAY)
        state = apply_element(message, state, BR, BC, DR, DC, DECAY)
        state = tl.where(arrived != 0, state, float("nan"))
    finish_elementwise(tile, place, state, BR, BC, DECAY)
    for number in range(position * 0, position):
        peer = rank + (number - position) * turn
        acknowledge(link, peer, rank, peer, MESSAGE)


@triton.jit
def hierarchical_elementwise(
    link,
    tile,
    place,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DR: tl.constexpr,
    DC: tl.constexpr,
    DECAY: tl.constexpr,
    ENTRY: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Doubling inside a node, one state from node to node.

    The last rank of a node holds the node's element and sends the state that leaves it to the first
    rank of the next node, which tells the others there, the last one first. So every rank waits
    for ranks before it only, and one state crosses between nodes.
    """
    rank = link[3]
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    state, total, factor, alone = own_element(tile, place, BR, BC, DR, DC, DECAY, ENTRY)
    leads = (part_position + 1 == part_count) & (after != 0)
    complete, total, factor, alone = doubling_elementwise(
        link,
        part_position,
        part_count,
        leads.to(tl.int32),
        turn,
        total,
        factor,
        alone,
        BR,
        BC,
        DR,
        DC,
        DECAY,
        ROUNDS,
        MESSAGE,
        DELAY,
    )
    early = (alone != 0) | (before == 0)
    following, remote = rank + turn, rank * 0
    if leads:
        remote = reserve(link, following, ROUNDS + following)
    if leads & early:
        send_state(link, remote, following, ROUNDS, total, MESSAGE, DELAY)
    source = rank - tl.where(part_position == 0, 1, part_position) * turn
    if before != 0:
        _, state = receive_state(link, source, ROUNDS, BR, BC, MESSAGE, DELAY)
        if part_position == 0:
            for number in range(1, part_count):
                peer = rank + (part_count - number) * turn
                inside = reserve(link, peer, ROUNDS + peer)
                send_state(link, inside, peer, ROUNDS, state, MESSAGE, DELAY)
        if leads & (early == 0):
            leaving = factor * state + total
            send_state(link, remote, following, ROUNDS, leaving, MESSAGE, DELAY)
    state = fold_elementwise(link, part_position, state, BR, BC, DR, DC, DECAY, ROUNDS, MESSAGE)
    state = tl.where(complete != 0, state, float("nan"))
    finish_elementwise(tile, place, state, BR, BC, DECAY)
    acknowledge_rounds(link, part_position, turn, ROUNDS, MESSAGE)
    if before != 0:
        acknowledge(link, source, ROUNDS + rank, ROUNDS, MESSAGE)
