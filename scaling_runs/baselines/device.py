"""Our strategies by the device engine: kernels compute, put, signal and wait in symmetric memory.

Contract: where the group has no symmetric heap, or kernels do not exchange an operator's states,
the first call raises `Refused` on every rank, with the reason. Bytes do not go through
`torch.distributed`, so nothing counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.element import Element
from flexla_dist.comm.engines import DeviceEngine, span_of
from flexla_dist.comm.open_engine import EngineRefused
from flexla_dist.comm.tag import Tag
from flexla_dist.parallel import SequenceParallelOp
from flexla_dist.parallel.engine import BACKENDS
from flexla_dist.parallel.runtime import runtime_of
from scaling_runs.baselines.shard import Refused, Sharding, Values

DEVICE_SUFFIX = "_device"


@dataclass(eq=False)
class OwnAttend:
    """A callable (inputs, params, scalars) -> output by the package's own sharded operator.

    backend: "host", "device" or "auto". node_size: for the strategies that look at nodes.
    """

    op: Any
    sharding: Sharding
    strategy: str
    node_size: int | None
    timeout: float
    backend: str

    def __post_init__(self) -> None:
        assert self.backend in BACKENDS
        nodes = self.node_size if self.strategy in ("auto", "hierarchical") else None
        self._sharded = SequenceParallelOp(
            self.op,
            group=self.sharding.ranks.group,
            strategy=self.strategy,
            node_size=nodes,
            timeout=self.timeout,
            backend=self.backend,
        )

    def __call__(self, inputs: Values, params: Values, scalars: Mapping[str, float]) -> Tensor:
        """The output [B, T_local, HV, V]."""
        group = self.sharding.ranks.group
        if self.backend == "device":
            engine_of(group, next(iter(inputs.values())).device, self.strategy)
        runtime_of(group).remember_lengths(self.sharding.lengths)
        arguments: dict[str, Any] = {**inputs, **params, **scalars}
        try:
            return self._sharded(**arguments)[0]
        except EngineRefused as why:
            raise Refused(f"{self.strategy}{DEVICE_SUFFIX}: {why}") from why


def engine_of(group: Any, device: torch.device, strategy: str) -> DeviceEngine | None:
    """The group's device engine, None for a group of one rank; collective at its first call.
    Raises Refused, on every rank, where it cannot be had."""
    runtime = runtime_of(group)
    if runtime.size == 1:
        return None
    found = runtime.device_engine(device)
    if not isinstance(found, DeviceEngine):
        raise Refused(f"{strategy}{DEVICE_SUFFIX} needs the device engine: {found}")
    return found


@contextmanager
def checked_once(group: Any, device: torch.device, kernels: bool = True) -> Iterator[None]:
    """Let the backward passes inside leave their check of exchanges to the end of the block.

    A training step checks once, at the end of its backward pass through all layers; calls that are
    timed one by one would each wait on the host, by the device engine for all ranks. Collective, as
    the check is. kernels: whether the device engine is in use.
    """
    runtime = runtime_of(group)
    if runtime.size == 1:
        yield
        return
    engine = runtime.device_engine(device) if kernels else None
    checks = [runtime.exchanger().after_backward]
    checks += [engine.after_backward] if isinstance(engine, DeviceEngine) else []
    for check in checks:
        check.paused = True
    try:
        yield
    finally:
        for check in checks:
            check.paused = False
    runtime.check(always=True)


def device_exchange(
    group: Any, element: Element, strategy: str, node_size: int | None
) -> Callable[[], object]:
    """The exchange alone, of elements of one segment, forward."""
    device = element.states[0].local.device
    engine = engine_of(group, device, strategy)
    if engine is None:
        raise Refused(f"{strategy}{DEVICE_SUFFIX} exchanges nothing on one rank")
    exchanger = runtime_of(group).exchanger(strategy, node_size)
    runs = exchanger.heap_survey(device, engine.heap.name).topology.runs
    crossing = (True,) * (runtime_of(group).size - 1)
    span = span_of(element)

    def run() -> object:
        return engine.begin(span, crossing, Tag(), strategy, runs, reverse=False).take()

    return run
