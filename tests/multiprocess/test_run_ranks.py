"""`run_ranks` itself: results, tracebacks, deaths, time-outs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from flexla_dist.testing.ranks import RankError, RanksFailed, run_ranks


def add_ranks(rank: int, world_size: int, bias: torch.Tensor) -> torch.Tensor:
    total = bias + rank
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    return total


def fail_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        raise KeyError("the one that matters")
    dist.barrier()
    return rank


def die_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def sleep_on_zero(rank: int, world_size: int) -> int:
    if rank == 0:
        time.sleep(60)
    return rank


def read_environment(rank: int, world_size: int) -> tuple[str, str, bool]:
    return os.environ["RANK"], os.environ["FLEXLA_WORD"], dist.is_initialized()


def start_from_environment(rank: int, world_size: int) -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def test_results_come_in_rank_order() -> None:
    results = run_ranks(add_ranks, 3, torch.ones(2))
    assert len(results) == 3
    for result in results:
        torch.testing.assert_close(result, torch.full((2,), 6.0))


def test_first_failing_rank_is_named_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 of 2 failed: KeyError") as caught:
        run_ranks(fail_on_one, 2)
    assert "fail_on_one" in str(caught.value)
    assert time.monotonic() - start < 20


def test_killed_rank_is_reported() -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2 failed: Died: signal 9"):
        run_ranks(die_on_one, 2)


def test_expected_errors_are_returned_per_rank() -> None:
    assert run_ranks(die_on_one, 2, expect_errors=True) == [None, RankError("Died", "signal 9")]


def test_timeout_shows_where_the_rank_was() -> None:
    with pytest.raises(RanksFailed, match="TimedOut") as caught:
        run_ranks(sleep_on_zero, 2, timeout=1.5)
    assert "sleep_on_zero" in str(caught.value)


def test_environment_and_no_group() -> None:
    results = run_ranks(read_environment, 2, backend=None, environment={"FLEXLA_WORD": "x"})
    assert results == [("0", "x", False), ("1", "x", False)]
    assert run_ranks(start_from_environment, 2, backend=None) == [0, 1]


def test_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="top of a module"):
        run_ranks(lambda rank, world_size: rank, 2)
