"""A call under way: what its documents do to the state is known, what enters them is not yet.

Contract: an executor opens a call, tells M and S_hat of a document (of the adjoint: M transposed
and G_hat), goes on with work that needs nothing that enters, and completes the call once the states
(or gradients) that enter are there. Each is opened and completed once. An opened call keeps the
tensors of the call and its own values; the stream on which it goes on is the current one.

Heads may be told and may enter group by group. Order of the launches: what does M and S_hat of the
first group, of the second one, ...; work that needs nothing that enters; the rest of the first
group, of the second one, ...; what follows. So the exchange of one group runs beside the kernels of
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap, StateMap
from flexla_dist.compiler.executor.planned_launches import Heads
from flexla_dist.compiler.executor.segments import Segments
from flexla_dist.compiler.executor.triton_run import Pause, Run

States = tuple[Tensor, ...]


class Opened(Protocol):
    """A call that was opened."""

    def spans(self, sequence: int) -> tuple[StateMap, ...]:
        """For every state M and S_hat of the segments of one document (-1: of all rows at once),
        [S, G, HV, ...] in order; of the groups of heads that were summarised."""

    def summary(self, sequence: int) -> SpanMap:
        """M and S_hat of one whole document (-1: of all rows at once)."""

    def summarise(self, group: int) -> None:
        """Launch what tells M and S_hat of a group of heads, and of those before it."""

    def expect(self, arrivals: Sequence[Callable[[], None]]) -> None:
        """Functions, one for each group of heads, to call before what enters them is read."""

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
        groups: tuple[Heads, ...],
    ):
        """kinds: "identity", "elementwise" or "dense" for each state; first: slot of the first
        state that enters; lanes: rows whose documents run side by side; groups: of heads."""
        self.run, self.segments, self.first, self.groups = run, segments, first, groups
        self._kinds, self._lanes, self._adjoint = tuple(kinds), lanes, adjoint
        self._arrivals: list[Callable[[], None]] = []
        self._entered = -1  # the group of heads that enters next; -1: not all are summarised
        pause = run.proceed("summary")
        assert pause is not None
        self._summarised = 1
        self._tensors = self._of(pause)
        self._spans: dict[int, tuple[StateMap, ...]] = {}

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
        if self._lanes > 1:  # a copy of the heads that are there
            return self._spans_of(sequence)
        if sequence not in self._spans:
            self._spans[sequence] = self._spans_of(sequence)
        return self._spans[sequence]

    def _spans_of(self, sequence: int) -> tuple[StateMap, ...]:
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
        self.summarise(len(self.groups) - 1)
        composed = [_composed(state, self._adjoint) for state in self.spans(sequence)]
        return SpanMap(tuple(composed))

    def summarise(self, group: int) -> None:
        """Launch what tells M and S_hat of a group of heads, and of those before it."""
        while self._summarised <= group:
            self.run.proceed("summary", self._summarised)
            self._summarised += 1

    def proceed(self) -> None:
        """Launch what needs no state that enters."""
        if self._entered < 0:
            self._summarised = len(self.groups)
            self._entered = 0
            self.run.proceed("entry")

    def expect(self, arrivals: Sequence[Callable[[], None]]) -> None:
        """Functions, one for each group of heads, to call before what enters them is read."""
        self._arrivals = list(arrivals)

    def arrive(self) -> None:
        """Call all functions that are still to be called."""
        while self._arrivals:
            self._arrivals.pop(0)()

    def give(self, entering: States) -> None:
        """Tensors for the states (or gradients) that enter; filled before they are read."""
        if not all(state.is_contiguous() for state in entering):
            self.arrive()  # they are copied now
        for at, state in enumerate(entering):
            self.run.give(self.first + at, state)

    def enter(self, group: int) -> None:
        """Launch what needs the states of a group of heads, the next one; with the last one also
        the rest."""
        self.proceed()
        assert group == self._entered
        self._entered += 1
        if self._arrivals:
            self._arrivals.pop(0)()
        if self._entered < len(self.groups):
            self.run.proceed("entry", self._entered)
        else:
            self.run.proceed()

    def finish(self, entering: States) -> list[Tensor]:
        """Complete the run; returns its slots."""
        self.give(entering)
        for group in range(max(self._entered, 0), len(self.groups)):
            self.enter(group)
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
