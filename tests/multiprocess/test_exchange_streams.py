"""What exchanges ask of NCCL: one communicator, made by all ranks, and no order that hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flexla_dist.comm import ExchangeError, Tag, plan_tails, zero_state
from flexla_dist.comm.after_backward import AfterBackward
from flexla_dist.comm.channel import Outgoing
from flexla_dist.comm.stream_works import StreamWorks
from flexla_dist.comm.tag import Kind
from flexla_dist.layers import LayerConfig, LinearAttentionLayer
from flexla_dist.parallel import (
    SequenceParallelLA,
    check_exchanges,
    sequence_context,
    shard_sequence,
)
from flexla_dist.parallel.runtime import runtime_of
from flexla_dist.testing.elements import random_element, serial_scan
from flexla_dist.testing.ranks import run_ranks

from .nccl_double import ALL, Call, exchanger_on_streams, recorded, unfinished

STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")


def crossings_of(size: int) -> list[tuple[bool, ...]]:
    """All cuts; without the first, so that a rank is alone; every other one."""
    cuts = size - 1
    return [
        (True,) * cuts,
        (False, *(True,) * (cuts - 1)),
        tuple(i % 2 == 0 for i in range(cuts)),
    ]


def scan_on_streams(rank: int, size: int, first: str) -> tuple[float, list[Call]]:
    exchanger = exchanger_on_streams(first, node_size=2, timeout=30.0)
    worst, step = 0.0, 0
    with recorded(exchanger._channel) as calls:  # type: ignore[arg-type]
        for strategy in sorted(STRATEGIES, key=lambda name: name != first):
            user = exchanger.using(strategy, node_size=2)
            for crossing in crossings_of(size):
                for reset in (-1, size // 2):
                    g = torch.Generator().manual_seed(step)
                    elements = [random_element("dense", g) for _ in range(size)]
                    elements = [replace(e, reset=i == reset) for i, e in enumerate(elements)]
                    for reverse in (False, True):
                        scan = user.suffix if reverse else user.prefix
                        found = scan(elements[rank], crossing, Tag(step), zero_state(elements[0]))
                        expected = serial_scan(elements, crossing, reverse)[rank]
                        for a, b in zip(found, expected, strict=True):
                            worst = max(worst, (a - b).abs().max().item())
                    step += 1
        exchanger.flush()
    return worst, calls


@pytest.mark.parametrize(
    ("size", "first"), [(2, "chain"), (3, "log_scan"), (4, "hierarchical"), (5, "log_scan")]
)
def test_scans_end_on_one_communicator(size: int, first: str) -> None:
    found = run_ranks(scan_on_streams, size, first)
    assert max(worst for worst, _ in found) <= 1e-11
    ranks = [calls for _, calls in found]
    assert all(calls[0] == ALL for calls in ranks)
    assert {kind for calls in ranks for kind, _ in calls} == {"all", "batch"}
    assert unfinished(ranks) == {}


def rows_on_streams(rank: int, size: int) -> tuple[list[float], list[Call]]:
    exchanger = exchanger_on_streams("chain", timeout=30.0)
    lengths = (1, 0, 1, 4)[:size]
    plan = plan_tails(lengths, (0,) * size, 3)
    with recorded(exchanger._channel) as calls:  # type: ignore[arg-type]
        halo = exchanger.transfer(torch.full((1, lengths[rank], 2), float(rank + 1)), plan, Tag())
        grad = exchanger.transfer_adjoint(torch.ones_like(halo), plan, Tag())
        sent = exchanger.broadcast((torch.tensor([float(rank)]),), size - 1, Tag())[0]
        exchanger.flush()
    return [*halo[0, :, 0].tolist(), grad.sum().item(), sent.item()], calls


def test_rows_from_several_ranks_end() -> None:
    found = run_ranks(rows_on_streams, 4)
    assert [values for values, _ in found] == [
        [0, 0, 0, 4, 3],  # its row is needed by the ranks 2 and 3
        [0, 0, 0, 0, 3],
        [0, 0, 1, 2, 3],
        [0, 1, 3, 0, 3],
    ]
    ranks = [calls for _, calls in found]
    assert all(calls[0] == ALL for calls in ranks)
    assert {kind for calls in ranks for kind, _ in calls} == {"all", "batch"}
    assert unfinished(ranks) == {}


def checks_of_a_step(rank: int, size: int, conv_width: int) -> list[int]:
    """Checks in a backward pass of two layers, in the context around it, in one without gradients,
    by the caller, and inside of calls that leave theirs."""
    group = dist.group.WORLD
    assert group is not None
    exchanger = exchanger_on_streams("auto", timeout=30.0)
    sizes = {"width": 8, "heads": 1, "key_dim": 4, "value_dim": 4, "conv_width": conv_width}
    config = LayerConfig("simple_gla", **sizes)
    net = torch.nn.Sequential(*(LinearAttentionLayer(config) for _ in range(2)))
    for layer in net:
        SequenceParallelLA(layer, group=group, backend="host")
    check, seen, counts = StreamWorks.check, [0], []

    def count(self: StreamWorks) -> None:
        seen[0] += 1
        check(self)

    StreamWorks.check = count  # type: ignore[method-assign]
    exchanger.after_backward = AfterBackward(exchanger._channel.works.check)
    runtime_of(group)._exchangers = {("auto", None): exchanger}
    x = torch.randn(1, 16, 8)
    with sequence_context(group, lengths=(8,) * size):
        loss = net(shard_sequence(x, group)).sum()
        counts.append(seen[0])
        loss.backward()
        counts.append(seen[0])
    counts.append(seen[0])
    with torch.no_grad(), sequence_context(group, lengths=(8,) * size):
        net(shard_sequence(x, group))
        counts.append(seen[0])
    counts.append(seen[0])
    check_exchanges(group)
    counts.append(seen[0])
    exchanger.after_backward.paused = True
    with sequence_context(group, lengths=(8,) * size):
        net(shard_sequence(x, group)).sum().backward()
    counts.append(seen[0])
    exchanger.flush()
    return counts


@pytest.mark.parametrize("conv_width", [0, 4])
def test_a_step_over_streams_is_checked_at_its_end(conv_width: int) -> None:
    for counts in run_ranks(checks_of_a_step, 2, conv_width):
        assert counts == [0, 1, 1, 1, 2, 3, 3], counts


def post_unopened(rank: int, size: int) -> str:
    exchanger = exchanger_on_streams("chain")
    sends = [Outgoing(1 - rank, [torch.zeros(1)])]
    with pytest.raises(ExchangeError) as caught:
        exchanger._channel.exchange(Kind.TENSOR, Tag(), sends)
    return str(caught.value)


def test_a_message_before_all_ranks_met_is_refused() -> None:
    for text in run_ranks(post_unopened, 2):
        assert "tensor exchange" in text and "Channel.open" in text


def test_the_double_sees_what_hangs() -> None:
    """One post alone as a plain call, two as a batch: the first rank is never met."""
    send, receive = "send", "receive"
    mixed = [
        [ALL, ("plain", ((send, 1),))],
        [ALL, ("batch", ((receive, 0), (send, 2)))],
        [ALL, ("plain", ((receive, 1),))],
    ]
    assert set(unfinished(mixed)) == {0, 1, 2}
    batches = [[("batch", m) if k == "plain" else (k, m) for k, m in calls] for calls in mixed]
    assert unfinished(batches) == {}
    assert set(unfinished([calls[1:] for calls in batches])) == {0, 1, 2}  # nobody made it
    crossed = [
        [ALL, ("batch", ((receive, 1 - rank),)), ("batch", ((send, 1 - rank),))] for rank in (0, 1)
    ]
    assert set(unfinished(crossed)) == {0, 1}
