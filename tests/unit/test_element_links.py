"""Runs of connected ranks, nodes, the choice of a strategy, and the plan of boundary rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from flexla_dist.comm import (
    Line,
    node_runs,
    nodes_of_ids,
    nodes_of_size,
    plan_tails,
)


def test_line_is_the_connected_run() -> None:
    crossing = (True, False, True, True)
    lines = [Line.around(rank, crossing) for rank in range(5)]
    assert [line.ranks for line in lines] == [(0, 1), (0, 1), (2, 3, 4), (2, 3, 4), (2, 3, 4)]
    assert [line.prev_rank for line in lines] == [None, 0, None, 2, 3]
    assert [line.next_rank for line in lines] == [1, None, 3, 4, None]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_reversed_line_swaps_neighbours(size: int) -> None:
    for crossing in itertools.product((False, True), repeat=size - 1):
        for rank in range(size):
            line, back = Line.around(rank, crossing), Line.around(rank, crossing, reverse=True)
            assert back.ranks == line.ranks[::-1] and back.ranks[back.position] == rank
            assert (back.prev_rank, back.next_rank) == (line.next_rank, line.prev_rank)


def test_segments_cut_a_line_at_nodes() -> None:
    line = Line.around(3, (True,) * 4)
    parts = line.segments((0, 0, 1, 1, 2))
    assert [part.ranks for part in parts] == [(0, 1), (2, 3), (4,)]
    assert [part.position for part in parts] == [-1, 1, -1]
    back = Line.around(3, (True,) * 4, reverse=True).segments((0, 0, 1, 1, 2))
    assert [part.ranks for part in back] == [(4,), (3, 2), (1, 0)]
    assert [part.position for part in back] == [-1, 0, -1]


def test_nodes() -> None:
    assert nodes_of_size(5, 2) == (0, 0, 1, 1, 2)
    assert nodes_of_ids(["a", "a", "b", "a"]) == (0, 0, 1, 2)
    assert node_runs((0, 0, 0, 1, 2, 2)) == (3, 1, 2)
    with pytest.raises(ValueError, match="node_size is 0"):
        nodes_of_size(4, 0)


def halo_by_plan(lengths, starts, width):
    """Halos of global token numbers (from 1), moved piece by piece."""
    plan = plan_tails(lengths, starts, width)
    tokens = torch.arange(1, sum(lengths) + 1)
    shards = list(tokens.split(list(lengths))) if sum(lengths) else [tokens] * len(lengths)
    halos = [torch.zeros(width, dtype=torch.long) for _ in lengths]
    for p in plan.pieces:
        part = shards[p.src_rank][p.src_row : p.src_row + p.rows]
        assert len(part) == p.rows > 0
        halos[p.dst_rank][p.dst_row : p.dst_row + p.rows] += part
    return halos


@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 1, 2, 6), (3, 0, 0, 1, 4), (0, 2, 0), (0, 0)])
@pytest.mark.parametrize("width", [0, 1, 3, 7])
def test_tails_hold_the_tokens_just_before_the_shard(lengths, width: int) -> None:
    total = sum(lengths)
    for document in range(total + 1):
        begins = [sum(lengths[:r]) for r in range(len(lengths))]
        starts = [document if begin >= document else 0 for begin in begins]
        halos = halo_by_plan(lengths, starts, width)
        for rank, begin in enumerate(begins):
            expected = [
                p + 1 if lengths[rank] and p >= starts[rank] else 0
                for p in range(begin - width, begin)
            ]
            expected = [0 if p <= 0 else p for p in expected]
            assert halos[rank].tolist() == expected


def test_nothing_moves_where_a_document_starts_with_the_shard() -> None:
    assert plan_tails((4, 4), (0, 4), 3).pieces == ()
    assert plan_tails((4, 0), (0, 4), 3).pieces == ()
    assert len(plan_tails((4, 4), (0, 0), 3).pieces) == 1


def test_plan_checks_its_arguments() -> None:
    for lengths, starts, width in (((1, 2), (0,), 1), ((1, -2), (0, 0), 1), ((1, 2), (0, 0), -1)):
        with pytest.raises(ValueError, match="plan_tails"):
            plan_tails(lengths, starts, width)
