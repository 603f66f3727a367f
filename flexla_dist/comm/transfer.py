"""Rows that a rank needs from the tokens before its shard, and their gradients back.

A short convolution of W taps needs the W - 1 tokens before the shard, a token shift needs one.
They may lie on several ranks, because shards may be shorter than that, or empty. The plan follows
from the shard lengths alone, so every rank computes the same one and nobody is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from flexla_dist.comm.agreement import open_messages
from flexla_dist.comm.channel import Channel, Incoming, Outgoing
from flexla_dist.comm.element import State
from flexla_dist.comm.tag import Kind, Tag


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` rows from `src_row` of one rank's shard to `dst_row` of another rank's halo."""

    src_rank: int
    src_row: int
    dst_rank: int
    dst_row: int
    rows: int


@dataclass(frozen=True)
class TransferPlan:
    """Who sends which rows to whom.

    width: rows of every rank's halo; its last row is the token just before the shard.
    lengths: shard length of every rank. pieces: by (dst_rank, src_rank), each pair at most once.
    """

    width: int
    lengths: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def sent_by(self, rank: int) -> list[Piece]:
        """Pieces of this rank's shard, by receiver."""
        return [piece for piece in self.pieces if piece.src_rank == rank]

    def received_by(self, rank: int) -> list[Piece]:
        """Pieces of this rank's halo, by sender."""
        return [piece for piece in self.pieces if piece.dst_rank == rank]


def plan_tails(lengths: Sequence[int], starts: Sequence[int], width: int) -> TransferPlan:
    """Plan in which every rank gets the `width` tokens before its shard, none before its start.

    lengths: tokens of every rank's shard. starts: for every rank the global position where the
    document of its first token begins; a document that begins with the shard, or an empty shard,
    needs nothing. ValueError: lengths and starts of different number, or negative values.
    """
    if len(lengths) != len(starts) or width < 0 or min(lengths, default=0) < 0:
        raise ValueError(
            f"plan_tails: got lengths {tuple(lengths)}, starts {tuple(starts)}, width {width}; "
            "expected one non-negative length and one start per rank, and width >= 0"
        )
    begins = [0, *accumulate(lengths)]
    pieces = []
    for dst, length in enumerate(lengths):
        if length == 0:
            continue
        begin = begins[dst]
        low = max(starts[dst], begin - width, 0)
        for src in range(dst):
            first, last = max(low, begins[src]), min(begin, begins[src + 1])
            if first < last:
                row = width - (begin - first)
                pieces.append(Piece(src, first - begins[src], dst, row, last - first))
    return TransferPlan(width, tuple(lengths), tuple(pieces))


def transfer(channel: Channel, rows: Tensor, plan: TransferPlan, tag: Tag, dim: int) -> Tensor:
    """This rank's halo: like `rows` with `plan.width` rows along `dim`, zero where none came."""
    open_messages(channel, rows.device)
    rank = channel.ranks.rank
    halo = rows.new_zeros(_with_size(rows, dim, plan.width))
    sends = [
        Outgoing(p.dst_rank, [rows.narrow(dim, p.src_row, p.rows)]) for p in plan.sent_by(rank)
    ]
    wanted = plan.received_by(rank)
    places = [halo.narrow(dim, p.dst_row, p.rows) for p in wanted]
    receives = [Incoming(p.src_rank, [t]) for p, t in zip(wanted, places, strict=True)]
    for place, message in zip(
        places, channel.exchange(Kind.ROWS, tag, sends, receives), strict=True
    ):
        place.copy_(message.tensors[0])
    return halo


def transfer_adjoint(
    channel: Channel, grad_halo: Tensor, plan: TransferPlan, tag: Tag, dim: int
) -> Tensor:
    """Gradient of this rank's rows from the gradients of all halos: summed by receiver in order."""
    open_messages(channel, grad_halo.device)
    rank = channel.ranks.rank
    grad = grad_halo.new_zeros(_with_size(grad_halo, dim, plan.lengths[rank]))
    sends = [
        Outgoing(p.src_rank, [grad_halo.narrow(dim, p.dst_row, p.rows)])
        for p in plan.received_by(rank)
    ]
    wanted = plan.sent_by(rank)
    places = [grad.narrow(dim, p.src_row, p.rows) for p in wanted]
    receives = [Incoming(p.dst_rank, [t]) for p, t in zip(wanted, places, strict=True)]
    for place, message in zip(
        places, channel.exchange(Kind.ROW_GRADIENTS, tag, sends, receives), strict=True
    ):
        place.add_(message.tensors[0])
    return grad


def _with_size(tensor: Tensor, dim: int, size: int) -> torch.Size:
    shape = list(tensor.shape)
    shape[dim] = size
    return torch.Size(shape)


def gather_rows(
    channel: Channel, rows: Tensor, lengths: Sequence[int], tag: Tag, dim: int
) -> Tensor:
    """All shards joined along `dim`; shards travel padded to the longest."""
    open_messages(channel, rows.device)
    longest = max(lengths)
    padded = rows.new_zeros(_with_size(rows, dim, longest))
    padded.narrow(dim, 0, rows.shape[dim]).copy_(rows)
    messages = channel.all_gather(Kind.ROWS, tag, [padded])
    parts = [
        message.tensors[0].narrow(dim, 0, length)
        for message, length in zip(messages, lengths, strict=True)
    ]
    return torch.cat(parts, dim)


def broadcast(channel: Channel, tensors: Sequence[Tensor], source: int, tag: Tag) -> State:
    """The tensors of group rank `source` on every rank."""
    open_messages(channel, tensors[0].device)
    rank, size = channel.ranks.rank, channel.ranks.size
    if rank == source:
        sends = [Outgoing(other, tensors) for other in range(size) if other != source]
        channel.exchange(Kind.TENSOR, tag, sends)
        return tuple(tensors)
    return channel.exchange(Kind.TENSOR, tag, receives=[Incoming(source, tensors)])[0].tensors


def all_reduce_sum(channel: Channel, tensor: Tensor, tag: Tag) -> Tensor:
    """Sum over the ranks, added in rank order."""
    open_messages(channel, tensor.device)
    messages = channel.all_gather(Kind.TENSOR, tag, [tensor])
    total = messages[0].tensors[0].clone()
    for message in messages[1:]:
        total += message.tensors[0]
    return total
