"""From the elements of all ranks before this one to the state that enters it: three ways.

`elements` are in scan order, the nearest predecessor last. All three give the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexla_dist.comm.element import Element, State, apply

Fold = Callable[[Sequence[Element], State], State]


def fold_sum(elements: Sequence[Element], zero: State) -> State:
    """Without decay: the plain sum of what the ranks before left behind."""
    if not elements:
        return zero
    states = zip(*([s.local for s in e.states] for e in elements), strict=True)
    return tuple(torch.stack(parts).sum(0) for parts in states)


def fold_fused(elements: Sequence[Element], zero: State) -> State:
    """Each element read once, with one multiply-add of the state for each predecessor: elementwise
    for decays, a matrix product with its addition inside for a dense M."""
    if not elements:
        return zero
    if elements[0].log_scaled:
        return fold_walk(elements, zero)
    found = []
    for place in range(len(elements[0].states)):
        parts = [e.states[place] for e in elements]
        local = [p.local for p in parts]
        if parts[0].matrix is not None:
            found.append(_dense(local, [p.matrix for p in parts if p.matrix is not None]))
        else:
            found.append(_weighted(local, [p.decay for p in parts]))
    return tuple(found)


def fold_walk(elements: Sequence[Element], zero: State) -> State:
    """The state taken through one element after the other."""
    state = zero
    for element in elements:
        state = apply(element, state)
    return state


def fold_nested(elements: Sequence[Element], zero: State) -> State:
    """The sum over predecessors j of (product of M over the ranks after j) S_j, every product
    formed anew: P(P-1)/2 of them, what a port that follows the formula literally pays."""
    if not elements:
        return zero
    if elements[0].log_scaled:
        return fold_walk(elements, zero)
    total = [torch.zeros_like(t) for t in zero]
    for first in range(len(elements)):
        for place, own in enumerate(elements[first].states):
            product: Tensor | None = None
            for later in elements[first + 1 :]:
                product = _times(later.states[place].matrix, later.states[place].decay, product)
            total[place] = total[place] + _act(product, own.matrix is not None, own.local)
    return tuple(total)


def _weighted(local: list[Tensor], decay: list[Tensor | None]) -> Tensor:
    """S <- d_j S + local_j from the second predecessor on."""
    state = local[0]
    for own, d in zip(local[1:], decay[1:], strict=True):
        state = own + state if d is None else torch.addcmul(own, d, state)
    return state


def _dense(local: list[Tensor], matrix: list[Tensor]) -> Tensor:
    """S <- M_j S + local_j from the second predecessor on."""
    shape, size = local[0].shape, matrix[0].shape[-1]
    state = local[0].reshape(-1, size, shape[3:].numel())
    for own, m in zip(local[1:], matrix[1:], strict=True):
        state = torch.baddbmm(own.reshape(state.shape), m.reshape(-1, size, size), state)
    return state.reshape(shape)


def _times(matrix: Tensor | None, decay: Tensor | None, product: Tensor | None) -> Tensor | None:
    own = decay if matrix is None else matrix
    if product is None or own is None:
        return own
    return own * product if matrix is None else matrix @ product


def _act(product: Tensor | None, dense: bool, local: Tensor) -> Tensor:
    if product is None:
        return local
    if not dense:
        return product * local
    return (product @ local.reshape(*product.shape[:-1], -1)).reshape(local.shape)
