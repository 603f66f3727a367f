"""Bytes per rank that each system sends and receives, by formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.element import element_tensors
from flexla_dist.comm.links import Line
from flexla_dist.comm.tag import HEADER_BYTES
from flexla_dist.parallel.local_call import as_element
from scaling_runs.baselines.shard import Values, executor_of
from scaling_runs.baselines.traffic import Traffic

_ALIGNMENT = 16


@dataclass(frozen=True)
class Sizes:
    """What the formulas read.

    lengths: tokens of every rank. state, element: bytes of each tensor of a state and of an element
    (state, then M). token_in, token_out: bytes of one token's inputs and output, whole batch and
    all heads. nodes: node number of every rank.
    """

    lengths: tuple[int, ...]
    state: tuple[int, ...]
    element: tuple[int, ...]
    token_in: int
    token_out: int
    nodes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.lengths)

    @property
    def state_bytes(self) -> int:
        """S."""
        return sum(self.state)

    @property
    def element_bytes(self) -> int:
        """n: S and what M takes."""
        return sum(self.element)


def sizes_of(
    op: Any,
    inputs: Values,
    params: Values,
    scalars: Mapping[str, float],
    lengths: Sequence[int],
    nodes: Sequence[int] | None = None,
) -> Sizes:
    """The sizes of a call, from one blank token of its inputs."""
    blank = {n: x.detach().new_zeros(x.shape[0], 1, *x.shape[2:]) for n, x in inputs.items()}
    held = {n: x.detach() for n, x in params.items()}
    problem = op.bind(blank, held, scalars)
    executor = executor_of(op, [*blank.values(), *held.values()])
    element = as_element(executor.summary(problem, -1))
    output = prod(problem.output_shape()) * _width(problem.output_dtype)
    return Sizes(
        tuple(lengths),
        tuple(_bytes(s.local) for s in element.states),
        tuple(_bytes(t) for t in element_tensors(element)),
        sum(_bytes(x) for x in blank.values()),
        output,
        tuple(nodes) if nodes is not None else (0,) * len(lengths),
    )


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _width(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


# One direction of one call, seen from `rank`; `reverse` is the backward pass.
Formula = Callable[[Sizes, int, bool], Traffic]


def nothing(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
    """No rank sends anything."""
    return Traffic()


def ring(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
    """S from the rank before and S to the rank after."""
    return _hops(sizes.state_bytes, _line(sizes, rank, reverse), 1)


def blocked_ring(blocks: int) -> Formula:
    """The same bytes in blocks."""

    def formula(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
        return _hops(sizes.state_bytes, _line(sizes, rank, reverse), blocks)

    return formula


def gather(panels: int) -> Formula:
    """(P - 1) n both ways, in one collective a panel."""

    def formula(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
        moved = (sizes.ranks - 1) * sizes.element_bytes
        return Traffic(moved, moved, panels)

    return formula


def heads_for_tokens(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
    """All inputs of the other ranks' heads out, those of the own heads in; outputs the other way.
    Backward moves the gradients back along the same ways."""
    own, others = sizes.lengths[rank], sum(sizes.lengths) - sizes.lengths[rank]
    size = sizes.ranks
    first = (own * sizes.token_in * (size - 1) // size, others * sizes.token_in // size)
    second = (others * sizes.token_out // size, own * sizes.token_out * (size - 1) // size)
    sent, received = first[0] + second[0], first[1] + second[1]
    return Traffic(received, sent, 2) if reverse else Traffic(sent, received, 2)


def chain_of_messages(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
    """As `ring`, with a header."""
    return _hops(message(sizes.state), _line(sizes, rank, reverse), 1)


def gather_of_messages(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
    """(P - 1) messages of an element both ways."""
    moved = (sizes.ranks - 1) * message(sizes.element)
    return Traffic(moved, moved, 2 * (sizes.ranks - 1))


def doubling(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
    """Round d: an element to the rank 2^d further, one from the rank 2^d before."""
    return _doubling(message(sizes.element), _line(sizes, rank, reverse))


def nodes_then_chain(sizes: Sizes, rank: int, reverse: bool) -> Traffic:
    """Doubling inside nodes, a chain of states between their last ranks, the state to the rest."""
    line = _line(sizes, rank, reverse)
    parts = line.segments(sizes.nodes)
    index = next(i for i, part in enumerate(parts) if part.position >= 0)
    own, state = parts[index], message(sizes.state)
    traffic = _doubling(message(sizes.element), own)
    if own.next_rank is not None:
        if index:
            traffic.add(0, state)
        return traffic
    if index + 1 < len(parts):
        traffic.add(state, 0)
    if index:
        traffic.add(0, state)
        for _ in own.ranks[:-1]:
            traffic.add(state, 0)
    return traffic


def message(parts: Sequence[int]) -> int:
    """Bytes of a message of the package: a header, every tensor at a multiple of 16."""
    return HEADER_BYTES + sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in parts)


def _line(sizes: Sizes, rank: int, reverse: bool) -> Line:
    return Line.around(rank, (True,) * (sizes.ranks - 1), reverse)


def _hops(size: int, line: Line, posts: int) -> Traffic:
    traffic = Traffic()
    if line.prev_rank is not None:
        traffic.add(0, size, posts)
    if line.next_rank is not None:
        traffic.add(size, 0, posts)
    return traffic


def _doubling(size: int, line: Line) -> Traffic:
    traffic, distance = Traffic(), 1
    while distance < len(line.ranks):
        if line.position + distance < len(line.ranks):
            traffic.add(size, 0)
        if line.position >= distance:
            traffic.add(0, size)
        distance *= 2
    return traffic
