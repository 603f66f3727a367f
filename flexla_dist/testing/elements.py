"""Random elements of every kind, and the serial fold that scans over ranks are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexla_dist.comm.element import Element, State, StateElement, apply, zero_state

ELEMENT_KINDS = (
    "none",
    "scalar",
    "rows",
    "columns",
    "full",
    "dense",
    "dense_vector",
    "two_states",
    "log_scaled",
)
_GROUPS, _HEADS, _K, _V = 2, 3, 4, 5


def random_element(kind: str, generator: torch.Generator, dtype=torch.float64) -> Element:
    """An element of one of `ELEMENT_KINDS`, with G = 2, HV = 3, K = 4, V = 5."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(_GROUPS, _HEADS, *shape, generator=generator, dtype=dtype)

    def decay(*shape: int) -> Tensor:
        return torch.rand(_GROUPS, _HEADS, *shape, generator=generator, dtype=dtype)

    def matrix() -> Tensor:
        return normal(_K, _K) / _K**0.5

    if kind == "log_scaled":
        states = (StateElement(normal(_K, _V)), StateElement(normal(_K)))
        return Element(states, False, -8 * decay(), 80 * normal())
    local = normal(_K, _V)
    shapes = {"scalar": (1, 1), "rows": (_K, 1), "columns": (1, _V), "full": (_K, _V)}
    if kind in shapes:
        return Element((StateElement(local, decay(*shapes[kind])),))
    if kind == "none":
        return Element((StateElement(local),))
    if kind == "dense":
        return Element((StateElement(local, matrix=matrix()),))
    if kind == "dense_vector":
        return Element((StateElement(normal(_K), matrix=matrix()),))
    if kind == "two_states":
        states = (StateElement(local, matrix=matrix()), StateElement(normal(_K), decay(1)))
        return Element(states)
    raise ValueError(f"unknown kind {kind!r}, expected one of {ELEMENT_KINDS}")


def serial_scan(
    elements: Sequence[Element], crossing: Sequence[bool], reverse: bool = False
) -> list[State]:
    """Entering state of every rank by walking over the ranks one after the other."""
    order = range(len(elements))
    entering: list[State] = [()] * len(elements)
    state = zero_state(elements[0])
    for rank in reversed(order) if reverse else order:
        cut = rank if reverse else rank - 1
        if not 0 <= cut < len(crossing) or not crossing[cut]:
            state = zero_state(elements[rank])
        entering[rank] = state
        state = apply(elements[rank], state)
    return entering
