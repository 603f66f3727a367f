"""A sequence over W virtual ranks of one device: local kernels of every rank, one exchange kernel.

Contract: the ranks' shards are equally long rows of one call. Forward and backward stop where
states cross ranks (`open_*`), the exchange runs on a stream of its own, group of heads by group of
heads, kernels that need no state from elsewhere go on beside it, and each group of heads waits for
its own exchange. What the ranks compute, and in which order, is what ranks of a group do; they
share the device, so times of W ranks are compared with one another, not with W devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.device_exchange import DeviceExchanger, Span, SpanState
from flexla_dist.comm.engines import FIRST
from flexla_dist.comm.heaps import LocalHeap
from flexla_dist.compiler.executor.opened import OpenedTriton
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.results import ForwardResult, Gradients
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.parallel.engine import Groups, HeadGroups, cut_heads
from flexla_dist.testing.inputs import CallInputs

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    """Output and gradients of the whole sequence: ranks joined along T, those of parameters added
    up in the order of the ranks."""

    output: Tensor
    gradients: dict[str, Tensor]


class VirtualRanks:
    """One operator on W shards.

    groups: of heads, as `SequenceParallelLA` takes them; None: those that it would choose.
    """

    def __init__(
        self, op: LinearAttentionOp, call: CallInputs, ranks: int, groups: HeadGroups = None
    ):
        self.op, self.call, self.ranks = op, call, ranks
        self.device = next(iter(call.inputs.values())).device
        self.executor: Any = op.executor("triton")
        tokens = next(iter(call.inputs.values())).shape[1]
        if tokens % ranks:
            raise ValueError(f"{tokens} tokens do not divide among {ranks} ranks")
        self.heap = LocalHeap(ranks, self.device)
        params = {name: x.detach() for name, x in call.params.items()}
        self.problems: list[Problem] = []
        for rank in range(ranks):
            each = tokens // ranks
            inputs = {
                name: x.detach()[:, rank * each : (rank + 1) * each]
                for name, x in call.inputs.items()
            }
            self.problems.append(op.bind(inputs, params, call.scalars, None))
        self.crossing = [True] * (ranks - 1)
        self.groups = self._groups(groups)
        self.side = None
        if self.device.type == "cuda":
            self.side = torch.cuda.Stream(self.device, priority=FIRST)
            self._find_tiles()

    def _groups(self, groups: HeadGroups) -> Groups:
        return cut_heads(1 if groups is None else groups, self.problems[0].heads)

    def _find_tiles(self) -> None:
        """Calls that do not stop find tiles that fit the device; calls in parts do not look."""
        problem = self.problems[0]
        zero = problem.zero_state()
        ran = self.executor.forward(problem, zero)
        self.executor.backward(problem, ran.saved, zero, torch.zeros_like(ran.output), zero)

    def exchanger(self, strategy: str, **settings: Any) -> DeviceExchanger:
        """An exchange of all virtual ranks."""
        return DeviceExchanger(self.heap, strategy, **settings)

    # -- forward and backward -------------------------------------------------------------------

    def forward(self, exchanger: DeviceExchanger) -> list[ForwardResult]:
        """Every rank's shard from the states that the exchange brings."""
        opened = [self.executor.open_forward(p, p.zero_state(), self.groups) for p in self.problems]
        entering = self._exchange(exchanger.prefix_all, opened, first=0)
        return [
            self.executor.forward(problem, states, call)
            for problem, states, call in zip(self.problems, entering, opened, strict=True)
        ]

    def backward(
        self,
        exchanger: DeviceExchanger,
        forward: Sequence[ForwardResult],
        entering: Sequence[States],
        seeds: Sequence[Tensor],
    ) -> list[Gradients]:
        """Gradients of every shard; `entering` are the states that entered the shards."""
        opened = [
            self.executor.open_backward(problem, ran.saved, entry, seed, self.groups)
            for problem, ran, entry, seed in zip(
                self.problems, forward, entering, seeds, strict=True
            )
        ]
        gradients = self._exchange(exchanger.suffix_all, opened, first=-1)
        return [
            self.executor.backward(problem, ran.saved, entry, seed, arriving, call)
            for problem, ran, entry, seed, arriving, call in zip(
                self.problems, forward, entering, seeds, gradients, opened, strict=True
            )
        ]

    def _exchange(
        self, scan: Callable[..., list[States]], opened: Sequence[OpenedTriton], first: int
    ) -> list[States]:
        """Exchange on the side stream, and run all calls up to what follows their last scan.

        first: index of the segment that is first in the order of the scan. Returns what enters the
        shards.
        """
        whole: list[States] | None = None
        done: list[Any] = []
        held = []  # until the current stream has waited for who reads them
        for number, heads in enumerate(self.groups):
            for call in opened:
                call.summarise(number)
            held.append([span_of(call) for call in opened])
            whole, event = self._beside(scan, held[-1], heads, whole)
            done.append(event)
        assert whole is not None
        for call in opened:
            call.proceed()
        entering = [tuple(state[first] for state in states) for states in whole]
        for call, states in zip(opened, entering, strict=True):
            call.give(states)
        for number, event in enumerate(done):
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
            for call in opened:
                call.enter(number)
        if self.side is not None:
            for states in whole:
                for state in states:
                    state.record_stream(torch.cuda.current_stream(self.device))
        return entering

    def _beside(
        self,
        scan: Callable[..., list[States]],
        spans: list[Span],
        heads: tuple[int, int],
        earlier: list[States] | None,
    ) -> tuple[list[States], Any]:
        """Exchange a group of heads after what the current stream has done so far; the result, and
        the event after it."""
        if self.side is None:
            return scan(spans, self.crossing, heads=heads, into=earlier), None
        self.side.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self.side):
            found = scan(spans, self.crossing, heads=heads, into=earlier)
            return found, self.side.record_event()

    def alone(self) -> list[ForwardResult]:
        """Every shard as a sequence of its own: no state crosses, nothing is summarised twice."""
        return [self.executor.forward(p, p.zero_state()) for p in self.problems]

    def alone_backward(
        self, forward: Sequence[ForwardResult], seeds: Sequence[Tensor]
    ) -> list[Gradients]:
        """Gradients of shards that are sequences of their own."""
        return [
            self.executor.backward(p, ran.saved, p.zero_state(), seed, p.zero_state())
            for p, ran, seed in zip(self.problems, forward, seeds, strict=True)
        ]

    # -- results --------------------------------------------------------------------------------

    def seeds(self, like: Tensor) -> list[Tensor]:
        """Shards of a gradient of the whole output."""
        return [part.contiguous() for part in like.chunk(self.ranks, dim=1)]

    def run(self, exchanger: DeviceExchanger, seed: Tensor) -> Outcome:
        """Forward and backward of the whole sequence."""
        forward, entering = self.forward_with_states(exchanger)
        grads = self.backward(exchanger, forward, entering, self.seeds(seed))
        output = torch.cat([ran.output for ran in forward], 1)
        found = {name: torch.cat([g.inputs[name] for g in grads], 1) for name in self.call.inputs}
        for name in self.call.params:
            found[name] = torch.stack([g.params[name] for g in grads]).sum(0)
        return Outcome(output, found)

    def forward_with_states(
        self, exchanger: DeviceExchanger
    ) -> tuple[list[ForwardResult], list[States]]:
        """Forward, and the state that entered every shard: what the shard before it left."""
        forward = self.forward(exchanger)
        first = self.problems[0].zero_state()
        return forward, [first, *(ran.exit for ran in forward[:-1])]


def span_of(opened: OpenedTriton) -> Span:
    """A rank's segments as the exchange takes them."""
    return Span(
        tuple(SpanState(state.local, state.decay, state.matrix) for state in opened.spans(-1))
    )
