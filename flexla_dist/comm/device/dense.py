"""Scan of a panel whose M is dense on the state's first dim: operands stay in memory.

A panel is one column tile of one head's state. A product reads both operands from memory in slices
of BK, so that K up to 256 fits. `tile` is where the panel lies in this rank's tensors: pointers to
the first row and column of the first segment (matrix, local, entering, entry), the steps from
segment to segment, the first segment in the order of the scan and the way from there (1 or -1), the
columns that exist, and scratch memory. `place` as in `elementwise`. K rows exist of the BR of a
tile, WIDTH is the state's row pitch.

An element in memory is a state [BR, BC], then a matrix [BR, BR], in messages as in scratch memory.
Scratch memory holds two elements and two states, each pair written in turn.
"""

# ruff: noqa: RUF059, SIM102
# Tuples are unpacked whole, so that their order is seen; in a kernel `and` evaluates both sides.

import triton
import triton.language as tl

from flexla_dist.comm.device.links import (
    close_message,
    message_at,
    open_message,
    receive,
    reserve,
    reset_at,
)
from flexla_dist.comm.device.memory import fence, get_tile, put_tile


@triton.jit
def multiply(
    matrix,
    pitch,
    values,
    width,
    columns,
    K: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """matrix [K, K] @ values [K, columns], padded to [BR, BC] with zeros."""
    rows = tl.arange(0, BR)[:, None]
    across = tl.arange(0, BC)[None, :]
    inner = tl.arange(0, BK)
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(0, K, BK):
        row, column = (start + inner)[:, None], (start + inner)[None, :]
        left = tl.load(matrix + rows * pitch + column, mask=(rows < K) & (column < K), other=0.0)
        right = tl.load(
            values + row * width + across, mask=(row < K) & (across < columns), other=0.0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def load_state(
    pointer, columns, K: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """A state tile of this rank's tensors, padded with zeros."""
    rows = tl.arange(0, BR)[:, None]
    across = tl.arange(0, BC)[None, :]
    return tl.load(pointer + rows * WIDTH + across, mask=(rows < K) & (across < columns), other=0.0)


@triton.jit
def store_state(pointer, columns, state, K: tl.constexpr, WIDTH: tl.constexpr):
    """Write what exists of a state tile, and let all threads see it."""
    rows = tl.arange(0, state.shape[0])[:, None]
    across = tl.arange(0, state.shape[1])[None, :]
    tl.store(pointer + rows * WIDTH + across, state, mask=(rows < K) & (across < columns))
    fence()


@triton.jit
def compose(
    matrix,
    pitch,
    value,
    earlier,
    target,
    with_matrix,
    K: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write (matrix, value) after `earlier` to `target`, its matrix only where asked for."""
    state = multiply(matrix, pitch, earlier, BC, BC, K, BR, BC, BK, PRECISION)
    put_tile(target, state + value)
    if with_matrix != 0:
        rows = tl.arange(0, BR)[:, None]
        across = tl.arange(0, BM)[None, :]
        for start in range(0, K, BM):
            source = earlier + BR * BC + start
            part = multiply(matrix, pitch, source, BR, K - start, K, BR, BM, BK, PRECISION)
            tl.store(target + BR * BC + rows * BR + start + across, part)
    fence()


@triton.jit
def walk(
    tile,
    first,
    last,
    stop,
    fresh,
    starts,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """The state after segments first..last-1, writing those that enter first+1..stop-1.

    The state entering `first` has been written; fresh: 1 if it is zero. SEVERAL: further documents
    start where the words at `starts` are set.
    """
    matrix, local, entering, entry, matrix_step, state_step, origin, way, columns, scratch = tile
    state = tl.zeros([BR, BC], tl.float32)
    empty = tl.zeros([], tl.int32) + fresh
    for segment in range(first, last):
        at = origin + segment * way
        state = load_state(local + at * state_step, columns, K, WIDTH, BR, BC)
        if empty == 0:
            state += multiply(
                matrix + at * matrix_step,
                K,
                entering + at * state_step,
                WIDTH,
                columns,
                K,
                BR,
                BC,
                BK,
                PRECISION,
            )
        empty = empty * 0
        if segment + 1 < stop:
            if SEVERAL:
                empty = (tl.load(starts + segment + 1) != 0).to(tl.int32)
            entered = tl.where(empty != 0, 0.0, state)
            store_state(entering + (at + way) * state_step, columns, entered, K, WIDTH)
    return state


@triton.jit
def begin_dense(
    tile,
    place,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """(state entering if no rank is before, what leaves if that does not depend on the ranks
    before, 1 if it does not); the states entering the segments that it passes are written."""
    matrix, local, entering, entry, matrix_step, state_step, origin, way, columns, scratch = tile
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    given = tl.zeros([BR, BC], tl.float32)
    fresh = tl.full([], 1, tl.int32)
    if ENTRY:
        if position == 0:
            given = load_state(entry, columns, K, WIDTH, BR, BC)
            fresh = fresh * 0
    total = tl.zeros([BR, BC], tl.float32)
    alone = ((reset != 0) | (position == 0)).to(tl.int32)
    if reset != 0:
        if live < segments:
            at = entering + (origin + live * way) * state_step
            store_state(at, columns, tl.zeros([BR, BC], tl.float32), K, WIDTH)
        first = tl.minimum(live, segments - 1)
        stop = tl.where(live < segments, segments, 0)
        total = walk(
            tile, first, segments, stop, 1, place[11], K, WIDTH, BR, BC, BK, PRECISION, True
        )
    else:
        if position == 0:
            store_state(entering + origin * state_step, columns, given, K, WIDTH)
            total = walk(
                tile,
                segments * 0,
                segments,
                segments,
                fresh,
                place[11],
                K,
                WIDTH,
                BR,
                BC,
                BK,
                PRECISION,
                False,
            )
    return given, total, alone


@triton.jit
def finish_dense(
    tile,
    place,
    state,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write what `begin_dense` could not know: the states that follow from the rank before."""
    matrix, local, entering, entry, matrix_step, state_step, origin, way, columns, scratch = tile
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    if (live > 0) & ((position > 0) | (reset != 0)):
        store_state(entering + origin * state_step, columns, state, K, WIDTH)
        first, starts = segments * 0, place[11]
        walk(tile, first, live - 1, live, 0, starts, K, WIDTH, BR, BC, BK, PRECISION, False)


@triton.jit
def own_matrix(
    tile,
    segments,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compose all segments into scratch memory; gives which of its two elements holds them."""
    matrix, local, entering, entry, matrix_step, state_step, origin, way, columns, scratch = tile
    ELEMENT: tl.constexpr = BR * BC + BR * BR
    put_tile(scratch, load_state(local + origin * state_step, columns, K, WIDTH, BR, BC))
    rows = tl.arange(0, BR)[:, None]
    for start in range(0, K, BM):
        across = start + tl.arange(0, BM)[None, :]
        source = matrix + origin * matrix_step + rows * K + across
        part = tl.load(source, mask=(rows < K) & (across < K), other=0.0)
        tl.store(scratch + BR * BC + rows * BR + across, part)
    fence()
    side = segments * 0
    for segment in range(side + 1, segments):
        at = origin + segment * way
        compose(
            matrix + at * matrix_step,
            K,
            load_state(local + at * state_step, columns, K, WIDTH, BR, BC),
            scratch + side * ELEMENT,
            scratch + (1 - side) * ELEMENT,
            1,
            K,
            BR,
            BC,
            BM,
            BK,
            PRECISION,
        )
        side = 1 - side
    return side


@triton.jit
def send_dense(
    link,
    remote,
    peer,
    index,
    element,
    alone,
    BR: tl.constexpr,
    BC: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Send an element from memory; its matrix is left out where the receiver will not use it."""
    message = open_message(link, remote, peer, index, MESSAGE)
    words = tl.where(alone != 0, BR * BC, BR * BC + BR * BR)
    across = tl.arange(0, 256)
    for start in range(0, words, 256):
        tl.store(message + 32 + start + across, tl.load(element + start + across))
    tl.store(reset_at(message), alone)
    close_message(link, remote, message, peer, index, 128 + 4 * words, MESSAGE, DELAY)


@triton.jit
def own_dense(
    tile,
    place,
    needed,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTRY: tl.constexpr,
):
    """(state entering if no rank is before, side, alone) with this rank's element in scratch.

    needed: whether other ranks need the element at all.
    """
    matrix, local, entering, entry, matrix_step, state_step, origin, way, columns, scratch = tile
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    given, total, alone = begin_dense(tile, place, K, WIDTH, BR, BC, BK, PRECISION, ENTRY)
    side = segments * 0
    if alone != 0:
        put_tile(scratch, total)
        fence()
    else:
        if needed != 0:
            side = own_matrix(tile, segments, K, WIDTH, BR, BC, BM, BK, PRECISION)
    return given, side, alone


@triton.jit
def doubling_dense(
    link,
    scratch,
    position,
    count,
    keep,
    turn,
    side,
    alone,
    K: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Recursive doubling over a run of `count` ranks: (1 if all came, side, alone).

    The total is the element `side` in scratch memory. What arrives stays in its slot; it is
    composed into the total only where another rank, or `keep`, needs that.
    """
    ELEMENT: tl.constexpr = BR * BC + BR * BR
    rank = link[3]
    complete = tl.full([], 1, tl.int32)
    distance = position * 0 + 1
    for number in range(ROUNDS):
        own = scratch + side * ELEMENT
        if position + distance < count:
            peer = rank + distance * turn
            remote = reserve(link, peer, number)
            send_dense(link, remote, peer, number, own, alone, BR, BC, MESSAGE, DELAY)
        if position >= distance:
            arrived, message = receive(link, rank - distance * turn, number, MESSAGE, DELAY)
            complete = complete * arrived
            if (position + 2 * distance < count) | (keep != 0):
                if alone == 0:
                    alone = tl.load(reset_at(message))
                    compose(
                        own + BR * BC,
                        BR,
                        get_tile(own, BR, BC),
                        message + 32,
                        scratch + (1 - side) * ELEMENT,
                        1 - alone,
                        K,
                        BR,
                        BC,
                        BM,
                        BK,
                        PRECISION,
                    )
                    side = 1 - side
        distance = distance * 2
    return complete, side, alone


@triton.jit
def apply_dense(
    message,
    state,
    spare,
    K: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take a state through the span of a received element; spare: memory for a state."""
    value = get_tile(message + 32, BR, BC)
    if tl.load(reset_at(message)) == 0:
        put_tile(spare, state)
        fence()
        matrix = message + 32 + BR * BC
        value += multiply(matrix, BR, spare, BC, BC, K, BR, BC, BK, PRECISION)
        fence()
    return value


@triton.jit
def fold_dense(
    link,
    position,
    state,
    spare,
    K: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
):
    """Take a state through what `doubling_dense` received, the furthest first."""
    distance = position * 0 + (1 << ROUNDS)
    for number in range(ROUNDS):
        distance = distance // 2
        if position >= distance:
            message = message_at(link, ROUNDS - 1 - number, MESSAGE)
            state = apply_dense(message, state, spare, K, BR, BC, BK, PRECISION)
    return state
