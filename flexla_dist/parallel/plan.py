"""What one micro-batch looks like from one rank: the plan that every sharded node captures.

Contract: a plan is frozen and made of plain numbers that follow from the global lengths and
document starts alone, so that all ranks decide alike who sends what to whom. Local flags, masks
and `requires_grad` have no place here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from flexla_dist.comm.tag import micro_batch_words
from flexla_dist.comm.transfer import TransferPlan, plan_tails
from flexla_dist.parallel.documents import (
    LocalDocuments,
    Offsets,
    crossing_cuts,
    document_positions,
    documents_of_ranks,
    reach_back,
    shard_offsets,
)


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """Shards and documents of one micro-batch, seen from group rank `rank`.

    lengths: tokens of every rank. starts: global document starts, `(0, total)` when nothing is
    packed. packed: documents were given by cu_seqlens, so B = 1. step, micro_batch: place in the
    training run, carried by every message.
    """

    rank: int
    lengths: tuple[int, ...]
    starts: Offsets
    packed: bool
    step: int = 0
    micro_batch: int = 0
    _halos: dict[int, TransferPlan] = field(default_factory=dict, repr=False)
    _positions: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Ranks P."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of this rank's shard."""
        return self.lengths[self.rank]

    @property
    def num_documents(self) -> int:
        """Documents N of the whole packed row; 1 when nothing is packed."""
        return len(self.starts) - 1

    @cached_property
    def offsets(self) -> Offsets:
        """First token of every shard, and the total."""
        return shard_offsets(self.lengths)

    @cached_property
    def crossing(self) -> tuple[bool, ...]:
        """For each of the P-1 cuts whether a document crosses it."""
        return crossing_cuts(self.starts, self.lengths)

    @cached_property
    def documents(self) -> LocalDocuments:
        """The documents of this rank's shard."""
        return documents_of_ranks(self.starts, self.lengths)[self.rank]

    @property
    def communicates(self) -> bool:
        """Whether any state is exchanged at all; the same on every rank."""
        return any(self.crossing)

    @property
    def receives(self) -> bool:
        """Whether a state enters this shard."""
        return self.rank > 0 and self.crossing[self.rank - 1]

    @property
    def sends(self) -> bool:
        """Whether a state leaves this shard."""
        return self.rank < self.size - 1 and self.crossing[self.rank]

    @cached_property
    def cu_seqlens(self) -> Tensor | None:
        """Starts of the local documents, int64 on the CPU, or None when nothing is packed.

        A shard without tokens has one empty document here, because operators want at least one.
        """
        if not self.packed:
            return None
        starts = self.documents.cu_seqlens
        return torch.tensor(starts if len(starts) > 1 else (0, 0), dtype=torch.int64)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Position [1, T_local] of every local token in its document, int64 on `device`."""
        device = torch.device(device)
        found = self._positions.get(device)
        if found is None:
            low, high = self.offsets[self.rank], self.offsets[self.rank + 1]
            found = document_positions(self.starts, low, high).view(1, -1).to(device)
            self._positions[device] = found
        return found

    def halo(self, width: int) -> TransferPlan:
        """Who sends which rows to whom so that every shard gets the `width` tokens before it.

        Only tokens of the document that crosses the cut are wanted; they may come from several
        ranks.
        """
        found = self._halos.get(width)
        if found is None:
            begins = self.offsets[:-1]
            starts = [begin - reach_back(self.starts, begin) for begin in begins]
            found = self._halos[width] = plan_tails(self.lengths, starts, width)
        return found

    def describe(self) -> str:
        """The plan in words, for messages."""
        kind = f"{self.num_documents} packed documents" if self.packed else "nothing packed"
        return (
            f"shards of {self.lengths} tokens, {kind}, step {self.step}, "
            f"{micro_batch_words(self.micro_batch)}"
        )


def make_plan(
    rank: int,
    lengths: Sequence[int],
    starts: Offsets | None = None,
    *,
    step: int = 0,
    micro_batch: int = 0,
) -> SequencePlan:
    """A plan from checked lengths and document starts (None: one document, not packed)."""
    lengths = tuple(lengths)
    packed = starts is not None
    bounds = starts if starts is not None else (0, sum(lengths))
    return SequencePlan(rank, lengths, bounds, packed, step, micro_batch)
