"""Where shards and documents begin and end.

Contract: plain arithmetic on the CPU, the same on every rank. A shard is the half-open span of
tokens that one rank owns; spans are contiguous, in rank order, and may be empty. A document
crosses a cut at token c when it starts before c and ends after c. An empty document belongs to
the rank that owns its position, or to the last rank with tokens when it lies at the very end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flexla_dist.errors import ShardingError
from flexla_dist.shapes import whole_numbers

Offsets = tuple[int, ...]


def shard_lengths(total: int, ranks: int) -> tuple[int, ...]:
    """Tokens of every rank when `total` tokens are cut as evenly as can be, longer shards first."""
    if total < 0 or ranks < 1:
        raise ShardingError(
            f"cannot cut {total} tokens over {ranks} ranks; expected a length of at least 0 and at "
            "least one rank"
        )
    share, rest = divmod(total, ranks)
    return tuple(share + (rank < rest) for rank in range(ranks))


def shard_offsets(lengths: Sequence[int]) -> Offsets:
    """First token of every rank's shard, and the total, [P+1]."""
    return (0, *accumulate(lengths))


def check_lengths(lengths: Sequence[int], ranks: int, total: int | None = None) -> tuple[int, ...]:
    """`lengths` as a tuple of P numbers that sum to `total`, or a ShardingError."""
    result = whole_numbers("lengths", lengths, ShardingError)
    if len(result) != ranks:
        raise ShardingError(
            f"lengths has {len(result)} entries, expected one for each of the {ranks} ranks: "
            f"{result}"
        )
    if min(result) < 0:
        raise ShardingError(f"lengths must not be negative, got {result}")
    if total is not None and sum(result) != total:
        raise ShardingError(
            f"lengths {result} sum to {sum(result)} tokens, expected {total}, the whole sequence"
        )
    return result


def read_cu_seqlens(cu_seqlens: Tensor | Sequence[int]) -> Offsets:
    """Document starts as Python numbers: [0, ..., total], not decreasing, or a ShardingError."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ShardingError(
                "cu_seqlens must be a vector [N+1] of int32 or int64, got "
                f"{list(cu_seqlens.shape)} of {str(cu_seqlens.dtype).removeprefix('torch.')}"
            )
        starts = tuple(cu_seqlens.tolist())
    else:
        starts = whole_numbers("cu_seqlens", cu_seqlens, ShardingError)
    if len(starts) < 2 or starts[0] != 0:
        raise ShardingError(
            "cu_seqlens must start with 0 and end with the number of tokens, at least two numbers; "
            f"got {_short(starts)}"
        )
    for index, (low, high) in enumerate(pairwise(starts)):
        if high < low:
            raise ShardingError(
                f"cu_seqlens must not decrease: entry {index} is {low}, entry {index + 1} is "
                f"{high}; sort the documents by their place in the packed row"
            )
    return starts


def _short(values: Sequence[int]) -> str:
    text = ", ".join(str(value) for value in values[:8])
    return f"[{text}, ...]" if len(values) > 8 else f"[{text}]"


@dataclass(frozen=True)
class LocalDocuments:
    """The documents of one shard.

    cu_seqlens: their starts counted from the shard's first token, N_local + 1 numbers. first:
    global index of the first one. continued: the first one started on an earlier rank. continues:
    the last one goes on on a later rank. A shard without tokens has no documents (`cu_seqlens` is
    `(0,)`), but both flags are set when a document passes over it.
    """

    cu_seqlens: Offsets
    first: int
    continued: bool
    continues: bool

    @property
    def count(self) -> int:
        """N_local."""
        return len(self.cu_seqlens) - 1

    @property
    def starting(self) -> range:
        """Local indices of the documents whose first token is here (empty documents included)."""
        return range(1 if self.continued and self.count else 0, self.count)

    @property
    def ending(self) -> range:
        """Local indices of the documents whose last token is here (empty documents included)."""
        return range(self.count - (1 if self.continues and self.count else 0))


def crosses(starts: Offsets, cut: int) -> bool:
    """Whether a document has tokens on both sides of `cut`."""
    return 0 < cut < starts[-1] and starts[bisect_left(starts, cut)] != cut


def local_cu_seqlens(
    cu_seqlens: Tensor | Sequence[int], low: int, high: int, *, owns_end: bool | None = None
) -> LocalDocuments:
    """The documents of the shard [low, high) of a packed row.

    owns_end: empty documents at the very end of the row belong to this shard; by default when the
    shard has tokens and reaches the end.
    """
    starts = read_cu_seqlens(cu_seqlens)
    return _local_documents(starts, low, high, owns_end)


def _local_documents(
    starts: Offsets, low: int, high: int, owns_end: bool | None = None
) -> LocalDocuments:
    total, documents = starts[-1], len(starts) - 1
    if not 0 <= low <= high <= total:
        raise ShardingError(
            f"shard [{low}, {high}) does not lie in a row of {total} tokens; expected "
            "0 <= low <= high <= tokens"
        )
    if owns_end is None:
        owns_end = low < high == total
    continued, continues = crosses(starts, low), crosses(starts, high)
    first = bisect_left(starts, low, 0, documents)
    last = documents if owns_end else bisect_left(starts, high, 0, documents)
    if continued:
        first -= 1
    if low == high and not owns_end:
        return LocalDocuments((0,), first, continued, continues)
    ends = (min(starts[index + 1], high) - low for index in range(first, last))
    return LocalDocuments((0, *ends), first, continued, continues)


def documents_of_ranks(starts: Offsets, lengths: Sequence[int]) -> tuple[LocalDocuments, ...]:
    """The documents of every rank's shard; every start and every end is owned once."""
    offsets = shard_offsets(lengths)
    if offsets[-1] != starts[-1]:
        raise ShardingError(
            f"the shards hold {offsets[-1]} tokens ({tuple(lengths)}), but cu_seqlens ends at "
            f"{starts[-1]}; expected the same number"
        )
    with_tokens = [rank for rank, length in enumerate(lengths) if length > 0]
    end_owner = with_tokens[-1] if with_tokens else 0
    return tuple(
        _local_documents(starts, offsets[rank], offsets[rank + 1], owns_end=rank == end_owner)
        for rank in range(len(lengths))
    )


def crossing_cuts(starts: Offsets, lengths: Sequence[int]) -> tuple[bool, ...]:
    """For each of the P-1 cuts whether a document crosses it."""
    return tuple(crosses(starts, cut) for cut in shard_offsets(lengths)[1:-1])


def reach_back(starts: Offsets, position: int) -> int:
    """How many tokens before `position` are of the document that crosses it; 0 for none."""
    if not crosses(starts, position):
        return 0
    return position - starts[bisect_right(starts, position) - 1]


def document_positions(starts: Offsets, low: int, high: int) -> Tensor:
    """Distance [high-low] of every token of [low, high) from its document's first token, int64."""
    index = torch.arange(low, high)
    bounds = torch.tensor(starts, dtype=torch.int64)
    document = torch.searchsorted(bounds, index, right=True) - 1
    return index - bounds[document.clamp(max=len(starts) - 2)]
