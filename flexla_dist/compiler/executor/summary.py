"""Composes the elements of consecutive slabs into that of a span, forwards or backwards.

Contract: slabs are given in order (`append`, first to last) or in reverse (`prepend`, last to
first, for the adjoint); `result` is the element of all of them, from a zero state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap, StateMap
from flexla_dist.compiler.executor.layout import Chunk
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.scan import Affine, forward_scan, reverse_scan
from flexla_dist.compiler.executor.slab_run import ClosedPorts, SlabRun

_CLOSED = ClosedPorts()


class Summary:
    """The element composed so far; `dense` names the states whose M is a matrix.

    The element of a log-scaled spec has log factors, its adjoint plain ones.
    """

    def __init__(self, problem: Problem, dense: frozenset[str], adjoint: bool):
        self.problem, self.dense = problem, dense
        self.names = tuple(problem.spec.state_dims)
        self.lanes = 1 if problem.layout.packed else problem.batch
        self.local = [self._full(problem.state_shape(name, self.lanes), 0.0) for name in self.names]
        self.factor: list[Tensor | None] = [None] * len(self.names)
        self.log_decay: Tensor | None = None
        self.log_weight: Tensor | None = None
        if problem.spec.log_scaled is not None and not adjoint:
            shape = (self.lanes, problem.heads)
            self.log_decay, self.log_weight = self._full(shape, 0.0), self._full(shape, -torch.inf)

    def _full(self, shape: tuple[int, ...], value: float) -> Tensor:
        dtype, device = self.problem.compute_dtype, self.problem.device
        return torch.full(shape, value, dtype=dtype, device=device)

    def append(self, run: SlabRun) -> None:
        """Add a slab after what came before."""
        chunks = _inner(run)
        if self.log_decay is not None and self.log_weight is not None:
            self.log_weight = run.scan_log_scale(chunks, self.log_weight, _CLOSED)
            self.log_decay = self.log_decay + run.full("log_decay", 0).sum(2).to(
                self.log_decay.dtype
            )
        for at, name in enumerate(self.names):
            affine = run.affine(name)
            _, self.local[at] = forward_scan(
                affine, chunks, self.local[at], _CLOSED.enter, _CLOSED.leave
            )
            if self.log_decay is None:
                self.factor[at] = _product(affine, self.factor[at], range(len(chunks)))

    def prepend(self, run: SlabRun) -> None:
        """Add a slab before what came after it; the element is that of the gradient."""
        chunks = _inner(run)
        for at, name in enumerate(self.names):
            affine = run.affine(name)
            _, self.local[at] = reverse_scan(
                affine, run.adjoint(name), chunks, self.local[at], _CLOSED.enter, _CLOSED.leave
            )
            if affine.matrix is not None:
                affine = replace(affine, matrix=affine.matrix.mT)
            self.factor[at] = _product(affine, self.factor[at], range(len(chunks) - 1, -1, -1))

    def result(self) -> SpanMap:
        """The element of everything added."""
        maps = []
        for name, local, factor in zip(self.names, self.local, self.factor, strict=True):
            if name not in self.dense:
                maps.append(StateMap(local, decay=factor))
                continue
            if factor is None:
                k = local.shape[-2]
                eye = torch.eye(k, dtype=local.dtype, device=local.device)
                factor = eye.expand(self.lanes, self.problem.heads, k, k)
            maps.append(StateMap(local, matrix=factor))
        return SpanMap(tuple(maps), self.log_decay, self.log_weight)


def _inner(run: SlabRun) -> tuple[Chunk, ...]:
    """The chunks as the middle of a document, so that a scan neither enters nor leaves."""
    return tuple(replace(chunk, first=False, last=False) for chunk in run.slab.chunks)


def _product(affine: Affine, factor: Tensor | None, order: range) -> Tensor | None:
    """M of the chunks in `order`, times the product so far; None is the identity."""
    if affine.matrix is None:
        if affine.decay is None:
            return factor
        here = affine.decay.prod(2)
        return here if factor is None else here * factor
    for at in order:
        factor = affine.multiply(at, factor)
    return factor
