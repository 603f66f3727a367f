"""What a shard does to the state that crosses it, in the form that an engine takes.

Contract: it is the effect of one local document, the last one forward and the first one backward.
A document that starts (backward: ends) in this shard begins from `start`, or from zero, and what
enters has no effect; a shard without tokens passes on what enters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexla_dist.comm.element import Element, StateElement, apply

if TYPE_CHECKING:
    from flexla_dist.comm.device_exchange import Span

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Outgoing:
    """A document of an opened call, or `blank`: the identity element.

    sequence: the document, -1 for all rows. reset: it starts here (backward: ends here), from
    `start` [G, HV, ...] if that is given. adjoint: of the gradient.
    """

    blank: Element | None = None
    opened: Any = None
    sequence: int = -1
    reset: bool = False
    start: States = ()
    adjoint: bool = False

    def summarise(self, group: int) -> None:
        """Let M and S_hat of a group of heads be computed."""
        if self.blank is None:
            self.opened.summarise(group)

    def element(self) -> Element:
        """As one element, for the host engine."""
        if self.blank is not None:
            return self.blank
        element = as_element(self.opened.summary(self.sequence))
        if not self.reset:
            return element
        return started(element, self.start) if self.start else replace(element, reset=True)

    def span(self) -> Span:
        """As the segments in which the kernels cut it, for the device engine; of the heads that
        were summarised."""
        from flexla_dist.comm.device_exchange import Span, SpanState
        from flexla_dist.comm.engines import span_of

        if self.blank is not None:
            return span_of(self.blank)
        states = []
        for at, s in enumerate(self.opened.spans(self.sequence)):
            local, decay, matrix = s.local.contiguous(), s.decay, s.matrix
            if decay is not None:
                decay = decay.expand(*local.shape[:3], *decay.shape[3:]).contiguous()
            if matrix is not None:
                matrix = matrix.contiguous()
            if self.start:
                local = self._from_start(local, decay, matrix, self.start[at])
            states.append(SpanState(local, decay, matrix))
        return Span(tuple(states), self.reset, 0 if self.reset else None)

    def _from_start(
        self, local: Tensor, decay: Tensor | None, matrix: Tensor | None, start: Tensor
    ) -> Tensor:
        """What segments leave behind when the state that enters the first one is `start`."""
        first = -1 if self.adjoint else 0
        one = StateElement(
            local[first],
            None if decay is None else decay[first],
            None if matrix is None else matrix[first],
        )
        local = local.clone()
        (local[first],) = apply(Element((one,)), (start,))
        return local


def as_element(span: Any) -> Element:
    """What an executor says about a span, as the communication layer's element."""
    states = tuple(StateElement(s.local, s.decay, s.matrix) for s in span.states)
    return Element(states, False, span.log_decay, span.log_weight)


def started(element: Element, state: States) -> Element:
    """The element of a span that starts from `state` and ignores what enters."""
    after = apply(replace(element, reset=False), state)
    states = tuple(
        StateElement(local, s.decay, s.matrix)
        for s, local in zip(element.states, after, strict=False)
    )
    weight = after[-1] if element.log_scaled else None
    return Element(states, True, element.log_decay, weight)
