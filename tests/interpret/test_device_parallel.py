"""States by kernels through the sequence-parallel wrappers: real processes, interpreted kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from flexla_dist.spec.variants.registry import variant_names
from flexla_dist.testing.ranks import run_ranks

from . import device_parallel_cases as cases
from .device_parallel_cases import STRATEGIES, Case

VARIANTS = variant_names()
KINDS = ("linear_attn_normalized", "mamba2", "gla", "kda")  # two states; scalar, rows, dense M
LENGTHS = {2: (21, 16), 3: (9, 20, 8), 4: (9, 0, 20, 8), 5: (0, 7, 9, 16, 0)}
# Starts on cuts, a document that spans three ranks, one that is a whole shard, one of one token.
PACKED = {
    2: (0, 5, 21, 22, 37),
    3: (0, 3, 30, 37),
    4: (0, 9, 10, 34, 37),
    5: (0, 16, 17, 32),
}


def check(size: int, chosen: list[Case]) -> None:
    ranks = run_ranks(cases.run_shards, size, chosen, preload=cases.PRELOAD)
    for number, case in enumerate(chosen):
        found = cases.errors(case, [values[number] for values in ranks])
        worst = max(found, key=lambda name: found[name])
        assert found[worst] < cases.BOUND, f"{case}: {worst} is off by {found[worst]:.2e}"


def covering(size: int) -> list[Case]:
    """Every variant on three ranks, one of every kind of M on two and four; strategies in turn."""
    names = VARIANTS if size == 3 else KINDS
    turns = [STRATEGIES[(at + size) % 4] for at in range(len(names))]
    return [Case(n, turn, LENGTHS[size]) for n, turn in zip(names, turns, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_variant(size: int) -> None:
    check(size, covering(size))


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.long), 4])
def test_packed_documents(size: int) -> None:
    names = ("simple_gla", "gla", "gated_delta_rule", "linear_attn_normalized")
    pairs = zip(names, STRATEGIES, strict=True)
    chosen = [Case(name, strategy, LENGTHS[size], PACKED[size]) for name, strategy in pairs]
    check(size, [replace(chosen[0], final="broadcast"), *chosen[1:]])


def test_rows_and_states() -> None:
    check(
        2,
        [
            Case("gla", "chain", LENGTHS[2], batch=2),
            Case("gated_delta_rule", "auto", LENGTHS[2], batch=2, final="broadcast"),
            Case("kda", "all_gather", LENGTHS[2], initial=False, final="none"),
        ],
    )


@pytest.mark.parametrize("size", [2])
def test_generated_kernels(size: int) -> None:
    chosen = [
        Case("simple_gla", "chain", LENGTHS[size], executor="triton"),
        Case("gated_delta_rule", "log_scan", LENGTHS[size], PACKED[size], executor="triton"),
    ]
    check(size, chosen)


def test_shards_of_several_segments() -> None:
    lengths, documents = (40, 36), (0, 8, 60, 76)
    cut = {"executor": "triton", "segment": 1}
    check(
        2,
        [
            Case("gla", "chain", lengths, final="broadcast", **cut),
            Case("gated_delta_rule", "chain", lengths, documents, **cut),
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_grid(size: int, strategy: str) -> None:
    plain = [
        Case(name, strategy, LENGTHS[size], batch=1 + at % 2) for at, name in enumerate(VARIANTS)
    ]
    packed = [Case(name, strategy, LENGTHS[size], PACKED[size]) for name in VARIANTS]
    check(size, plain + packed)


@pytest.mark.long
@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "kda", "mamba2"])
@pytest.mark.parametrize("size", [2, 3])
def test_generated_kernels_of_more_variants(size: int, name: str) -> None:
    lengths, packed = LENGTHS[size], PACKED[size]
    check(size, [Case(name, s, lengths, packed, executor="triton") for s in ("chain", "log_scan")])
