"""The scan over chunks, forward and reversed: the one serial part.

Contract: tensors have leading dims [B, HV, n] for the n chunks of a slab. `forward_scan` fills
the states that enter each chunk, `reverse_scan` the gradients of the states that leave it. A
document's first chunk takes its state from `enter`, its last one gives it to `leave`; the
reversed scan does the same from the other end. Where a document starts the old state is replaced,
never multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import Chunk

Enter = Callable[[int], Tensor]
Leave = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Affine:
    """Elements of one state for the chunks of a slab: S' = decay * S + matrix @ S + local.

    With a matrix, `decay` None means that there is no elementwise part; without one it means one.
    """

    local: Tensor
    decay: Tensor | None
    matrix: Tensor | None

    def step(self, at: int, state: Tensor, local: Tensor, transposed: bool) -> Tensor:
        """One chunk of the recurrence."""
        if self.matrix is not None:
            matrix = self.matrix[:, :, at]
            new = torch.matmul(matrix.mT if transposed else matrix, state).add_(local)
            return new if self.decay is None else new.addcmul_(self.decay[:, :, at], state)
        if self.decay is None:
            return state + local
        return torch.addcmul(local, self.decay[:, :, at], state)

    def multiply(self, at: int, factor: Tensor | None) -> Tensor | None:
        """M of one chunk times the product so far; None is the identity."""
        if self.matrix is None:
            if self.decay is None:
                return factor
            here = self.decay[:, :, at]
            return here if factor is None else here * factor
        dense = self.matrix[:, :, at]
        if self.decay is not None:
            rows = self.decay[:, :, at].squeeze(-1).expand(*dense.shape[:-1])
            dense = dense + torch.diag_embed(rows)
        return dense if factor is None else dense @ factor


def forward_scan(
    affine: Affine, chunks: Sequence[Chunk], state: Tensor, enter: Enter, leave: Leave
) -> tuple[Tensor, Tensor]:
    """States entering each chunk, [B, HV, n, ...], and the state after the last."""
    states = torch.empty_like(affine.local)
    for at, chunk in enumerate(chunks):
        if chunk.first:
            state = enter(chunk.document)
        states[:, :, at] = state
        state = affine.step(at, state, affine.local[:, :, at], transposed=False)
        if chunk.last:
            leave(chunk.document, state)
    return states, state


def reverse_scan(
    affine: Affine,
    adjoint: Tensor,
    chunks: Sequence[Chunk],
    gradient: Tensor,
    enter: Enter,
    leave: Leave,
) -> tuple[Tensor, Tensor]:
    """Gradients of the states leaving each chunk, and of the state entering the first.

    G = M^T G' + adjoint; `enter(document)` is the gradient of a document's final state.
    """
    gradients = torch.empty_like(adjoint)
    for at in range(len(chunks) - 1, -1, -1):
        chunk = chunks[at]
        if chunk.last:
            gradient = enter(chunk.document)
        gradients[:, :, at] = gradient
        gradient = affine.step(at, gradient, adjoint[:, :, at], transposed=True)
        if chunk.first:
            leave(chunk.document, gradient)
    return gradients, gradient


@dataclass(frozen=True)
class LogScales:
    """Of each chunk: m entering it, `m - m'`, and the factors `carry` and `fresh`."""

    entering: Tensor
    shift: Tensor
    carry: Tensor
    fresh: Tensor


def log_scale_scan(
    decay: Tensor, weight: Tensor, chunks: Sequence[Chunk], m: Tensor, enter: Enter, leave: Leave
) -> tuple[LogScales, Tensor]:
    """Log scales of a log-scaled spec, in the dtype of m, and the last m.

    m' = max(m + decay, weight), carry = exp(m + decay - m'), fresh = exp(weight - m'). `decay` and
    `weight` may be wider than m; m' is rounded before the factors are made of it, so that they fit.
    While nothing was written, m is -inf, and so is the shift: carry is zero.
    """
    scales = LogScales(*(torch.empty_like(decay, dtype=m.dtype) for _ in range(4)))
    for at, chunk in enumerate(chunks):
        if chunk.first:
            m = enter(chunk.document)
        b, mu = decay[:, :, at], weight[:, :, at]
        following = torch.maximum(m + b, mu).to(m.dtype)
        empty = following == -torch.inf
        shift = torch.where(empty, -torch.inf, m - following)
        scales.entering[:, :, at] = m
        scales.shift[:, :, at] = shift
        scales.carry[:, :, at] = (b + shift).exp()
        scales.fresh[:, :, at] = torch.where(empty, 0.0, mu - following).exp()
        m = following
        if chunk.last:
            leave(chunk.document, m)
    return scales, m
