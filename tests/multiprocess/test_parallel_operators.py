"""Every variant sharded over ranks, forward and backward, by every strategy: equal to unsharded."""

from __future__ import annotations

import pytest

from flexla_dist.testing.ranks import run_ranks

from .sharding import PRELOAD, SPECS, STRATEGIES, Case, errors, run_shards

BOUND = 1e-10

# Shards of each number of ranks, unequal and with empty ones, and documents of the same row: empty
# ones, ones that end exactly on a cut, cover a shard, or span more than two ranks; and a new one
# crossing every cut.
SHARDS = {
    2: ((9, 4), (6, 6)),
    3: ((5, 0, 8), (4, 4, 4)),
    4: ((7, 1, 0, 6), (3, 3, 3, 3)),
    5: ((0, 6, 1, 5, 0), (3, 2, 3, 2, 3)),
}
DOCUMENTS = {
    2: ((0, 2, 9, 9, 13), (0, 3, 12)),
    3: ((0, 2, 2, 11, 13, 13), (0, 3, 5, 5, 7, 10, 12)),
    4: ((0, 0, 3, 12, 14), (0, 2, 5, 8, 12)),
    5: ((0, 5, 6, 12, 12), (0, 1, 4, 6, 9, 13)),
}


def layouts(ranks: int) -> list[dict]:
    """Four calls that differ in everything but the variant."""
    uneven, even = SHARDS[ranks]
    return [
        {"lengths": uneven, "batch": 2},
        {"lengths": uneven, "documents": DOCUMENTS[ranks][0], "final": "broadcast"},
        {"lengths": even, "initial": False, "final": "none"},
        {"lengths": even, "documents": DOCUMENTS[ranks][1], "initial": False},
    ]


def check(ranks: int, cases: list[Case]) -> None:
    results = run_ranks(run_shards, ranks, cases, preload=PRELOAD, timeout=300.0)
    wrong = []
    for place, case in enumerate(cases):
        for name, error in errors(case, [values[place] for values in results]).items():
            if not error <= BOUND:
                wrong.append(f"{case}: {name} is off by {error:.2e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_sharded_is_unsharded(ranks: int) -> None:
    """Each variant once for each number of ranks; strategies and layouts take turns."""
    options = layouts(ranks)
    check(
        ranks,
        [
            Case(spec, STRATEGIES[(place + ranks) % 4], **options[(place // 4 + place + ranks) % 4])
            for place, spec in enumerate(SPECS)
        ],
    )


def test_hardly_any_tokens() -> None:
    """Rows without tokens still hand initial states to final states; one rank may hold all."""
    empty = {"lengths": (0, 0), "final": "broadcast"}
    check(
        2,
        [
            Case("gated_delta_rule", "chain", documents=(0, 0, 0), **empty),
            Case("mlstm", "log_scan", batch=2, **empty),
            Case("hgrn", "all_gather", (0, 5), (0, 0, 5, 5)),
            Case("kda", "hierarchical", (5, 0), (0, 5, 5), final="broadcast"),
            Case("simple_gla", "chain", (1, 1)),
        ],
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_every_combination(ranks: int, strategy: str) -> None:
    check(ranks, [Case(spec, strategy, **option) for spec in SPECS for option in layouts(ranks)])
