"""Cross entropy of a sharded sequence, right under averaging data parallelism.

Contract: the objective is the sum of the token losses of all ranks and all accumulation
micro-batches over the number of their counted labels. A rank computes its local sum over the
global count; because DDP and FSDP then average the gradients over the ranks, it is multiplied by
their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from flexla_dist.errors import ShardingError
from flexla_dist.parallel.documents import read_cu_seqlens
from flexla_dist.parallel.mesh import MeshOrGroup, groups_of, size_of

IGNORE_INDEX = -100


def shift_labels(
    ids: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Labels [B, T] of a whole sequence of ids [B, T]: the next token of the same document.

    The last token of every document gets `ignore_index`. Shift before `shard_sequence`, because the
    last label of a shard is the first id of the next one. ShardingError for a wrong `cu_seqlens`.
    """
    labels = torch.full_like(ids, ignore_index)
    if ids.shape[-1] > 1:
        labels[..., :-1] = ids[..., 1:]
    if cu_seqlens is not None:
        starts = read_cu_seqlens(cu_seqlens)
        if starts[-1] != ids.shape[-1]:
            raise ShardingError(
                f"cu_seqlens ends at {starts[-1]}, but ids has {ids.shape[-1]} tokens; labels are "
                "shifted on the whole row, before it is sharded"
            )
        last = [end - 1 for start, end in pairwise(starts) if end > start]
        labels[..., torch.tensor(last, dtype=torch.int64, device=ids.device)] = ignore_index
    return labels


def global_token_count(
    labels: Tensor | Iterable[Tensor],
    mesh: MeshOrGroup | None,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Number of counted labels over the mesh, as a float64-exact scalar tensor, at least 1.

    labels: local labels of one micro-batch, or of all micro-batches of an optimiser step. mesh: all
    ranks that see different tokens (dp and cp), None for a single process. One collective for each
    mesh dim; every rank of the mesh must call it.
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    if not parts:
        raise ShardingError("no labels to count; pass the labels of at least one micro-batch")
    count = torch.stack([(part != ignore_index).sum() for part in parts]).sum()
    for group in groups_of(mesh) if mesh is not None else ():
        dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def sequence_loss(
    logits: Tensor,
    labels: Tensor,
    mesh: MeshOrGroup | None,
    *,
    count: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    averaged: bool = True,
) -> Tensor:
    """Cross entropy of the local tokens as this rank's share of the global mean.

    loss = (sum over local tokens of -log softmax(logits)[label]) / count * ranks

    Args:
        logits: [B, T_local, vocabulary]; T_local may be 0.
        labels: [B, T_local], shifted before sharding (`shift_labels`); `ignore_index` is not
        counted. mesh: every rank that sees different tokens: the (dp, cp) mesh, or a group; None
        for one
            process.
        count: counted labels over the mesh and over all accumulation micro-batches
            (`global_token_count`); None counts this micro-batch alone, with a collective.
        averaged: gradients are averaged over `mesh` afterwards (DDP, FSDP). False where they are
            summed (FSDP with divide factor 1): the loss is then not multiplied by the ranks.
    Returns:
        a scalar, fp32 or wider. The mean of it over the ranks (the sum with averaged=False) is the
        loss to report. A rank whose labels are all ignored returns 0, still attached to the graph,
        so that its backward takes part in the exchanges.
    """
    if logits.shape[:-1] != labels.shape:
        raise ShardingError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)} do not fit; expected "
            "[B, T, vocabulary] and [B, T] of the same shard"
        )
    if count is None:
        count = global_token_count(labels, mesh, ignore_index=ignore_index)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    local = F.cross_entropy(
        wide.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    factor = size_of(mesh) if mesh is not None and averaged else 1
    return local * factor / count


def mean_loss(loss: Tensor, mesh: MeshOrGroup | None, *, averaged: bool = True) -> Tensor:
    """The global loss to report, from every rank's `sequence_loss`; no gradient, a collective."""
    total = loss.detach().clone()
    if mesh is None:
        return total
    for group in groups_of(mesh):
        dist.all_reduce(total, group=group)
    return total / size_of(mesh) if averaged else total
