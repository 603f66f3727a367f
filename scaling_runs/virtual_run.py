"""A sequence over W virtual ranks of one device: local kernels of every rank, one exchange kernel.

Contract: the ranks' shards are equally long rows of one call. Forward and backward stop where
states cross ranks (`open_*`), the exchange runs on a stream of its own, kernels that need no state
from elsewhere go on beside it. What the ranks compute is what ranks of a group compute; they share
the device, so times of W ranks are compared with one another, not with W devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.device_exchange import DeviceExchanger, Span, SpanState
from flexla_dist.comm.heaps import LocalHeap
from flexla_dist.compiler.executor.opened import OpenedTriton
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.results import ForwardResult, Gradients
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import CallInputs

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    """Output and input gradients of the whole sequence, ranks joined along T."""

    output: Tensor
    gradients: dict[str, Tensor]


class VirtualRanks:
    """One operator on W shards."""

    def __init__(self, op: LinearAttentionOp, call: CallInputs, ranks: int):
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
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def exchanger(self, strategy: str, **settings: Any) -> DeviceExchanger:
        """An exchange of all virtual ranks."""
        return DeviceExchanger(self.heap, strategy, **settings)

    # -- forward and backward -------------------------------------------------------------------

    def forward(self, exchanger: DeviceExchanger) -> list[ForwardResult]:
        """Every rank's shard from the states that the exchange brings."""
        opened = [self.executor.open_forward(p, p.zero_state()) for p in self.problems]
        with self._exchange(exchanger.prefix_all, opened) as entering:
            for call in opened:
                call.proceed()
        return [
            self.executor.forward(problem, tuple(state[0] for state in states), call)
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
            self.executor.open_backward(problem, ran.saved, entry, seed)
            for problem, ran, entry, seed in zip(
                self.problems, forward, entering, seeds, strict=True
            )
        ]
        with self._exchange(exchanger.suffix_all, opened) as gradients:
            for call in opened:
                call.proceed()
        return [
            self.executor.backward(
                problem, ran.saved, entry, seed, tuple(g[-1] for g in arriving), call
            )
            for problem, ran, entry, seed, arriving, call in zip(
                self.problems, forward, entering, seeds, gradients, opened, strict=True
            )
        ]

    @contextmanager
    def _exchange(
        self, scan: Callable[..., list[States]], opened: Sequence[OpenedTriton]
    ) -> Iterator[list[States]]:
        """Exchange on the side stream while the block runs; results are ready after it."""
        results: list[States] = []
        if self.side is None:
            results += scan([span_of(call) for call in opened], self.crossing)
            yield results
            return
        main = torch.cuda.current_stream(self.device)
        spans = [span_of(call) for call in opened]
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            results += scan(spans, self.crossing)
        yield results
        main.wait_stream(self.side)
        for states in results:
            for state in states:
                state.record_stream(main)

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
        return Outcome(
            output,
            {name: torch.cat([g.inputs[name] for g in grads], 1) for name in self.call.inputs},
        )

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
