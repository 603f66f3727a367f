"""Our strategies by the device engine: kernels compute, put, signal and wait in symmetric memory.

`IdealAttend` is our own call with nothing to wait for, the floor of what an exchange may cost.
Contract: where the group has no symmetric heap, or kernels do not exchange an operator's states,
the first call raises `Refused` on every rank, with the reason. Bytes do not go through
`torch.distributed`, so nothing counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.device_exchange import DeviceExchanger, Heads, Span
from flexla_dist.comm.element import Element, State
from flexla_dist.comm.engines import Arriving, DeviceEngine, span_of
from flexla_dist.comm.open_engine import EngineRefused
from flexla_dist.comm.tag import Tag
from flexla_dist.parallel import SequenceParallelOp
from flexla_dist.parallel.engine import (
    BACKENDS,
    Carrier,
    DeviceCarrier,
    ExchangePlan,
    Groups,
    choose_carrier,
)
from flexla_dist.parallel.outgoing import Outgoing
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

    @property
    def site(self) -> Any:
        """Where its calls meet the group."""
        return self._sharded._site

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


class SetFlags(DeviceExchanger):
    """An exchange whose flags count as set: it does all its work on what lies in the slots, and
    looks at no tag, as nothing need have come."""

    def prefix(
        self,
        span: Span,
        crossing: Sequence[bool],
        tag: Tag | None = None,
        entry: State | None = None,
        heads: Heads | None = None,
        into: State | None = None,
    ) -> State:
        """See `DeviceExchanger`."""
        return super().prefix(span, crossing, None, entry, heads, into)

    def suffix(
        self,
        span: Span,
        crossing: Sequence[bool],
        tag: Tag | None = None,
        entry: State | None = None,
        heads: Heads | None = None,
        into: State | None = None,
    ) -> State:
        """See `DeviceExchanger`."""
        return super().suffix(span, crossing, None, entry, heads, into)


@dataclass
class SetFlagsEngine(DeviceEngine):
    """The device engine with such exchanges, on the heap of another one. It checks nothing: what it
    brings is not right by design."""

    def check(self, *, always: bool = False) -> None:
        """Nothing."""

    def check_after_backward(self) -> None:
        """Nothing."""

    def _exchanger(self, strategy: str, runs: tuple[int, ...]) -> DeviceExchanger:
        key = (strategy, runs if strategy == "hierarchical" else None)
        if key not in self._exchangers:
            nodes = tuple(node for node, run in enumerate(runs) for _ in range(run))
            found = SetFlags(self.heap, strategy, nodes, self.timeout, waits=False)
            self._exchangers[key] = found
        return self._exchangers[key]


@dataclass
class NothingCarried:
    """A carrier of the host engine's calls: they summarise, and zero enters at once."""

    plan: ExchangePlan | None = None

    def groups(self, problem: Any) -> Groups:
        """All heads at once."""
        return ((0, problem.heads),)

    def begin(
        self,
        leaving: Outgoing,
        crossing: Sequence[bool],
        tag: Tag,
        template: State,
        groups: Groups,
        reverse: bool,
    ) -> Arriving:
        """The element is made as for an exchange, and dropped."""
        leaving.element()
        return Arriving(template)

    def check_after_backward(self) -> None:
        """Nothing came."""

    def no_backward_follows(self) -> None:
        """Nothing came."""


@dataclass(eq=False)
class IdealAttend:
    """Our own sharded call, chain, whose state is there when it is asked for: by kernels with flags
    set beforehand where they carry states ("device"), else by the host with nothing sent.

    Results are those of wrong states. backend: "auto" takes kernels on a GPU. carriers: of its
    calls, by device and dtype.
    """

    op: Any
    sharding: Sharding
    timeout: float
    backend: str = "auto"
    carriers: dict[tuple, Carrier] = field(default_factory=dict, init=False)
    _own: OwnAttend = field(init=False)

    def __post_init__(self) -> None:
        self._own = OwnAttend(self.op, self.sharding, "chain", None, self.timeout, "host")
        site = self._own.site
        site.carrier = partial(self._carrier, site)  # type: ignore[method-assign]

    def __call__(self, inputs: Values, params: Values, scalars: Mapping[str, float]) -> Tensor:
        """The output [B, T_local, HV, V]."""
        return self._own(inputs, params, scalars)

    def _carrier(self, site: Any, call: Any, inputs: Values, params: Values) -> Carrier:
        """Takes the place of `Site.carrier`."""
        known = self.carriers
        first = next(iter(inputs.values()))
        key = (call.op, first.device, first.dtype)
        if key not in known:
            kernels = self.backend == "device" or (
                self.backend == "auto" and first.device.type == "cuda"
            )
            ours = choose_carrier(
                site.runtime,
                site.exchanger,
                self.backend if kernels else "host",
                call.op,
                call.bind_blank(inputs, params),
            )
            known[key] = NothingCarried()
            if isinstance(ours, DeviceCarrier):
                engine = SetFlagsEngine(ours.engine.heap, self.timeout)
                engine.lookout, engine.waits = ours.engine.lookout, ours.engine.waits
                known[key] = DeviceCarrier(engine, site.exchanger, "chain", "flags are set")
        return known[key]


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
