"""Rooms of a plan in one block of memory."""

from __future__ import annotations

import random

import pytest

from flexla_dist.compiler.executor.packing import SLACK, STEP, Need, choose, most_at_once, pack


def drawn(seed: int, count: int, unit: int = 1 << 20) -> list[Need]:
    generator = random.Random(seed)
    out = []
    for _ in range(count):
        first, last = sorted(generator.choices(range(12), k=2))
        out.append(Need(generator.randint(1, 40) * unit + generator.randint(0, 999), first, last))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_at_once_lies_apart(seed: int) -> None:
    needs = drawn(seed, 14)
    offsets, size = pack(needs)
    assert all(offset % STEP == 0 for offset in offsets)
    assert size <= sum(need.bytes + STEP for need in needs)
    for i, mine in enumerate(needs):
        assert offsets[i] + mine.bytes <= size
        for j, theirs in enumerate(needs[:i]):
            if mine.first <= theirs.last and theirs.first <= mine.last:
                before = offsets[i] + mine.bytes <= offsets[j]
                assert before or offsets[j] + theirs.bytes <= offsets[i]


def test_rooms_one_after_the_other_share_a_place() -> None:
    needs = [Need(1000, at, at) for at in range(5)]
    assert pack(needs) == ([0] * 5, 1024)
    assert pack([]) == ([], 0)


def test_most_at_once_is_counted_at_every_event() -> None:
    needs = drawn(3, 14)
    at = max(range(13), key=lambda at: in_use(needs, at))
    assert most_at_once(needs) == in_use(needs, at)
    assert most_at_once([]) == 0


def in_use(needs: list[Need], at: int) -> int:
    return sum(need.bytes for need in needs if need.first <= at <= need.last)


@pytest.mark.parametrize("seed", range(20))
def test_one_block_for_many_does_not_cost_much_more(seed: int) -> None:
    needs, others = drawn(seed, 14), drawn(100 + seed, 4)
    shared = choose(needs, others)
    inside = [needs[i] for i in shared]
    block = Need(pack(inside)[1], min(n.first for n in inside), max(n.last for n in inside))
    outside = [need for i, need in enumerate(needs) if i not in shared]
    alone = most_at_once([*needs, *others])
    assert most_at_once([block, *outside, *others]) <= alone + SLACK


def test_small_rooms_share_one_block() -> None:
    needs = [Need(1000 + at, at, at + 1) for at in range(9)]
    assert choose(needs, []) == set(range(9))
    large = Need(64 << 20, 0, 0)
    assert choose([*needs, large], [Need(64 << 20, 3, 9)]) == set(range(9))
    assert choose([*needs, large, large._replace(first=5, last=5)], []) == set(range(11))
    assert choose([large], []) == {0} and choose([], []) == set()
