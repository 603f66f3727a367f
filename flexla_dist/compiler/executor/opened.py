"""A call under way: what its documents do to the state is known, what enters them is not yet.

Contract: an executor opens a call, tells M and S_hat of a document (of the adjoint: M transposed
and G_hat), goes on with work that needs nothing that enters, and completes the call once the states
(or gradients) that enter are there. Each is opened and completed once. An opened call keeps the
tensors of the call and its own values; the stream on which it goes on is the current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap, StateMap
from flexla_dist.compiler.executor.segments import Segments
from flexla_dist.compiler.executor.triton_run import Pause, Run

States = tuple[Tensor, ...]


class Opened(Protocol):
    """A call that was opened."""

    def spans(self, sequence: int) -> tuple[StateMap, ...]:
        """For every state M and S_hat of the segments of one document (-1: of all rows at once),
        [S, G, HV, ...] in order."""

    def summary(self, sequence: int) -> SpanMap:
        """M and S_hat of one whole document (-1: of all rows at once)."""

    def proceed(self) -> None:
        """Launch what needs no state that enters."""


class OpenedTriton:
    """A paused run of kernels."""

    def __init__(
        self,
        run: Run,
        segments: Segments,
        kinds: Sequence[str],
        first: int,
        lanes: int,
        adjoint: bool,
    ):
        """kinds: "identity", "elementwise" or "dense" for each state; first: slot of the first
        state that enters; lanes: rows whose documents run side by side."""
        self.run, self.segments, self.first = run, segments, first
        self._kinds, self._lanes, self._adjoint = tuple(kinds), lanes, adjoint
        pause = run.proceed("summary")
        assert pause is not None
        self._tensors = self._of(pause)

    def _of(self, pause: Pause) -> list[StateMap]:
        found = [self.run.frame.tensor(place) for place in pause.places]
        maps = iter(found[len(self._kinds) :])
        out = []
        for local, kind in zip(found, self._kinds, strict=False):
            mapped = None if kind == "identity" else next(maps)
            if kind == "dense":
                assert mapped is not None
                out.append(StateMap(local, matrix=mapped.mT if self._adjoint else mapped))
            else:
                out.append(StateMap(local, decay=mapped))
        return out

    def spans(self, sequence: int) -> tuple[StateMap, ...]:
        """M and S_hat of the segments of one document, [S, G, HV, ...]."""
        owners = self.segments.documents
        if sequence < 0 and self._lanes > 1:
            each = len(owners) // self._lanes

            def pick(x: Tensor) -> Tensor:
                return x.unflatten(0, (self._lanes, each)).transpose(0, 1).contiguous()
        else:
            wanted = max(sequence, 0)
            first = owners.index(wanted)
            end = first + owners.count(wanted)

            def pick(x: Tensor) -> Tensor:
                return x[first:end].unsqueeze(1).contiguous()

        return tuple(s.each(pick) for s in self._tensors)

    def summary(self, sequence: int) -> SpanMap:
        """M and S_hat of one document, its segments composed."""
        composed = [_composed(state, self._adjoint) for state in self.spans(sequence)]
        return SpanMap(tuple(composed))

    def proceed(self) -> None:
        """Launch what needs no state that enters."""
        self.run.proceed("entry")

    def finish(self, entering: States) -> list[Tensor]:
        """Complete the run; returns its slots."""
        for at, state in enumerate(entering):
            self.run.give(self.first + at, state)
        self.run.proceed()
        return self.run.frame.slots


def _composed(state: StateMap, adjoint: bool) -> StateMap:
    """One map from those of the segments, in the order in which the state passes them."""
    count = state.local.shape[0]
    order = range(count - 1, -1, -1) if adjoint else range(count)
    mapped = state.decay if state.matrix is None else state.matrix
    first, *rest = order
    local, factor = state.local[first], None if mapped is None else mapped[first]
    for at in rest:
        here = state.local[at]
        if mapped is None or factor is None:
            local = local + here
        elif state.matrix is None:
            local, factor = torch.addcmul(here, mapped[at], local), mapped[at] * factor
        else:
            local = torch.matmul(mapped[at], local) + here
            factor = torch.matmul(mapped[at], factor)
    return StateMap(local, factor) if state.matrix is None else StateMap(local, matrix=factor)
