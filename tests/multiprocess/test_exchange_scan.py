"""Every strategy against a serial walk over the ranks, on real processes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flexla_dist.comm import Element, StateExchanger, Tag, identity_like, zero_state
from flexla_dist.comm.element import element_tensors, with_tensors
from flexla_dist.testing.elements import ELEMENT_KINDS, random_element, serial_scan
from flexla_dist.testing.ranks import run_ranks

TOLERANCE = 1e-12
SETTINGS: list[dict] = [
    {"strategy": "chain"},
    {"strategy": "log_scan"},
    {"strategy": "all_gather"},
    {"strategy": "hierarchical", "node_size": 2},
    {"strategy": "hierarchical", "node_size": 3},
    {"strategy": "hierarchical", "node_ids": "aabcccdd"},
    {"strategy": "hierarchical", "node_ids": "abbbbcde"},
    {"strategy": "hierarchical"},
    {"strategy": "auto"},
]


def exchangers(group: dist.ProcessGroup | None, size: int) -> list[StateExchanger]:
    made = []
    for setting in SETTINGS:
        setting = dict(setting)
        if "node_ids" in setting:
            setting["node_ids"] = list(setting["node_ids"][:size])
        made.append(StateExchanger(group, timeout=30.0, **setting))
    return made


def error_of(found, expected) -> float:
    """Largest error relative to the largest value; infinite where NaN or an infinity differs."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite], b[~finite]):
            return float("inf")
        scale = b[finite].abs().max().item() if finite.any() else 1.0
        worst = max(
            worst, ((a - b)[finite].abs().max().item() if finite.any() else 0) / (scale or 1)
        )
    return worst


def poisoned(element: Element) -> Element:
    """The element of a part that a later reset must hide."""
    tensors = [torch.full_like(t, torch.nan) for t in element_tensors(element)]
    return with_tensors(element, tensors, element.reset)


def cases(size: int, kind: str, seed: int, patterns: int | None):
    """(elements, crossing) with resets, identities and hidden NaN, the same on every rank."""
    g = torch.Generator().manual_seed(seed)
    crossings = list(itertools.product((True, False), repeat=size - 1))
    if patterns is not None:
        chosen = torch.randperm(len(crossings), generator=g)[:patterns].tolist()
        crossings = [crossings[i] for i in sorted({0, *chosen})]
    for crossing in crossings:
        elements = [random_element(kind, g) for _ in range(size)]
        for rank in torch.randperm(size, generator=g)[: size // 3].tolist():
            elements[rank] = identity_like(elements[rank])
        yield elements, crossing
        reset = int(torch.randint(size, (), generator=g))
        elements = [replace(e, reset=rank == reset) for rank, e in enumerate(elements)]
        yield elements, crossing
        elements = [replace(e, reset=True) for e in elements]
        yield elements, crossing


def scan_all_cases(
    rank: int, size: int, kinds: tuple[str, ...], patterns: int | None
) -> tuple[float, int]:
    worst, count = 0.0, 0
    everyone = exchangers(None, size)
    for seed, kind in enumerate(kinds):
        for elements, crossing in cases(size, kind, seed, patterns):
            template = zero_state(elements[rank])
            for exchanger, reverse in itertools.product(everyone, (False, True)):
                expected = serial_scan(elements, crossing, reverse)[rank]
                scan = exchanger.suffix if reverse else exchanger.prefix
                direction = "backward" if reverse else "forward"
                tag = Tag(step=count, layer=seed, direction=direction)
                found = scan(elements[rank], crossing, tag, template)
                error = error_of(found, expected)
                assert error <= TOLERANCE, (
                    f"{kind} {exchanger.strategy} reverse={reverse} crossing={crossing} "
                    f"resets={[e.reset for e in elements]} rank {rank}: {error}"
                )
                worst, count = max(worst, error), count + 1
    return worst, count


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_strategies_equal_the_serial_walk(size: int) -> None:
    results = run_ranks(scan_all_cases, size, ELEMENT_KINDS, 2 if size > 3 else None)
    assert len({count for _, count in results}) == 1
    assert max(error for error, _ in results) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("size", [4, 5, 6, 7])
def test_strategies_equal_the_serial_walk_on_all_patterns(size: int) -> None:
    for kind in ELEMENT_KINDS:
        run_ranks(scan_all_cases, size, (kind,), None if size < 6 else 12, timeout=110)


def scan_with_hidden_nan(rank: int, size: int) -> None:
    g = torch.Generator().manual_seed(3)
    everyone = exchangers(None, size)
    for kind in ELEMENT_KINDS:
        for reset in range(1, size):
            elements = [random_element(kind, g) for _ in range(size)]
            elements[reset] = replace(elements[reset], reset=True)
            bad = [poisoned(e) if i < reset else e for i, e in enumerate(elements)]
            clean = serial_scan(elements, (True,) * (size - 1))
            for exchanger in everyone:
                tag = Tag(step=reset)
                found = exchanger.prefix(
                    bad[rank], (True,) * (size - 1), tag, zero_state(bad[rank])
                )
                if rank > reset:
                    assert error_of(found, clean[rank]) <= TOLERANCE, (kind, exchanger.strategy)


def test_reset_hides_nan_of_earlier_ranks() -> None:
    run_ranks(scan_with_hidden_nan, 4)


def scan_in_subgroups(rank: int, size: int) -> tuple[int, ...]:
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    ends = dist.new_group([0, 3])
    group = odd if rank % 2 else even
    seen = []
    for members in (group, ends) if rank in (0, 3) else (group,):
        for exchanger in exchangers(members, 2):
            for kind in ELEMENT_KINDS:
                g = torch.Generator().manual_seed(11)
                elements = [random_element(kind, g) for _ in range(2)]
                mine = exchanger.rank
                seen.append(mine)
                for reverse in (False, True):
                    scan = exchanger.suffix if reverse else exchanger.prefix
                    found = scan(elements[mine], (True,), Tag(), zero_state(elements[mine]))
                    expected = serial_scan(elements, (True,), reverse)[mine]
                    assert error_of(found, expected) <= TOLERANCE
    return tuple(seen)


def test_ranks_are_those_of_the_group() -> None:
    seen = run_ranks(scan_in_subgroups, 4)
    assert [set(ranks) for ranks in seen] == [{0}, {0}, {1}, {1}]


def single_rank(rank: int, size: int) -> None:
    element = random_element("dense", torch.Generator().manual_seed(0))
    for exchanger in exchangers(None, 1):
        for scan in (exchanger.prefix, exchanger.suffix):
            [state] = scan(element, (), Tag(), zero_state(element))
            assert (state == 0).all()
    with pytest.raises(ValueError, match="crossing has 1 entries, expected 0"):
        exchanger.prefix(element, (True,), Tag(), zero_state(element))
    with pytest.raises(ValueError, match="template has shapes"):
        exchanger.prefix(element, (), Tag(), (torch.zeros(1),))
    with pytest.raises(ValueError, match="strategy is 'ring', expected one of: auto"):
        StateExchanger(None, "ring")
    with pytest.raises(ValueError, match="not both"):
        StateExchanger(None, node_size=1, node_ids=[0])


def test_one_rank_needs_nobody() -> None:
    run_ranks(single_rank, 1)


def count_messages(rank: int, size: int) -> list[int]:
    """Posted sends and receives of this rank per strategy when no document crosses its cuts."""
    element = random_element("dense", torch.Generator().manual_seed(rank))
    posted = []
    for exchanger in exchangers(None, size):
        counts = []
        post = exchanger._channel._post

        def counting(kind, tag, sends, receives, post=post, counts=counts):
            sends, receives = list(sends), list(receives)
            counts += [*sends, *receives]
            post(kind, tag, sends, receives)

        exchanger._channel._post = counting
        exchanger.prefix(element, (True, False, False), Tag(), zero_state(element))
        posted.append(len(counts))
    return posted


def test_nothing_is_sent_where_no_document_crosses() -> None:
    first, second, *others = run_ranks(count_messages, 4)
    assert set(others[0] + others[1]) == {0}
    gathers = [s["strategy"] == "all_gather" for s in SETTINGS]
    assert first == second == [0 if gather else 1 for gather in gathers]


def shipped_bytes(rank: int, size: int) -> int:
    element = random_element("dense", torch.Generator().manual_seed(rank))
    exchanger = StateExchanger(None, "chain")
    sizes = []
    post = exchanger._channel._post

    def counting(kind, tag, sends, receives):
        sends = list(sends)
        sizes.extend(buffer.numel() for _, buffer in sends)
        post(kind, tag, sends, receives)

    exchanger._channel._post = counting
    exchanger.prefix(element, (True,), Tag(), zero_state(element))
    return sum(sizes)


def test_chain_ships_the_state_and_a_header() -> None:
    assert run_ranks(shipped_bytes, 2) == [2 * 3 * 4 * 5 * 8 + 64, 0]
