"""A call of the batched executor under way; see `opened`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexla_dist.compiler.executor.element import SpanMap, StateMap


class OpenedTorch:
    """A call of the batched executor: computed when asked for, nothing to go on with."""

    def __init__(self, summarise: Callable[[int], SpanMap]):
        self._summarise = summarise

    def spans(self, sequence: int) -> tuple[StateMap, ...]:
        """One segment: the document."""
        return tuple(s.each(lambda x: x.unsqueeze(0)) for s in self.summary(sequence).states)

    def summary(self, sequence: int) -> SpanMap:
        """M and S_hat of one document."""
        return self._summarise(sequence)

    def summarise(self, group: int) -> None:
        """Nothing: a summary is of all heads."""

    def expect(self, arrivals: Sequence[Callable[[], None]]) -> None:
        """Everything must be there before the call goes on."""
        for arrive in arrivals:
            arrive()

    def proceed(self) -> None:
        """Nothing."""
