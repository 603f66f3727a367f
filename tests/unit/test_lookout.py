"""What ends a device's waits for a rank that failed, ended or is late; with doubles of NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flexla_dist.comm import ExchangeError, ExchangeTimeout, RemoteRankError, agreement
from flexla_dist.comm.after_backward import AfterBackward
from flexla_dist.comm.lookout import Waits
from flexla_dist.comm.watch import Waiting

from .lookout_doubles import BackendDouble, Process, Rank


@pytest.fixture
def process() -> Iterator[Process]:
    found = Process()
    yield found
    found.kill()


def look(rank: Rank, times: int = 2) -> None:
    assert rank.lookout is not None
    for _ in range(times):
        rank.lookout.look()


def passive(rank: Rank) -> Rank:
    """Without the thread, so that the test looks itself."""
    assert rank.lookout is not None
    rank.lookout._thread = threading.current_thread()
    return rank


def raises_everywhere(rank: Rank, error: type[ExchangeError], text: str) -> None:
    """The next check, the next exchange and the kernels' check raise it; it was told to others."""
    with pytest.raises(error, match=text):
        rank.works.check()
    with pytest.raises(error, match=f"{text}.*an earlier failure"):
        rank.watch.begin("the next exchange")
    assert rank.lookout is not None
    with pytest.raises(error, match=text):
        rank.lookout.raise_error()


def test_a_process_that_ended(process: Process) -> None:
    rank = passive(Rank().meet(process.place))
    rank.post()
    look(rank)
    assert rank.group.backend.aborts == 0
    rank.works.forget_completed()
    process.kill()
    look(rank, 1)
    assert rank.group.backend.aborts == 0  # it is believed when it is seen twice
    look(rank, 1)
    assert rank.group.backend.aborts == 1
    raises_everywhere(rank, RemoteRankError, r"the process of rank 1 \(pid \d+\) has ended")
    look(rank)
    assert rank.group.backend.aborts == 1
    other = Rank(1, rank.store)
    with pytest.raises(RemoteRankError, match=r"rank 0 failed.*process of rank 1"):
        other.watch.raise_remote_failure()


def test_a_process_that_ended_after_its_part(process: Process) -> None:
    rank = passive(Rank().meet(process.place))
    rank.post(done=True)
    process.kill()
    look(rank, 3)
    assert rank.group.backend.aborts == 0
    rank.works.check()
    assert not rank.works.active
    rank.watch.begin("the next exchange")


def test_a_failure_that_another_rank_told() -> None:
    rank = passive(Rank().meet())
    other = Rank(1, rank.store)
    rank.post()
    with pytest.raises(ZeroDivisionError), other.watch.guard("the loss"):
        1 / 0  # noqa: B018
    look(rank, 1)
    assert rank.group.backend.aborts == 1
    raises_everywhere(rank, RemoteRankError, "rank 1 failed in the loss: ZeroDivisionError")


def test_a_wait_over_its_limit() -> None:
    rank = passive(Rank(timeout=0.2).meet())
    rank.post("first", done=True)
    rank.post("second")
    look(rank)
    assert rank.group.backend.aborts == 0
    time.sleep(0.25)
    look(rank, 1)
    assert rank.group.backend.aborts == 1
    raises_everywhere(rank, ExchangeTimeout, "rank 0 waited 0.* s for rank 1 in second")
    with pytest.raises(RemoteRankError, match=r"rank 0 failed.*ExchangeTimeout"):
        Rank(1, rank.store).watch.raise_remote_failure()


def test_a_send_has_no_limit_of_its_own() -> None:
    rank = passive(Rank(timeout=0.1).meet())
    work = rank.post(done=True)
    rank.works.forget_completed()
    work.done = False
    rank.works.keep(work, Waiting(1, "send"))  # type: ignore[arg-type]
    time.sleep(0.15)
    look(rank)
    assert rank.group.backend.aborts == 0
    rank.works.check()
    assert rank.works.active  # a rank that ends would still be noticed


def test_a_failure_of_this_rank_ends_its_own_waits() -> None:
    rank = passive(Rank().meet())
    rank.post()
    with pytest.raises(KeyError), rank.watch.guard("the projection"):
        raise KeyError("q_proj")
    look(rank, 1)
    assert rank.group.backend.aborts == 1


def test_a_call_that_hangs_before_it_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects to a peer at its first message, and waits for it on the host."""
    rank = passive(Rank(timeout=0.3).meet())
    with rank.works.starting(Waiting(1, "first message"), torch.device("cpu")):
        look(rank)
        assert rank.group.backend.aborts == 0
        monkeypatch.setattr("flexla_dist.comm.stream_works.STARTING_SECONDS", 0.2)
        time.sleep(0.35)
        look(rank, 1)
    assert rank.group.backend.aborts == 1
    raises_everywhere(rank, ExchangeTimeout, "in first message")


def test_an_abort_waits_for_a_call_and_no_further_call_begins() -> None:
    rank = passive(Rank(timeout=0.1).meet())
    rank.post()
    time.sleep(0.15)
    looker = threading.Thread(target=look, args=(rank, 1))
    with rank.works.starting(Waiting(1, "a message"), torch.device("cpu")):
        looker.start()
        time.sleep(0.3)
        assert rank.watch.failed and rank.group.backend.aborts == 0
    looker.join(10)
    assert rank.group.backend.aborts == 1
    with (
        pytest.raises(ExchangeTimeout),
        rank.works.starting(Waiting(1, "another"), torch.device("cpu")),
    ):
        raise AssertionError("it was posted")


def test_a_backend_that_cannot_abort() -> None:
    rank = passive(Rank(timeout=0.1).meet())
    rank.group.backend.refuses = True
    compared: list[list[int]] = []
    rank.expect_header(rank.post(), compared)
    time.sleep(0.15)
    look(rank, 1)
    raises_everywhere(rank, ExchangeTimeout, "waited")
    assert not compared
    assert "could not be aborted: no abort here" in str(rank.watch.error.__notes__)  # type: ignore[union-attr]


def test_what_an_ended_wait_left_is_no_header() -> None:
    rank = passive(Rank(timeout=0.1).meet())
    compared: list[list[int]] = []
    work = rank.post()
    rank.expect_header(work, compared)
    rank.works.compare_headers(wait=False)
    time.sleep(0.15)
    look(rank, 1)
    assert work.done
    with pytest.raises(ExchangeTimeout):
        rank.works.compare_headers(wait=False)
    assert not compared


def test_a_lost_store() -> None:
    rank = passive(Rank().meet())

    def lost() -> None:
        raise RuntimeError("Connection reset by peer")

    assert rank.lookout is not None
    rank.lookout._board.failure = lost  # type: ignore[method-assign, assignment]
    rank.post()
    look(rank, 1)
    raises_everywhere(rank, RemoteRankError, "lost the store of its group.*reset by peer")


class KernelsDouble(Waits):
    """Waits of kernels; they note how often communicators had been aborted before them."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.aborts_before: list[int] = []

    def end(self, error: ExchangeError) -> None:
        self.aborts_before.append(self.rank.group.backend.aborts)


def test_kernels_are_ended_before_communicators() -> None:
    """An abort waits for the device, on which a kernel may wait for the same rank."""
    rank = passive(Rank(timeout=0.1).meet())
    kernels = KernelsDouble(rank)
    assert rank.lookout is not None
    rank.lookout.add(kernels, first=True)
    rank.post()
    time.sleep(0.15)
    look(rank, 1)
    assert kernels.aborts_before == [0] and rank.group.backend.aborts == 1


def test_one_kind_of_waits_may_rest_alone() -> None:
    rank = passive(Rank().meet())
    kernels = KernelsDouble(rank)
    assert rank.lookout is not None
    rank.lookout.add(kernels, first=True)
    rank.lookout.start(kernels)
    work = rank.post()
    rank.lookout.rest(kernels)
    assert rank.lookout._busy.is_set() and rank.works.active
    work.done = True
    rank.works.check()
    assert not rank.lookout._busy.is_set()


class Ends(torch.autograd.Function):
    """A node whose backward posts a receive that never comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Rank, after: AfterBackward) -> torch.Tensor:
        ctx.rank, ctx.after = rank, after
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.rank.expect_header(ctx.rank.post("gradient of a state"), [])
        ctx.after.ask()
        return grad, None, None


def test_the_end_of_backward_raises_within_two_seconds(process: Process) -> None:
    """With the thread: the host waits in the check, the other process is killed."""
    rank = Rank().meet(process.place)
    after = AfterBackward(rank.works.check)
    x = torch.zeros(2, requires_grad=True)
    loss = Ends.apply(Ends.apply(x, rank, after), rank, after).sum()
    killer = threading.Timer(0.7, process.kill)
    killer.start()
    start = time.monotonic()
    with pytest.raises(RemoteRankError, match="the process of rank 1"):
        loss.backward()
    assert 0.7 < time.monotonic() - start < 0.7 + 2.0
    killer.join(10)
    deadline = time.monotonic() + 5
    while rank.group.backend.aborts == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rank.group.backend.aborts == 1


def test_a_paused_check() -> None:
    rank = passive(Rank().meet())
    after = AfterBackward(rank.works.check)
    after.paused = True
    x = torch.zeros(2, requires_grad=True)
    Ends.apply(x, rank, after).sum().backward()  # would wait for ever
    assert x.grad is not None


def test_what_an_ended_wait_left_is_no_block() -> None:
    """A group of NCCL alone compares small values on the device."""
    rank = passive(Rank(timeout=0.1).meet())

    class ChannelDouble:
        """Gathers what lies in memory, as after an abort."""

        ranks, watch = RanksDouble(), rank.watch

        def gather_blocks(self, what: str, own: torch.Tensor) -> torch.Tensor:
            rank.post(what)
            time.sleep(0.15)
            look(rank, 1)
            return torch.stack([own, own])

    channel: Any = ChannelDouble()
    with pytest.raises(ExchangeTimeout):
        agreement.agree(channel, "shapes", (1, 2), None)


class RanksDouble:
    """Two ranks whose small values live on the CPU."""

    size = 2

    def control_device(self) -> torch.device:
        return torch.device("cpu")


def test_a_backend_inside_of_another() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch puts one that checks around each."""

    class OuterDouble:
        """Aborts nothing itself."""

        def __init__(self, inner: BackendDouble) -> None:
            self.wrapped_pg = inner

        def abort(self) -> None:
            raise AssertionError("the outer one was asked")

    rank = passive(Rank(timeout=0.1).meet())
    inner = rank.group.backend
    rank.group._get_backend = lambda device: OuterDouble(inner)  # type: ignore[method-assign, assignment, return-value]
    rank.post()
    time.sleep(0.15)
    look(rank, 1)
    assert inner.aborts == 1


def test_all_is_well() -> None:
    """Headers are compared by the check, which ends the looking."""
    rank = Rank().meet()
    compared: list[list[int]] = []
    after = AfterBackward(rank.works.check)
    x = torch.zeros(2, requires_grad=True)
    rank.expect_header(rank.post(done=True), compared)
    Ends.apply(x, rank, after).sum()
    rank.works.check()
    assert compared == [[0, 0]] and not rank.works.active
    assert rank.lookout is not None and rank.lookout.error is None
