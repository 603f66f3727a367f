"""Activation checkpointing without a second exchange.

Contract: a sharded layer call keeps what it received from other ranks in a `CallRecord`, which
lives as long as the autograd nodes of that call. When checkpointing runs the layer again during
backward, the record is found again and its contents are reused, so that recomputation never
communicates. A match that is not certain is a RecomputeError, never a guess.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from flexla_dist.errors import RecomputeError
from flexla_dist.parallel.plan import SequencePlan

_SAMPLES = 16


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass, where checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def refuse_recomputation(what: str) -> None:
    """RecomputeError inside a recomputation, which must not communicate."""
    if recomputing():
        raise RecomputeError(
            f"{what} was called while activation checkpointing recomputes, and it would exchange "
            "something a second time; call it outside of the checkpointed function"
        )


def refuse_reentrant(layer: str) -> None:
    """RecomputeError inside `checkpoint(use_reentrant=True)`, which hides the layer's nodes."""
    if torch.is_grad_enabled():
        return
    forward = CheckpointFunction.forward.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is forward:
            raise RecomputeError(
                f"{layer} runs under checkpoint(..., use_reentrant=True), which cannot be sharded: "
                "its forward leaves no node in the graph and its recomputation would exchange "
                "states a second time; call checkpoint(..., use_reentrant=False)"
            )
        frame = frame.f_back  # type: ignore[assignment]


def sample(x: Tensor) -> Tensor:
    """A few thousand values spread over x, by which a recomputed x is recognised."""
    steps = (slice(None, None, max(1, -(-size // _SAMPLES))) for size in x.shape)
    return x.detach()[tuple(steps)].clone()


@dataclass(eq=False)
class CallRecord:
    """What one call of a sharded layer received.

    wanted says for every exchange whether any rank wants a gradient; halos, states and finals hold
    what they received, by exchange. shape and fingerprint identify the call's input. open_nodes
    counts the autograd nodes that have not run backward.
    """

    plan: SequencePlan
    call: int
    shape: tuple[int, ...]
    fingerprint: Tensor | None
    wanted: list[bool] = field(default_factory=list)
    halos: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    finals: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    open_nodes: int = 0

    def same_contents(self, other: CallRecord) -> bool:
        """Whether either record may stand for the other."""
        if self.plan is not other.plan and (
            self.plan.lengths != other.plan.lengths or self.plan.starts != other.plan.starts
        ):
            return False
        mine, theirs = self._tensors(), other._tensors()
        if len(mine) != len(theirs):
            return False
        return all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
        )

    def _tensors(self) -> list[Tensor]:
        grouped = [*self.states.values(), *self.finals.values()]
        return [*self.halos.values(), *(tensor for group in grouped for tensor in group)]


class CallRecords:
    """The records of one layer that are still referenced by a graph."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._records: list[weakref.ref[CallRecord]] = []

    def open(self, plan: SequencePlan, call: int, x: Tensor) -> CallRecord:
        """A new record; it is kept only while something else refers to it."""
        wanted = torch.is_grad_enabled()
        record = CallRecord(plan, call, tuple(x.shape), sample(x) if wanted else None)
        if wanted:
            self._records = [ref for ref in self._records if ref() is not None]
            self._records.append(weakref.ref(record))
        return record

    def find(self, x: Tensor, current: SequencePlan | None) -> CallRecord:
        """The record of the call whose input was x; current: the plan of the context, if any."""
        alive = [record for ref in self._records if (record := ref()) is not None]
        alive = [record for record in alive if record.shape == tuple(x.shape)]
        if len(alive) > 1:
            alive = self._narrow(alive, x, current)
        if len(alive) == 1:
            return alive[0]
        if alive and all(alive[0].same_contents(record) for record in alive[1:]):
            return alive[0]
        if alive:
            raise RecomputeError(
                f"{self._layer} was recomputed, but {len(alive)} earlier calls had the same input, "
                "so it is unknown which one received what from other ranks; run the backward of "
                "each micro-batch inside its own sequence_context"
            )
        raise RecomputeError(
            f"{self._layer} was called during backward with an input of shape {tuple(x.shape)} "
            "that no earlier call had; a sharded layer may only be recomputed by "
            "checkpoint(..., use_reentrant=False), around a forward that ran with gradients enabled"
        )

    def _narrow(
        self, alive: list[CallRecord], x: Tensor, current: SequencePlan | None
    ) -> list[CallRecord]:
        """Keep likely records: by input, then those whose backward is to come, then by plan."""
        if x.numel() == 0:
            return alive[:1]
        key = sample(x)
        alive = [r for r in alive if torch.equal(r.fingerprint, key)] or alive  # type: ignore[arg-type]
        if len(alive) > 1:
            alive = [r for r in alive if r.open_nodes > 0] or alive
        if len(alive) > 1 and current is not None:
            alive = [r for r in alive if r.plan is current] or alive
        return alive
