"""What ranks run in the tests of states by kernels: models that train, layers that fail."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flexla_dist.comm.engines import DeviceEngine
from flexla_dist.comm.errors import ExchangeTimeout, RankMismatch, RemoteRankError
from flexla_dist.comm.heaps import HeapError
from flexla_dist.comm.open_engine import EngineRefused
from flexla_dist.errors import ShardingError
from flexla_dist.layers import LayerConfig, LinearAttentionLayer, LinearAttentionModel, ModelConfig
from flexla_dist.ops.op import compile
from flexla_dist.parallel import (
    SequenceParallelLA,
    SequenceParallelOp,
    check_exchanges,
    exchange_plan,
    parallelize_sequence,
    sequence_context,
    sequence_loss,
    shard_sequence,
    shift_labels,
)
from flexla_dist.parallel.runtime import runtime_of

from ..unit.extra_specs import EXTRA_SPECS

LENGTHS = {2: (20, 12), 3: (12, 4, 16)}
WIDTH = 8
LATE_SECONDS = 2.5


def layer(variant: str = "simple_gla", device: str = "cpu") -> LinearAttentionLayer:
    torch.manual_seed(0)
    config = LayerConfig(variant, width=WIDTH, heads=1, key_dim=4, value_dim=4, conv_width=0)
    return LinearAttentionLayer(config).to(device)


def tokens(size: int, seed: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, sum(LENGTHS[size]), WIDTH, generator=generator).to(device)


@contextlib.contextmanager
def counted() -> Iterator[list[bool]]:
    """The directions (True: backward) of all exchanges by kernels in the block."""
    begin, seen = DeviceEngine.begin, []

    def count(self: DeviceEngine, *args: Any, reverse: bool, **kwargs: Any) -> Any:
        seen.append(reverse)
        return begin(self, *args, reverse=reverse, **kwargs)

    DeviceEngine.begin = count  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        DeviceEngine.begin = begin  # type: ignore[method-assign]


# -- results equal one process ----------------------------------------------------------------


def forward_backward(
    rank: int, size: int, recompute: bool, in_flight: bool, wanted: int | None, device: str
) -> tuple[float, list[bool]]:
    """Two layers, two micro-batches; the largest error against one process, and the exchanges.

    in_flight: both forward passes come before the backward passes. wanted: only this rank wants
    the gradient of its input, and no parameter wants one.
    """
    group = dist.group.WORLD
    plain = [layer("simple_gla", device), layer("gated_delta_rule", device)]
    ours = [layer("simple_gla", device), layer("gated_delta_rule", device)]
    for module in (*plain, *ours):
        module.requires_grad_(wanted is None)
    for module in ours:
        SequenceParallelLA(module, group=group, backend="device")
    inputs, weights, outputs, losses = [], [], [], []
    with counted() as seen:
        for number in range(2):
            x, w = tokens(size, number, device), tokens(size, 10 + number, device)
            with sequence_context(group, lengths=LENGTHS[size]):
                own = shard_sequence(x, group).clone()
                own.requires_grad_(wanted is None or wanted == rank)
                out = own
                for module in ours:
                    out = checkpoint(module, out, use_reentrant=False) if recompute else module(out)
                loss = (out * shard_sequence(w, group)).sum()
                if not in_flight and loss.requires_grad:
                    loss.backward()
            inputs.append((x, own))
            weights.append(w)
            outputs.append(out)
            losses.append(loss)
        for loss in losses if in_flight else ():
            loss.backward()
    worst = 0.0
    for (x, own), w, out in zip(inputs, weights, outputs, strict=True):
        whole = x.clone().requires_grad_()
        expected = plain[1](plain[0](whole))
        (expected * w).sum().backward()
        with sequence_context(group, lengths=LENGTHS[size]):
            pairs = [(out, shard_sequence(expected, group))]
            if own.requires_grad:
                pairs.append((own.grad, shard_sequence(whole.grad, group)))
        worst = max([worst, *(relative(a, b) for a, b in pairs)])
    for module, other in zip(ours, plain, strict=True):
        assert exchange_plan(module).engine == "device"
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            if q.grad is not None:
                dist.all_reduce(p.grad)
                worst = max(worst, relative(p.grad, q.grad))
    return worst, seen


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm().clamp(min=1e-6))


def model(variant: str, conv_width: int, device: str) -> LinearAttentionModel:
    torch.manual_seed(0)
    shape = {"width": 16, "heads": 1, "key_dim": 8, "value_dim": 8, "mlp_width": 24, "vocab": 20}
    config = ModelConfig(variant=variant, layers=2, conv_width=conv_width, **shape)
    return LinearAttentionModel(config).to(device)


def batch(step: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Ids whose next token follows from the last one, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, 20, (1, 1), generator=generator)
    ids = (start + 3 * torch.arange(length)) % 20
    return ids.to(device), shift_labels(ids).to(device)


def train_whole(variant: str, steps: int, length: int, conv_width: int, device: str) -> Any:
    """(losses, parameters) of one process."""
    net = model(variant, conv_width, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    losses = []
    for step in range(steps):
        ids, labels = batch(step, length, device)
        loss = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach().cpu() for p in net.parameters()]


def train_shards(
    rank: int, size: int, variant: str, steps: int, length: int, conv_width: int, device: str
) -> Any:
    """The same on shards, states by kernels."""
    device = f"cuda:{rank}" if device == "apart" else device
    if device != "cpu":
        torch.cuda.set_device(device)
    group = dist.group.WORLD
    net = parallelize_sequence(model(variant, conv_width, device), group=group, backend="device")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    losses = []
    for step in range(steps):
        ids, labels = batch(step, length, device)
        with sequence_context(group, step=step):
            logits = net(shard_sequence(ids, group))
            loss = sequence_loss(logits, shard_sequence(labels, group), group)
            optimizer.zero_grad()
            loss.backward()
        for p in net.parameters():
            average(p.grad)
        optimizer.step()
        total = loss.detach().cpu() / size
        dist.all_reduce(total)
        losses.append(float(total))
    plans = {
        str(exchange_plan(m).engine) for m in net.modules() if isinstance(m, LinearAttentionLayer)
    }
    assert plans == {"device"}, plans
    return losses, [p.detach().cpu() for p in net.parameters()]


def average(grad: Tensor) -> None:
    """The mean over the ranks, over the CPU: gloo serves ranks that share a GPU."""
    mean = grad.cpu()
    dist.all_reduce(mean)
    grad.copy_(mean / dist.get_world_size())


# -- refusals -----------------------------------------------------------------------------------


def refusals(rank: int, size: int) -> dict[str, str]:
    """What is said where the device engine cannot be had; the host engine then goes on."""
    group, said = dist.group.WORLD, {}
    x = tokens(size, 1)

    def refused(what: str, call: Any) -> None:
        with pytest.raises(EngineRefused) as found:
            call()
        assert isinstance(found.value, (ShardingError, HeapError))
        said[what] = str(found.value)

    mlstm = compile(EXTRA_SPECS["mlstm"], chunk_size=4)
    given = {n: torch.randn(1, LENGTHS[size][rank], 1, 4) for n in ("q", "k", "v")}
    given |= {n: -torch.rand(1, LENGTHS[size][rank], 1) for n in ("f", "i")}
    scaled = SequenceParallelOp(mlstm, group=group, backend="device")
    names = {*mlstm.spec.inputs}
    refused("log-scaled", lambda: scaled(**{n: given[n] for n in names}, scale=1.0))
    double = SequenceParallelLA(layer().double(), group=group, backend="device")
    with sequence_context(group, lengths=LENGTHS[size]):
        own = shard_sequence(x, group)
        refused("float64", lambda: double(own.double()))
        free = SequenceParallelLA(layer(), group=group)
        free(own)
        said["auto"] = str(exchange_plan(free))
        with pytest.raises(ShardingError, match="backend is 'gpu', expected one of"):
            SequenceParallelLA(layer(), group=group, backend="gpu")
    return said


def one_rank_without_interpreter(rank: int, size: int) -> str:
    """Only rank 1 cannot run kernels; all ranks refuse, and auto runs on all."""
    import triton

    group = dist.group.WORLD
    if rank == 1:
        triton.knobs.runtime.interpret = False
    module = SequenceParallelLA(layer(), group=group, backend="device")
    with sequence_context(group, lengths=LENGTHS[size]):
        own = shard_sequence(tokens(size, 1), group)
        with pytest.raises(EngineRefused) as found:
            module(own)
        SequenceParallelLA(layer(), group=group)(own)
    return str(found.value)


def other_backend(rank: int, size: int) -> str:
    """Ranks that ask for different engines."""
    group = dist.group.WORLD
    backend = "device" if rank == 1 else "host"
    module = SequenceParallelLA(layer(), group=group, backend=backend)
    with sequence_context(group, lengths=LENGTHS[size]), pytest.raises(RankMismatch) as found:
        module(shard_sequence(tokens(size, 1), group))
    return str(found.value)


# -- failures -----------------------------------------------------------------------------------


class Late(nn.Module):
    """Does something on one rank before it passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.action: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.action is not None:
            self.action()
        return x


def two_layers(timeout: float, device: str = "cpu") -> tuple[nn.Sequential, Late]:
    late = Late()
    first, second = layer("simple_gla", device), layer("gated_delta_rule", device)
    for module in (first, second):
        SequenceParallelLA(module, group=dist.group.WORLD, backend="device", timeout=timeout)
    return nn.Sequential(first, late, second), late


def step_of(net: nn.Module, size: int, device: str = "cpu") -> Tensor:
    group = dist.group.WORLD
    net.zero_grad()
    with sequence_context(group, lengths=LENGTHS[size]):
        out = net(shard_sequence(tokens(size, 3, device), group))
        out.square().sum().backward()
    return out.detach()


def late_rank(rank: int, size: int, device: str = "cpu") -> tuple[str, bool]:
    """Rank 1 comes too late; what every rank is told, and whether the next steps are right."""
    net, late = two_layers(60.0, device)
    expected = step_of(net, size, device)
    runtime_of(dist.group.WORLD).set_timeout(LATE_SECONDS / 4)
    late.action = (lambda: time.sleep(LATE_SECONDS)) if rank == 1 else None
    text = ""
    try:
        step_of(net, size, device)
    except ExchangeTimeout as error:
        text = str(error)
    late.action = None
    runtime_of(dist.group.WORLD).set_timeout(60.0)
    again = [step_of(net, size, device) for _ in range(2)]
    return text, all(torch.equal(out, expected) for out in again)


def late_rank_without_gradients(rank: int, size: int) -> str:
    """Rank 0 is late in a forward pass alone: the end of the context tells."""
    group = dist.group.WORLD
    net, late = two_layers(60.0)
    x = tokens(size, 3)

    def forward() -> None:
        with torch.no_grad(), sequence_context(group, lengths=LENGTHS[size]):
            net(shard_sequence(x, group))

    forward()
    runtime_of(group).set_timeout(LATE_SECONDS / 4)
    late.action = (lambda: time.sleep(LATE_SECONDS)) if rank == 0 else None
    with pytest.raises(ExchangeTimeout) as found:
        forward()
    check_exchanges(group)
    return str(found.value)


def failing_rank(rank: int, size: int, how: str, device: str = "cpu") -> None:
    """Rank 1 ends, or raises in a sharded layer; the limit of a wait is a minute."""
    net, late = two_layers(60.0, device)
    step_of(net, size, device)

    def fail() -> None:
        if how == "killed":
            os._exit(9)
        net[2](torch.zeros(1, device=device))

    late.action = fail if rank == 1 else None
    start = time.monotonic()
    try:
        step_of(net, size, device)
    except RemoteRankError:
        assert time.monotonic() - start < 20.0, "it took too long to notice"
        raise
