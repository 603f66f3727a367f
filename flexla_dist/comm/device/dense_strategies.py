"""The strategies for panels with a dense M; see `dense`."""

# ruff: noqa: RUF059, SIM102
# Tuples are unpacked whole, so that their order is seen; in a kernel `and` evaluates both sides.

import triton
import triton.language as tl

from flexla_dist.comm.device.dense import (
    apply_dense,
    begin_dense,
    doubling_dense,
    finish_dense,
    fold_dense,
    load_state,
    multiply,
    own_dense,
    own_matrix,
    send_dense,
    store_state,
    walk,
)
from flexla_dist.comm.device.elementwise import acknowledge_rounds
from flexla_dist.comm.device.links import (
    acknowledge,
    receive,
    receive_state,
    reserve,
    send_state,
)
from flexla_dist.comm.device.memory import get_tile


@triton.jit
def chain_dense(
    link,
    tile,
    place,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTRY: tl.constexpr,
    COMPOSED: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """The state walks from rank to rank, M never travels.

    COMPOSED: M of all segments is composed before the state arrives, and one product follows it;
    else the state goes through the segments one by one, which writes what enters them on the way.
    """
    rank = link[3]
    matrix, local, entering, entry, matrix_step, state_step, origin, way, columns, scratch = tile
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    state, total, alone = begin_dense(tile, place, K, WIDTH, BR, BC, BK, PRECISION, ENTRY)
    remote, more = rank * 0, position + 1 < count
    if more:
        remote = reserve(link, rank + turn, 0)
    if more & (alone != 0):
        send_state(link, remote, rank + turn, 0, total, MESSAGE, DELAY)
    if position > 0:
        passes = (more & (alone == 0)).to(tl.int32)
        side = segments * 0
        if COMPOSED:
            if passes != 0:
                side = own_matrix(tile, segments, K, WIDTH, BR, BC, BM, BK, PRECISION)
        arrived, state = receive_state(link, rank - turn, 0, BR, BC, MESSAGE, DELAY)
        if passes != 0:
            if COMPOSED:
                own = scratch + side * (BR * BC + BR * BR)
                leaving = get_tile(own, BR, BC) + multiply(
                    own + BR * BC, BR, arrived, BC, BC, K, BR, BC, BK, PRECISION
                )
            else:
                first, value = matrix + origin * matrix_step, local + origin * state_step
                leaving = load_state(value, columns, K, WIDTH, BR, BC)
                leaving += multiply(first, K, arrived, BC, BC, K, BR, BC, BK, PRECISION)
                if segments > 1:
                    following = entering + (origin + way) * state_step
                    store_state(following, columns, leaving, K, WIDTH)
                    leaving = walk(
                        tile,
                        side + 1,
                        segments,
                        segments,
                        0,
                        place[11],
                        K,
                        WIDTH,
                        BR,
                        BC,
                        BK,
                        PRECISION,
                        False,
                    )
            send_state(link, remote, rank + turn, 0, leaving, MESSAGE, DELAY)
        if COMPOSED:
            finish_dense(tile, place, state, K, WIDTH, BR, BC, BK, PRECISION)
        else:
            if passes == 0:
                finish_dense(tile, place, state, K, WIDTH, BR, BC, BK, PRECISION)
            else:
                store_state(entering + origin * state_step, columns, state, K, WIDTH)
        acknowledge(link, rank - turn, 0, 0, MESSAGE)
    else:
        finish_dense(tile, place, state, K, WIDTH, BR, BC, BK, PRECISION)


@triton.jit
def log_scan_dense(
    link,
    tile,
    place,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTRY: tl.constexpr,
    COMPOSED: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Exclusive scan in ROUNDS rounds of elements."""
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    scratch = tile[9]
    needed = (position + 1 < count).to(tl.int32)
    state, side, alone = own_dense(tile, place, needed, K, WIDTH, BR, BC, BM, BK, PRECISION, ENTRY)
    complete, side, alone = doubling_dense(
        link,
        scratch,
        position,
        count,
        needed * 0,
        turn,
        side,
        alone,
        K,
        BR,
        BC,
        BM,
        BK,
        PRECISION,
        ROUNDS,
        MESSAGE,
        DELAY,
    )
    spare = scratch + 2 * (BR * BC + BR * BR)
    state = fold_dense(link, position, state, spare, K, BR, BC, BK, PRECISION, ROUNDS, MESSAGE)
    state = tl.where(complete != 0, state, float("nan"))
    finish_dense(tile, place, state, K, WIDTH, BR, BC, BK, PRECISION)
    acknowledge_rounds(link, position, turn, ROUNDS, MESSAGE)


@triton.jit
def all_gather_dense(
    link,
    tile,
    place,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTRY: tl.constexpr,
    COMPOSED: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Every rank puts its element to all that come after it, and folds those before it."""
    rank = link[3]
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    scratch = tile[9]
    needed = (position + 1 < count).to(tl.int32)
    state, side, alone = own_dense(tile, place, needed, K, WIDTH, BR, BC, BM, BK, PRECISION, ENTRY)
    own = scratch + side * (BR * BC + BR * BR)
    spare = scratch + 2 * (BR * BC + BR * BR)
    for number in range(position + 1, count):
        peer = rank + (number - position) * turn
        remote = reserve(link, peer, peer)
        send_dense(link, remote, peer, rank, own, alone, BR, BC, MESSAGE, DELAY)
    for number in range(position * 0, position):
        peer = rank + (number - position) * turn
        arrived, message = receive(link, peer, peer, MESSAGE, DELAY)
        state = apply_dense(message, state, spare, K, BR, BC, BK, PRECISION)
        state = tl.where(arrived != 0, state, float("nan"))
    finish_dense(tile, place, state, K, WIDTH, BR, BC, BK, PRECISION)
    for number in range(position * 0, position):
        peer = rank + (number - position) * turn
        acknowledge(link, peer, rank, peer, MESSAGE)


@triton.jit
def hierarchical_dense(
    link,
    tile,
    place,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTRY: tl.constexpr,
    COMPOSED: tl.constexpr,
    ROUNDS: tl.constexpr,
    MESSAGE: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Doubling inside a node, one state from node to node; see `hierarchical_elementwise`."""
    rank = link[3]
    position, count, reset, live, segments, turn, part_position, part_count, before, after = place[
        :10
    ]
    scratch = tile[9]
    leads = (part_position + 1 == part_count) & (after != 0)
    needed = ((part_position + 1 < part_count) | leads).to(tl.int32)
    state, side, alone = own_dense(tile, place, needed, K, WIDTH, BR, BC, BM, BK, PRECISION, ENTRY)
    complete, side, alone = doubling_dense(
        link,
        scratch,
        part_position,
        part_count,
        leads.to(tl.int32),
        turn,
        side,
        alone,
        K,
        BR,
        BC,
        BM,
        BK,
        PRECISION,
        ROUNDS,
        MESSAGE,
        DELAY,
    )
    early = (alone != 0) | (before == 0)
    following, remote = rank + turn, rank * 0
    if leads:
        remote = reserve(link, following, ROUNDS + following)
    own = scratch + side * (BR * BC + BR * BR)
    spare = scratch + 2 * (BR * BC + BR * BR)
    if leads & early:
        leaving = get_tile(own, BR, BC)
        send_state(link, remote, following, ROUNDS, leaving, MESSAGE, DELAY)
    source = rank - tl.where(part_position == 0, 1, part_position) * turn
    if before != 0:
        arrived, state = receive_state(link, source, ROUNDS, BR, BC, MESSAGE, DELAY)
        if part_position == 0:
            for number in range(1, part_count):
                peer = rank + (part_count - number) * turn
                inside = reserve(link, peer, ROUNDS + peer)
                send_state(link, inside, peer, ROUNDS, state, MESSAGE, DELAY)
        if leads & (early == 0):
            leaving = get_tile(own, BR, BC) + multiply(
                own + BR * BC, BR, arrived, BC, BC, K, BR, BC, BK, PRECISION
            )
            send_state(link, remote, following, ROUNDS, leaving, MESSAGE, DELAY)
    state = fold_dense(link, part_position, state, spare, K, BR, BC, BK, PRECISION, ROUNDS, MESSAGE)
    state = tl.where(complete != 0, state, float("nan"))
    finish_dense(tile, place, state, K, WIDTH, BR, BC, BK, PRECISION)
    acknowledge_rounds(link, part_position, turn, ROUNDS, MESSAGE)
    if before != 0:
        acknowledge(link, source, ROUNDS + rank, ROUNDS, MESSAGE)
