"""Spans of every kind of M, and a float64 walk over the ranks that exchanges are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.comm.device_exchange import Span, SpanState
from flexla_dist.comm.element import Element, State, StateElement, apply

STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")
KINDS = ("none", "scalar", "rows", "columns", "full", "vector", "dense", "two_states")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Groups, heads and dims of the states."""

    G: int = 1
    H: int = 2
    K: int = 5
    V: int = 6


def random_span(kind: str, segments: int, sizes: Sizes, generator: torch.Generator) -> Span:
    """A span of one of `KINDS`, without reset."""
    K, V = sizes.K, sizes.V

    def normal(*shape: int) -> Tensor:
        return torch.randn(segments, sizes.G, sizes.H, *shape, generator=generator)

    def decay(*shape: int) -> Tensor:
        return torch.rand(segments, sizes.G, sizes.H, *shape, generator=generator)

    def dense(*dims: int) -> SpanState:
        return SpanState(normal(*dims), matrix=normal(K, K) / K**0.5)

    decays = {"scalar": (1, 1), "rows": (K, 1), "columns": (1, V), "full": (K, V)}
    if kind in decays:
        return Span((SpanState(normal(K, V), decay(*decays[kind])),))
    if kind == "none":
        return Span((SpanState(normal(K, V)),))
    if kind == "vector":
        return Span((SpanState(normal(K), decay(K)),))
    if kind == "dense":
        return Span((dense(K, V),))
    if kind == "two_states":
        return Span((dense(K), SpanState(normal(K, V), decay(1, 1))))
    raise ValueError(f"unknown kind {kind!r}, expected one of {KINDS}")


def identity_span(like: Span) -> Span:
    """What an empty shard gives: one that leaves every state as it enters."""
    states = []
    for s in like.states:
        matrix = s.matrix
        if matrix is not None:
            matrix = torch.eye(matrix.shape[-1]).expand_as(matrix).contiguous()
        decay = None if s.decay is None else torch.ones_like(s.decay)
        states.append(SpanState(torch.zeros_like(s.local), decay, matrix))
    return Span(tuple(states))


def expected(
    spans: Sequence[Span],
    crossing: Sequence[bool],
    reverse: bool = False,
    entry: State | None = None,
) -> list[State]:
    """The states that enter every segment of every rank, by one walk in float64."""
    order = list(range(len(spans)))
    found: list[State] = [()] * len(spans)
    state: State = ()
    for rank in reversed(order) if reverse else order:
        span = spans[rank]
        cut = rank if reverse else rank - 1
        if not 0 <= cut < len(crossing) or not crossing[cut]:
            given = entry or tuple(torch.zeros_like(s.local[0]) for s in span.states)
            state = tuple(t.double() for t in given)
        found[rank], state = _through(span, state, reverse)
    return found


def _through(span: Span, state: State, reverse: bool) -> tuple[State, State]:
    reset, live, segments, starts = span.place()
    entering: dict[int, State] = {}
    for number in range(segments):
        at = segments - 1 - number if reverse else number
        if reset and (number == live or number in starts):
            state = tuple(torch.zeros_like(t) for t in state)
        entering[at] = state
        element = Element(
            tuple(
                StateElement(
                    s.local[at].double(),
                    None if s.decay is None else s.decay[at].double(),
                    None if s.matrix is None else s.matrix[at].double(),
                )
                for s in span.states
            ),
            reset=reset and live == segments and number == segments - 1,
        )
        state = apply(element, state)
    rows = [entering[at] for at in range(segments)]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), state


def error_of(found: State, wanted: State) -> float:
    """Largest error, relative to the largest value; infinite where NaN differs."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        finite = b.isfinite()
        if a.shape != b.shape or not torch.equal(finite, a.isfinite()):
            return float("inf")
        scale = max(1.0, b[finite].abs().max().item() if finite.any() else 1.0)
        if finite.any():
            worst = max(worst, (a.double() - b)[finite].abs().max().item() / scale)
    return worst
