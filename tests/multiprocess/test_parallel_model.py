"""A whole model on shards: loss and gradients of one process, however cut, packed, recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from flexla_dist.comm.watch import Watch
from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.parallel import (
    global_token_count,
    parallelize_sequence,
    sequence_context,
    sequence_loss,
    shard_sequence,
    shift_labels,
)
from flexla_dist.testing.ranks import run_ranks

BOUND = 1e-10
PRELOAD = ("flexla_dist.parallel", "flexla_dist.layers", "flexla_dist.ops.op", "torch._dynamo")


@dataclass(frozen=True)
class Run:
    """One optimiser step: a model, its shards, its micro-batches and how they are run."""

    lengths: tuple[int, ...]
    variant: str = "gated_delta_rule"
    documents: tuple[int, ...] | None = None
    batch: int = 1
    strategy: str = "auto"
    recompute: bool = False
    masked: int | None = None
    micro_batches: int = 1
    in_flight: bool = False


def make_model(run: Run) -> LinearAttentionModel:
    torch.manual_seed(0)
    shape = {"width": 12, "heads": 2, "key_dim": 4, "value_dim": 4, "mlp_width": 16, "vocab": 20}
    model = LinearAttentionModel(ModelConfig(variant=run.variant, layers=2, **shape)).double()
    model.checkpoint_activations = run.recompute
    return model


def micro_batch(run: Run, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 20, (run.batch, sum(run.lengths)), generator=generator)
    labels = shift_labels(ids, run.documents)
    if run.masked is not None:
        low = sum(run.lengths[: run.masked])
        labels[:, low : low + run.lengths[run.masked]] = -100
    return ids, labels


def run_whole(run: Run) -> tuple[float, dict[str, Tensor]]:
    model = make_model(run)
    starts = None if run.documents is None else torch.tensor(run.documents)
    batches = [micro_batch(run, number) for number in range(run.micro_batches)]
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in batches:
        logits = model(ids, starts)
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (total / count).backward()
    return float(total.detach() / count), gradients(model)


def gradients(model: LinearAttentionModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def exchange_log() -> Iterator[list[str]]:
    """Every exchange that this rank takes part in, in words."""
    log: list[str] = []
    begin = Watch.begin

    def logged(self: Watch, what: str, hint: str = "") -> None:
        log.append(what)
        begin(self, what, hint)

    Watch.begin = logged  # type: ignore[method-assign]
    try:
        yield log
    finally:
        Watch.begin = begin  # type: ignore[method-assign]


def run_sharded(rank: int, world: int, run: Run) -> tuple[float, dict[str, Tensor]]:
    """Loss and averaged gradients."""
    group = dist.group.WORLD
    assert group is not None
    model = make_model(run)
    parallelize_sequence(model, group, strategy=run.strategy, node_size=2, timeout=30.0)
    batches = []
    for number in range(run.micro_batches):
        ids, labels = micro_batch(run, number)
        batches.append((ids, shard_sequence(labels, group, lengths=run.lengths)))
    count = global_token_count([labels for _, labels in batches], group)
    total, waiting = 0.0, []
    for ids, labels in batches:
        with sequence_context(group, cu_seqlens=run.documents, lengths=run.lengths):
            loss = sequence_loss(model(shard_sequence(ids, group)), labels, group, count=count)
            if not run.in_flight:
                loss.backward()
        waiting.append(loss)
        total += float(loss.detach())
    if run.in_flight:
        for loss in waiting:
            loss.backward()
    found = gradients(model)
    for grad in found.values():
        dist.all_reduce(grad)
        grad /= world
    losses = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(losses)
    return float(losses) / world, found


def run_all(rank: int, world: int, runs: list[Run]) -> list[tuple]:
    results = []
    for run in runs:
        with exchange_log() as log:
            results.append((*run_sharded(rank, world, run), log))
    return results


def check(ranks: int, runs: list[Run]) -> list[list[str]]:
    """Compare with the whole model; the exchanges of every run."""
    results = run_ranks(run_all, ranks, runs, preload=PRELOAD)
    wrong, logs = [], []
    for place, run in enumerate(runs):
        loss, expected = run_whole(run)
        for rank, values in enumerate(results):
            found_loss, found, log = values[place]
            if not abs(found_loss - loss) <= BOUND * abs(loss):
                wrong.append(f"{run}, rank {rank}: loss {found_loss} instead of {loss}")
            assert found.keys() == expected.keys()
            for name, want in expected.items():
                error = float((found[name] - want).abs().max() / want.abs().max())
                if not error <= BOUND:
                    wrong.append(f"{run}, rank {rank}: gradient of {name} is off by {error:.1e}")
            if log != results[0][place][2]:
                wrong.append(f"{run}: ranks 0 and {rank} took part in different exchanges")
        logs.append(results[0][place][2])
    assert not wrong, "\n".join(wrong)
    return logs


def test_variants_uneven_shards_and_batches() -> None:
    """Every layer; shards shorter than the convolution, so that halos come from several ranks."""
    check(
        4,
        [
            Run((6, 1, 2, 5), variant="gated_delta_rule", batch=2),
            Run((1, 1, 1, 9), variant="mamba2", strategy="log_scan"),
            Run((5, 0, 4, 3), variant="kda", batch=2, strategy="hierarchical"),
            Run((0, 7, 0, 5), variant="hgrn", strategy="all_gather"),
        ],
    )
    check(
        3,
        [
            Run((4, 4, 3), variant=variant)
            for variant in ("linear_attn", "retention", "lightning", "simple_gla")
        ],
    )
    check(2, [Run((5, 6), variant=variant, batch=2) for variant in ("gla", "delta_rule")])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_packed_documents(ranks: int) -> None:
    """Documents on a cut, over a whole shard, over several ranks, shorter than the convolution."""
    lengths = {2: (7, 6), 3: (4, 4, 4), 5: (3, 0, 4, 1, 5)}[ranks]
    total = sum(lengths)
    documents = {
        2: [(0, 7, 13), (0, 5, 6, 8, 8, 13)],
        3: [(0, 4, 8, 12), (0, 2, 11, 12), (0, 3, 5, 5, 7, 10, 12)],
        5: [(0, 3, 7, 8, 13), (0, 1, 12, 13), (0, total)],
    }[ranks]
    variants = ("gated_delta_rule", "mamba2", "hgrn")
    check(
        ranks,
        [
            Run(lengths, variant=variant, documents=starts)
            for variant, starts in zip(variants, documents, strict=False)
        ],
    )


def test_masked_labels_and_recomputation() -> None:
    """Recomputation adds no exchange; a rank without labels takes part like all others."""
    plain = Run((4, 3, 0, 5), batch=2, masked=1)
    again = Run((4, 3, 0, 5), batch=2, masked=1, recompute=True)
    packed = Run((4, 3, 0, 5), documents=(0, 2, 9, 12), masked=3, recompute=True)
    last = Run((4, 3, 0, 5), masked=3)
    logs = check(4, [plain, again, packed, last])
    forward = [what for what in logs[1] if "forward" in what]
    backward = [what for what in logs[1] if "backward" in what]
    assert len(forward) == len(backward) == 4, logs[1]
    assert sum("prefix" in what for what in forward) == 2
    assert sum("suffix" in what for what in backward) == 2
    kinds = [[what.split(" (")[0] for what in log if "agree" not in what] for log in logs[:2]]
    assert kinds[0] == kinds[1]


def test_micro_batches() -> None:
    """Accumulated one after the other, and two under way at once with and without recomputation."""
    check(
        3,
        [
            Run((4, 5, 3), batch=2, micro_batches=2, masked=2),
            Run((4, 5, 3), micro_batches=2, in_flight=True),
            Run((4, 5, 3), micro_batches=2, in_flight=True, recompute=True),
            Run((4, 5, 3), micro_batches=3, documents=(0, 6, 12), in_flight=True, recompute=True),
        ],
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_one_rank_is_the_unsharded_model(recompute: bool) -> None:
    """A packed context reaches the layers of one rank as well, also while they are recomputed."""
    logs = check(
        1,
        [
            Run((9,), batch=2, recompute=recompute),
            Run((9,), documents=(0, 4, 9), recompute=recompute, micro_batches=2, in_flight=True),
            Run((9,), recompute=recompute),
        ],
    )
    assert logs == [[], [], []]
