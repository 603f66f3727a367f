"""Ways in which baselines bring the state that enters a shard to it.

Contract: `start` is called on all ranks in the same order, once for each panel of heads, and
returns a function that waits for the state. A scan is written for "what enters from the rank
before"; backward calls it with the line reversed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.comm.element import Element, State, apply, element_tensors, with_tensors
from flexla_dist.comm.links import GroupRanks, Line, all_gather_flat
from scaling_runs.baselines.fold import Fold

Wait = Callable[[], State]


class Scan(Protocol):
    """An exclusive scan over the ranks of a line."""

    def start(self, element: Element, zero: State, line: Line) -> Wait:
        """Begin; the result waits for the state that enters this rank."""
        ...


@dataclass
class GatherScan:
    """All elements to all ranks by one all-gather, then a fold of those before this rank.

    eager_wait: wait for the gather at once instead of when the state is needed.
    """

    ranks: GroupRanks
    fold: Fold
    eager_wait: bool = False

    def start(self, element: Element, zero: State, line: Line) -> Wait:
        """See Scan."""
        tensors = element_tensors(element)
        own = torch.cat([t.reshape(-1) for t in tensors])
        gathered = own.new_empty(self.ranks.size * own.numel())
        work = all_gather_flat(gathered, own, self.ranks.group)
        if self.eager_wait:
            work.wait()

        def finish() -> State:
            if not self.eager_wait:
                work.wait()
            rows = gathered.view(self.ranks.size, -1)
            before = line.ranks[: line.position]
            return self.fold([unpacked(element, rows[rank]) for rank in before], zero)

        return finish


def unpacked(like: Element, flat: Tensor) -> Element:
    """The element whose tensors lie one after the other in `flat`, as views."""
    parts, offset = [], 0
    for t in element_tensors(like):
        parts.append(flat[offset : offset + t.numel()].view(t.shape))
        offset += t.numel()
    return with_tensors(like, parts, False)


@dataclass
class AllScan:
    """A chain in blocks of state rows: each block goes on as soon as it has been combined.

    Row k of an elementwise-decayed state depends on row k of the entering state alone, so blocks
    are independent; with a dense M they are not. blocks: how many, at most the rows of a state.
    """

    ranks: GroupRanks
    blocks: int
    _sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def start(self, element: Element, zero: State, line: Line) -> Wait:
        """See Scan."""
        parts = split_rows(element, zero, self.blocks)
        if line.prev_rank is None:
            for place, (part, _) in enumerate(parts):
                self._pass_on(line, [s.local for s in part.states], place)
            return lambda: zero
        source = self.ranks.global_ranks[line.prev_rank]
        buffers = [_flat(blank).new_empty(_size(blank)) for _, blank in parts]
        works = [
            dist.irecv(buffer, source, self.ranks.group, tag=place)
            for place, buffer in enumerate(buffers)
        ]

        def finish() -> State:
            entered: list[State] = []
            for (part, blank), work, buffer in zip(parts, works, buffers, strict=True):
                assert work is not None
                work.wait()
                state = _views(buffer, blank)
                self._pass_on(line, apply(part, state), len(entered))
                entered.append(state)
            return tuple(torch.cat(rows, 2) for rows in zip(*entered, strict=True))

        return finish

    def _pass_on(self, line: Line, state: Sequence[Tensor], place: int) -> None:
        if line.next_rank is None:
            return
        while len(self._sent) > 4 * self.blocks:
            self._sent.popleft()[0].wait()
        buffer = _flat(state)
        target = self.ranks.global_ranks[line.next_rank]
        work = dist.isend(buffer, target, self.ranks.group, tag=place)
        assert work is not None
        self._sent.append((work, buffer))


def split_rows(element: Element, zero: State, blocks: int) -> list[tuple[Element, State]]:
    """The element and the blank state in blocks of the first state dim, [G, HV, rows, ...]."""
    rows = min(t.shape[2] for t in zero)
    count = max(1, min(blocks, rows))
    columns = []
    for own, blank in zip(element.states, zero, strict=True):
        local = own.local.tensor_split(count, 2)
        decay: Sequence[Tensor | None] = [own.decay] * count
        if own.decay is not None and own.decay.shape[2] > 1:
            decay = own.decay.tensor_split(count, 2)
        pieces = [replace(own, local=a, decay=b) for a, b in zip(local, decay, strict=True)]
        columns.append(list(zip(pieces, blank.tensor_split(count, 2), strict=True)))
    return [
        (Element(tuple(own for own, _ in block)), tuple(blank for _, blank in block))
        for block in zip(*columns, strict=True)
    ]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _views(buffer: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found, offset = [], 0
    for t in like:
        found.append(buffer[offset : offset + t.numel()].view(t.shape))
        offset += t.numel()
    return tuple(found)
