"""Cuts, documents and their owners, against a count token by token."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from flexla_dist.errors import ShardingError
from flexla_dist.parallel.documents import (
    check_lengths,
    crossing_cuts,
    document_positions,
    documents_of_ranks,
    local_cu_seqlens,
    reach_back,
    read_cu_seqlens,
    shard_lengths,
    shard_offsets,
)


def random_cuts(rng: random.Random, total: int, parts: int) -> tuple[int, ...]:
    """Non-decreasing bounds from 0 to total, with repeats likely."""
    inner = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return (0, *inner, total)


def test_shard_lengths_are_even_and_complete() -> None:
    assert shard_lengths(10, 4) == (3, 3, 2, 2)
    assert shard_lengths(2, 4) == (1, 1, 0, 0)
    assert shard_lengths(0, 3) == (0, 0, 0)
    assert shard_offsets((3, 0, 2)) == (0, 3, 3, 5)


@pytest.mark.parametrize("seed", range(60))
def test_documents_agree_with_a_count_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    total, ranks = rng.choice([0, 1, 7, 12, 30]), rng.randint(1, 6)
    starts = random_cuts(rng, total, rng.randint(1, 8))
    offsets = random_cuts(rng, total, ranks)
    lengths = [high - low for low, high in pairwise(offsets)]
    owner = [n for n in range(len(starts) - 1) for _ in range(starts[n + 1] - starts[n])]

    crossing = crossing_cuts(starts, lengths)
    for rank, cut in enumerate(offsets[1:-1]):
        assert crossing[rank] == (0 < cut < total and owner[cut - 1] == owner[cut])

    locals_ = documents_of_ranks(starts, lengths)
    started, ended = [], []
    for rank, documents in enumerate(locals_):
        low, high = offsets[rank], offsets[rank + 1]
        assert documents.cu_seqlens[-1] == high - low
        rebuilt = [
            documents.first + n
            for n in range(documents.count)
            for _ in range(documents.cu_seqlens[n + 1] - documents.cu_seqlens[n])
        ]
        assert rebuilt == owner[low:high]
        assert documents.continued == (rank > 0 and crossing[rank - 1])
        assert documents.continues == (rank < ranks - 1 and crossing[rank])
        started += [documents.first + n for n in documents.starting]
        ended += [documents.first + n for n in documents.ending]
        positions = [t - starts[owner[t]] for t in range(low, high)]
        assert document_positions(starts, low, high).tolist() == positions
        expected = low - starts[owner[low]] if low < total and low > 0 else 0
        assert reach_back(starts, low) == expected
    assert started == list(range(len(starts) - 1))
    assert ended == list(range(len(starts) - 1))


def test_a_shard_alone() -> None:
    documents = local_cu_seqlens(torch.tensor([0, 4, 4, 10]), 4, 8)
    assert documents.cu_seqlens == (0, 0, 4) and documents.first == 1
    assert not documents.continued and documents.continues
    documents = local_cu_seqlens([0, 4, 10, 10], 5, 10)
    assert documents.cu_seqlens == (0, 5, 5) and documents.continued and not documents.continues
    inside = local_cu_seqlens([0, 10], 5, 5)
    assert inside.count == 0 and inside.continued and inside.continues


@pytest.mark.parametrize(
    "bad,words",
    [
        ([0, 5, 3], "must not decrease"),
        ([1, 5], "must start with 0"),
        ([0], "at least two numbers"),
        (torch.tensor([0.0, 5.0]), "int32 or int64"),
        (torch.zeros(2, 2, dtype=torch.int64), "vector"),
        ([0, 10.9, 96], "cu_seqlens: entry 1 is 10.9, a float; expected whole numbers"),
        ([False, True], "entry 0 is False, a bool"),
        (np.array([0, 96.0]), "entry 0 is .*, a float64"),
        (96, "cu_seqlens is 96, a int; expected whole numbers"),
    ],
)
def test_wrong_cu_seqlens_are_named(bad: object, words: str) -> None:
    with pytest.raises(ShardingError, match=words):
        read_cu_seqlens(bad)  # type: ignore[arg-type]


def test_wrong_lengths_are_named() -> None:
    with pytest.raises(ShardingError, match=r"lengths: entry 1 is 2\.5, a float; expected whole"):
        check_lengths([1, 2.5], 2)  # type: ignore[list-item]
    assert check_lengths(torch.tensor([1, 2]), 2) == (1, 2)  # type: ignore[arg-type]
    assert read_cu_seqlens(np.array([0, 3, 5], dtype=np.uint8)) == (0, 3, 5)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="one for each of the 2 ranks"):
        check_lengths([1, 2, 3], 2)
    with pytest.raises(ShardingError, match="must not be negative"):
        check_lengths([-1, 3], 2)
    with pytest.raises(ShardingError, match="expected 6, the whole sequence"):
        check_lengths([2, 3], 2, total=6)
    with pytest.raises(ShardingError, match="cu_seqlens ends at 4"):
        documents_of_ranks((0, 4), (3, 3))
    with pytest.raises(ShardingError, match="does not lie in a row"):
        local_cu_seqlens([0, 4], 3, 5)
