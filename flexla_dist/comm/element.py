"""Affine elements of the state recurrence, and how they compose.

A span of tokens maps the state that enters it to the one that leaves, `S_out = M·S_in + local`.
An `Element` holds (M, local) of a span for every state of a spec. Spans compose without commuting:
`(M2, L2)∘(M1, L1) = (M2·M1, M2·L1 + L2)`. A span in which a document starts ignores what enters;
this is done by select and never by M = 0, because 0·inf and 0·NaN are NaN.

Log-scaled states keep `S = exp(m)·S~`. Their element is (b, mu, local) with the rule
`m' = max(m + b, mu)`, `S~' = exp(m + b - m')·S~ + exp(mu - m')·local`, where m starts at -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class StateElement:
    """Effect of a span on one state.

    local:  [G, HV, *dims], the state left behind when zero enters; float32 or float64.
    decay:  broadcastable to `local`, elementwise M; None means 1.
    matrix: [G, HV, K, K], dense M on the first state dim, `out = matrix @ state`; no decay then.
    """

    local: Tensor
    decay: Tensor | None = None
    matrix: Tensor | None = None

    def __post_init__(self) -> None:
        if self.decay is not None and self.matrix is not None:
            raise ValueError(
                "StateElement: got both decay and matrix, expected at most one; "
                "multiply the rows of the matrix by the decay instead"
            )


@dataclass(frozen=True)
class Element:
    """Effect of a span on all states of a spec (G = batch when unpacked, 1 when packed).

    reset:      a document starts inside the span, so the entering state is ignored. A bool; a
                0-dim bool tensor when it arrived on a device and the host must not wait for it.
    log_decay, log_weight: [G, HV], (b, mu) of log-scaled states, else None. State tuples then carry
                m [G, HV] as their last entry, and no state element has a decay or a matrix.
    """

    states: tuple[StateElement, ...]
    reset: bool | Tensor = False
    log_decay: Tensor | None = None
    log_weight: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.log_decay is None) != (self.log_weight is None):
            raise ValueError("Element: log_decay and log_weight are given together or not at all")
        if self.log_decay is not None and any(
            s.decay is not None or s.matrix is not None for s in self.states
        ):
            raise ValueError(
                "Element: a log-scaled element decays by log_decay alone; "
                "its state elements must have neither decay nor matrix"
            )

    @property
    def log_scaled(self) -> bool:
        """Whether the states carry a log scale m."""
        return self.log_decay is not None

    @property
    def dense(self) -> bool:
        """Whether any state has a dense M."""
        return any(s.matrix is not None for s in self.states)


def zero_state(element: Element, template: Sequence[Tensor] | None = None) -> State:
    """The state before any token: zeros, and m = -inf when log-scaled; shapes of `template`."""
    if template is None:
        shapes = [s.local for s in element.states]
        template = [*shapes, element.log_weight] if element.log_weight is not None else shapes
    state = [torch.zeros_like(t, requires_grad=False) for t in template]
    if element.log_scaled:
        state[-1].fill_(-torch.inf)
    return tuple(state)


def apply(element: Element, state: State) -> State:
    """State after the span, given the one before it: `M·S + local` (see the module's text)."""
    fresh = after_reset(element)
    if element.reset is True:
        return fresh
    if element.log_scaled:
        moved = _apply_log_scaled(element, state)
    else:
        moved = tuple(_act(e, s) + e.local for e, s in zip(element.states, state, strict=True))
    if element.reset is False:
        return moved
    return tuple(torch.where(element.reset, f, m) for f, m in zip(fresh, moved, strict=True))


def after_reset(element: Element) -> State:
    """State after the span when nothing enters it."""
    local = tuple(s.local for s in element.states)
    if element.log_weight is None:
        return local
    some = element.log_weight > -torch.inf
    kept = (torch.where(_lift(some, t), t, torch.zeros_like(t)) for t in local)
    return (*kept, element.log_weight)


def combine(later: Element, earlier: Element) -> Element:
    """The element of `earlier` followed by `later`; not commutative when M is dense."""
    if later.reset is True:
        return later
    if later.log_scaled:
        moved = _combine_log_scaled(later, earlier)
    else:
        pairs = zip(later.states, earlier.states, strict=True)
        moved = Element(tuple(_combine_state(a, b) for a, b in pairs), earlier.reset)
    if later.reset is False:
        return moved
    return _select(later.reset, later, moved, later.reset | earlier.reset)


def identity_like(element: Element) -> Element:
    """The element of an empty span, in the same structure, shapes, dtype and device."""
    states = []
    for s in element.states:
        matrix = s.matrix
        if matrix is not None:
            eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
            matrix = eye.expand_as(matrix).contiguous()
        decay = None if s.decay is None else torch.ones_like(s.decay)
        states.append(StateElement(torch.zeros_like(s.local), decay, matrix))
    if element.log_decay is None or element.log_weight is None:
        return Element(tuple(states))
    return Element(
        tuple(states),
        False,
        torch.zeros_like(element.log_decay),
        torch.full_like(element.log_weight, -torch.inf),
    )


def element_tensors(element: Element) -> tuple[Tensor, ...]:
    """All tensors of an element in the order in which they travel."""
    tensors: list[Tensor] = []
    for s in element.states:
        tensors += [t for t in (s.local, s.decay, s.matrix) if t is not None]
    if element.log_decay is not None and element.log_weight is not None:
        tensors += [element.log_decay, element.log_weight]
    return tuple(tensors)


def with_tensors(like: Element, tensors: Sequence[Tensor], reset: bool | Tensor) -> Element:
    """Inverse of `element_tensors` for an element of the structure of `like`."""
    rest = iter(tensors)
    states = []
    for s in like.states:
        local = next(rest)
        decay = None if s.decay is None else next(rest)
        matrix = None if s.matrix is None else next(rest)
        states.append(StateElement(local, decay, matrix))
    if not like.log_scaled:
        return Element(tuple(states), reset)
    return Element(tuple(states), reset, next(rest), next(rest))


def element_bytes(element: Element) -> int:
    """Bytes of an element on the wire, without the header."""
    return sum(t.numel() * t.element_size() for t in element_tensors(element))


def state_bytes(state: Sequence[Tensor]) -> int:
    """Bytes of a state tuple on the wire, without the header."""
    return sum(t.numel() * t.element_size() for t in state)


def _lift(scale: Tensor, like: Tensor) -> Tensor:
    """[G, HV] as [G, HV, 1, ...] with the number of dims of `like`."""
    return scale.reshape(scale.shape + (1,) * (like.dim() - scale.dim()))


def _act(element: StateElement, state: Tensor) -> Tensor:
    """M·state."""
    if element.matrix is not None:
        flat = state.reshape(*element.matrix.shape[:-1], -1)
        return (element.matrix @ flat).reshape(state.shape)
    return state if element.decay is None else element.decay * state


def _combine_state(later: StateElement, earlier: StateElement) -> StateElement:
    local = _act(later, earlier.local) + later.local
    if later.matrix is not None or earlier.matrix is not None:
        if later.decay is not None or earlier.decay is not None:
            raise ValueError(
                "combine: one element has an elementwise decay and the other a dense matrix; "
                "all spans of one state have the same kind of M"
            )
        return StateElement(local, None, _product(later.matrix, earlier.matrix, torch.matmul))
    return StateElement(local, _product(later.decay, earlier.decay, torch.mul))


def _product(later: Tensor | None, earlier: Tensor | None, multiply) -> Tensor | None:
    if later is None or earlier is None:
        return later if earlier is None else earlier
    return multiply(later, earlier)


def _weights(carried: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(max, exp(carried - max), exp(fresh - max)); both weights are 0 where both are -inf."""
    top = torch.maximum(carried, fresh)
    safe = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    return top, torch.exp(carried - safe), torch.exp(fresh - safe)


def _mix(carry: Tensor, old: Tensor, fresh: Tensor, new: Tensor) -> Tensor:
    return _lift(carry, old) * old + _lift(fresh, new) * new


def _apply_log_scaled(element: Element, state: State) -> State:
    assert element.log_decay is not None and element.log_weight is not None
    scale, carry, fresh = _weights(state[-1] + element.log_decay, element.log_weight)
    pairs = zip(element.states, state[:-1], strict=True)
    return (*(_mix(carry, old, fresh, e.local) for e, old in pairs), scale)


def _combine_log_scaled(later: Element, earlier: Element) -> Element:
    assert later.log_decay is not None and later.log_weight is not None
    assert earlier.log_decay is not None and earlier.log_weight is not None
    weight, carry, fresh = _weights(earlier.log_weight + later.log_decay, later.log_weight)
    pairs = zip(later.states, earlier.states, strict=True)
    states = tuple(StateElement(_mix(carry, b.local, fresh, a.local)) for a, b in pairs)
    return Element(states, earlier.reset, later.log_decay + earlier.log_decay, weight)


def _select(flag: Tensor, chosen: Element, other: Element, reset: bool | Tensor) -> Element:
    pairs = zip(element_tensors(chosen), element_tensors(other), strict=True)
    return with_tensors(chosen, [torch.where(flag, a, b) for a, b in pairs], reset)
