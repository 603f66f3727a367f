"""What a rank does under each system, as a process of the simulation.

Contract: a program does one direction of a call. `at` is the rank's place in the order of the scan
(backward: reversed), so that a program is written once. Times are those of `Direction`.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaling_runs.baselines.systems import STRONG_PANELS, ZECO_BLOCKS
from scaling_runs.model.direction import Direction, Program
from scaling_runs.model.events import Process
from scaling_runs.model.fused import fused_chain, fused_hierarchical


def ideal_best(d: Direction, at: int) -> Process:
    """Local passes alone."""
    yield d.work(at, d.post)


def ideal_same_plan(d: Direction, at: int) -> Process:
    """Summaries and local passes, nothing sent."""
    if at + 1 < d.ranks:
        yield d.work(at, d.pre)
    yield d.work(at, d.post)


def chain(d: Direction, at: int) -> Process:
    """A state a hop."""
    last = at + 1 == d.ranks
    if not last:
        yield d.work(at, d.pre)
    if at:
        yield d.received(at - 1, at, "state")
        if not last:
            yield d.work(at, d.load.kernels.apply)
    if not last:
        d.send("message", at, at + 1, d.load.bytes.state, "state")
    yield d.work(at, d.post)


def log_scan(d: Direction, at: int) -> Process:
    """Recursive doubling."""
    if at + 1 < d.ranks:
        yield d.work(at, d.pre)
    yield from _doubling(d, at, range(d.ranks), keep=False)
    yield d.work(at, d.post)


def _doubling(d: Direction, at: int, places: Sequence[int], keep: bool) -> Process:
    """Rounds among neighbouring places, then the fold of what was received."""
    position, count, distance, received = at - places[0], len(places), 1, 0
    kernels, size = d.load.kernels, d.load.bytes.element
    while distance < count:
        if position + distance < count:
            d.send("message", at, at + distance, size, ("round", distance))
        if position >= distance:
            yield d.received(at - distance, at, ("round", distance))
            received += 1
            if keep or position + 2 * distance < count:
                yield d.work(at, kernels.combine)
        distance *= 2
    if received:
        yield d.work(at, received * kernels.apply)


def hierarchical(d: Direction, at: int) -> Process:
    """Doubling in a node, a chain between the last places of nodes, the state to the rest."""
    size = min(d.network.cluster.node_size, d.ranks)
    node, state = at // size, d.load.bytes.state
    places = range(node * size, min((node + 1) * size, d.ranks))
    leads, more = at == places[-1], places[-1] + 1 < d.ranks
    if at + 1 < d.ranks:
        yield d.work(at, d.pre)
    yield from _doubling(d, at, places, keep=leads and more)
    if not leads:
        if node:
            yield d.received(places[-1], at, "node")
        yield d.work(at, d.post)
        return
    after = min(places[-1] + size, d.ranks - 1)
    if node:
        yield d.received(places[0] - 1, at, "leader")
    if more:
        if node:
            yield d.work(at, d.load.kernels.apply)
        d.send("message", at, after, state, "leader")
    if node:
        for place in places[:-1]:
            d.send("message", at, place, state, "node")
    yield d.work(at, d.post)


def all_gather(d: Direction, at: int) -> Process:
    """An element to every rank, by a collective on streams and else by a message each, then a walk
    over those before."""
    if at + 1 < d.ranks:
        yield d.work(at, d.pre)
    if d.network.cluster.streams:
        yield d.gather("element", d.load.bytes.element)
    else:
        others = [place for place in range(d.ranks) if place != at]
        arrivals = [d.received(place, at, "element") for place in others]
        for place in others:
            d.send("message", at, place, d.load.bytes.element, "element")
        yield from arrivals
    yield d.work(at, at * d.load.kernels.apply)
    yield d.work(at, d.post)


def lasp(d: Direction, at: int) -> Process:
    """The local pass inside the chain."""
    if at:
        yield d.received(at - 1, at, "state")
    yield d.work(at, d.post)
    if at + 1 < d.ranks:
        d.send("p2p", at, at + 1, d.load.bytes.state, "state")


def lasp2(d: Direction, at: int) -> Process:
    """Asynchronous gathers of panels of heads beside summaries and local passes."""
    count, ends = STRONG_PANELS, []
    for panel in range(count):
        if at + 1 < d.ranks:
            yield d.work(at, d.pre / count)
        ends.append(d.gather(("panel", panel), d.load.bytes.element / count))
    for end in ends:
        yield end
        yield d.work(at, at * d.load.kernels.apply / count)
        yield d.work(at, d.post / count)


def lasp2_naive(d: Direction, at: int) -> Process:
    """A blocking gather; every product formed anew."""
    yield d.work(at, d.pre)
    yield d.gather("element", d.load.bytes.element)
    kernels = d.load.kernels
    products = at * (at - 1) / 2 * max(0.0, kernels.combine - kernels.apply)
    yield d.work(at, products + at * kernels.apply)
    yield d.work(at, d.post)


def zeco(d: Direction, at: int) -> Process:
    """A chain in blocks of rows."""
    last, blocks = at + 1 == d.ranks, ZECO_BLOCKS
    if not last:
        yield d.work(at, d.pre)
    arrivals = [d.received(at - 1, at, block) for block in range(blocks if at else 0)]
    for block in range(blocks):
        if at:
            yield arrivals[block]
            if not last:
                yield d.work(at, d.load.kernels.apply / blocks)
        if not last:
            d.send("p2p", at, at + 1, d.load.bytes.state / blocks, block)
    yield d.work(at, d.post)


def ulysses(d: Direction, at: int) -> Process:
    """Inputs to heads, the local pass, outputs to tokens; backward the other way."""
    sizes = (d.load.bytes.token_in, d.load.bytes.token_out)
    first, second = sizes[::-1] if d.reverse else sizes
    yield d.network.all_to_all((d.reverse, "first"), d.load.tokens * first)
    yield d.work(at, d.post)
    yield d.network.all_to_all((d.reverse, "second"), d.load.tokens * second)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        chain,
        log_scan,
        hierarchical,
        all_gather,
        lasp,
        lasp2,
        lasp2_naive,
        zeco,
        ulysses,
        fused_chain,
        fused_hierarchical,
        ideal_same_plan,
        ideal_best,
    )
}
