"""Nothing hangs: raising, dead, late and confused ranks end all waits with a clear error."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from flexla_dist.comm import (
    Element,
    ExchangeError,
    ExchangeTimeout,
    RankMismatch,
    RemoteRankError,
    StateElement,
    StateExchanger,
    Tag,
    TagMismatch,
    plan_tails,
    zero_state,
)
from flexla_dist.testing.elements import serial_scan
from flexla_dist.testing.ranks import RankError, run_ranks

FIRST = Tag()
STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")


def element_of(rank: int, width: int = 4) -> Element:
    local = torch.full((1, 1, width, width), float(rank + 1), dtype=torch.float64)
    return Element((StateElement(local, torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)),))


def exchange(exchanger: StateExchanger, tag: Tag = FIRST):
    element = element_of(exchanger.rank)
    crossing = (True,) * (exchanger.size - 1)
    return exchanger.prefix(element, crossing, tag, zero_state(element))


def raise_in_guard(rank: int, size: int, strategy: str) -> tuple[str, float]:
    exchanger = StateExchanger(None, strategy, node_size=2, timeout=30.0)
    exchange(exchanger)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises((RemoteRankError, KeyError)) as caught:
        if rank == 0:
            time.sleep(0.3)
            with exchanger.guard("the projection of layer 3"):
                raise KeyError("q_proj is missing")
        exchange(exchanger, Tag(step=1))
    if rank != 0:
        with pytest.raises(RemoteRankError, match="earlier failure"):
            exchange(exchanger, Tag(step=2))
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - start


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peers_of_a_raising_rank_raise(strategy: str) -> None:
    first, *others = run_ranks(raise_in_guard, 3, strategy, timeout=25)
    assert first[0].startswith("KeyError")
    for text, seconds in others:
        assert text.startswith("RemoteRankError: rank 0 failed in the projection of layer 3")
        assert "KeyError: 'q_proj is missing'" in text
        assert seconds < 3


def raise_late_for_a_rank_that_never_waits(rank: int, size: int) -> str:
    exchanger = StateExchanger(None, "chain", timeout=30.0)
    exchange(exchanger)
    if rank == 1:
        with pytest.raises(ZeroDivisionError), exchanger.guard("the loss"):
            1 / 0  # noqa: B018
        with pytest.raises(ExchangeError, match="rank 1 failed in the loss"):
            exchange(exchanger, Tag(step=1))
        return "raised"
    with pytest.raises(RemoteRankError, match="rank 1 failed in the loss: ZeroDivisionError"):
        for step in range(1, 100):
            exchange(exchanger, Tag(step=step))
            time.sleep(0.1)
    return "told"


def test_first_rank_of_a_chain_hears_of_failures() -> None:
    assert run_ranks(raise_late_for_a_rank_that_never_waits, 2, timeout=30) == ["told", "raised"]


def die(rank: int, size: int, strategy: str, how: str) -> None:
    exchanger = StateExchanger(None, strategy, node_size=2, timeout=30.0)
    exchange(exchanger)
    dist.barrier()
    if rank == 0:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    exchange(exchanger, Tag(step=1))


@pytest.mark.parametrize(("strategy", "how"), [("chain", "kill"), ("all_gather", "exit")])
def test_peers_of_a_dead_rank_raise(strategy: str, how: str) -> None:
    start = time.monotonic()
    first, *others = run_ranks(die, 3, strategy, how, expect_errors=True, timeout=25)
    assert first == RankError("Died", "signal 9" if how == "kill" else "exit code 3")
    for error in others:
        assert error is not None and error.type == "RemoteRankError"
        assert "lost" in error.message or "failed" in error.message
    assert time.monotonic() - start < 12


def confused(rank: int, size: int, what: str) -> str:
    exchanger = StateExchanger(None, "log_scan", timeout=30.0)
    exchange(exchanger)
    element = element_of(rank)
    start = time.monotonic()
    with pytest.raises(RankMismatch) as caught:
        if rank == 1 and what == "agree":
            exchanger.agree("shapes of layer 5", (1, 2))
        elif rank == 1:
            exchanger.suffix(element, (True, True), Tag(9, layer=2), zero_state(element))
        exchange(exchanger, Tag(9, layer=1))
        exchanger.agree("end", ())
    assert time.monotonic() - start < 8
    return str(caught.value)


@pytest.mark.parametrize("what", ["agree", "suffix"])
def test_different_operations_are_found(what: str) -> None:
    for text in run_ranks(confused, 3, what, timeout=25):
        assert "different operations" in text and "exchange number 2" in text
        assert "prefix by log_scan of 128 bytes (step 9, micro-batch 0, layer 1" in text
        assert ("agree(shapes of layer 5: 1, 2)" if what == "agree" else "layer 2") in text


def collecting(rank: int, size: int, first: str, second: str) -> str:
    """Small collectives and an all-gather of other sizes meet; no rank may be ended by that."""
    exchanger = StateExchanger(None, "all_gather", timeout=30.0)
    what = second if rank == 1 else first
    start = time.monotonic()
    with pytest.raises(RankMismatch) as caught:
        if what == "agree":
            exchanger.agree("plan", (1, "x" * 3000))
        elif what == "scan":
            exchange(exchanger)
        else:
            exchanger.gather_integers("lengths", range(int(what)), hint=f"hint of {rank}")
        exchanger.agree("end", ())
    assert time.monotonic() - start < 8
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"), [("1", "agree"), ("agree", "200"), ("1", "2"), ("agree", "scan")]
)
def test_collectives_of_different_sizes_meet_safely(first: str, second: str) -> None:
    for text in run_ranks(collecting, 3, first, second, timeout=25):
        assert "different operations" in text
        if first == "1":
            assert "rank 0: [gather_integers(lengths, 1 values)]. hint of 0" in text
        assert ("prefix" if second == "scan" else "rank 1: [") in text


def other_nodes(rank: int, size: int) -> str:
    exchanger = StateExchanger(None, "hierarchical", node_size=1 + (rank != 1), timeout=30.0)
    with pytest.raises(RankMismatch) as caught:
        exchange(exchanger)
        exchanger.agree("end", ())
    return str(caught.value)


def test_other_nodes_are_found() -> None:
    for text in run_ranks(other_nodes, 3, timeout=25):
        assert "nodes of (1, 1, 1) ranks" in text and "nodes of (2, 1) ranks" in text


def wrong_tag(rank: int, size: int) -> str:
    exchanger = StateExchanger(None, "chain", timeout=30.0)
    expected = TagMismatch if rank == 1 else RemoteRankError
    with pytest.raises(expected) as caught:
        exchange(exchanger, Tag(4, 0, layer=2 + rank))
        exchanger.agree("end", ())
    return str(caught.value)


def test_message_of_another_layer_is_an_error() -> None:
    for text in run_ranks(wrong_tag, 2, timeout=25):
        assert "layer 2" in text and "layer 3" in text and "got state of 128 bytes" in text


def late(rank: int, size: int) -> str:
    exchanger = StateExchanger(None, "chain", timeout=1.0)
    exchange(exchanger)
    dist.barrier()
    if rank == 0:
        time.sleep(3)
        return "slept"
    start = time.monotonic()
    expected = (ExchangeTimeout, RemoteRankError)
    with pytest.raises(expected) as caught:
        exchange(exchanger, Tag(7, layer=4))
    assert time.monotonic() - start < 2.5
    return f"{type(caught.value).__name__}: {caught.value}"


def test_waiting_is_bounded_and_names_the_peer() -> None:
    texts = run_ranks(late, 2, timeout=20)
    assert "ExchangeTimeout: rank 1 waited 1." in texts[1]
    assert "for rank 0 in state exchange (step 7, micro-batch 0, layer 4" in texts[1]


def slow_but_right(rank: int, size: int) -> float:
    """A rank that computes for longer than the detector's patience is no error."""
    exchanger = StateExchanger(None, "chain", timeout=30.0)
    for step in range(3):
        if rank == step == 0:
            time.sleep(2.6)
        [state] = exchange(exchanger, Tag(step))
        exchanger.agree("plan", (step,))
    return state.flatten()[0].item()


def test_slow_ranks_are_waited_for() -> None:
    assert run_ranks(slow_but_right, 3, timeout=40) == [0.0, 1.0, 2.5]


def many(rank: int, size: int, count: int) -> float:
    rng = random.Random(rank)
    exchangers = [StateExchanger(None, s, node_size=2, timeout=30.0) for s in STRATEGIES]
    plan = plan_tails((2,) * size, (0,) * size, 3)
    total = 0.0
    for step in range(count):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.01)
        exchanger = exchangers[step % len(exchangers)]
        element = element_of(rank)
        crossing = tuple((step >> cut) % 3 != 0 for cut in range(size - 1))
        template = zero_state(element)
        [forward] = exchanger.prefix(element, crossing, Tag(step), template)
        exchanger.transfer(torch.full((1, 2, 4), float(step)), plan, Tag(step))
        tag = Tag(step, direction="backward")
        [backward] = exchanger.suffix(element, crossing, tag, template)
        elements = [element_of(other) for other in range(size)]
        for found, reverse in ((forward, False), (backward, True)):
            [expected] = serial_scan(elements, crossing, reverse)[rank]
            assert torch.equal(found, expected)
        total += forward.sum().item() - backward.sum().item()
    return total


def test_many_exchanges_with_random_delays() -> None:
    assert len(set(run_ranks(many, 4, 200, timeout=60))) > 1


@pytest.mark.long
def test_very_many_exchanges_with_random_delays() -> None:
    run_ranks(many, 5, 2000, timeout=110)


def bad_arguments(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="timeout is 0"):
        StateExchanger(None, timeout=0)
    group = dist.new_group([1])
    if rank == 0:
        with pytest.raises(ValueError, match="no member of the group"):
            StateExchanger(group)


def test_arguments_are_checked() -> None:
    run_ranks(bad_arguments, 2)
