"""Held-out bits per byte of a model on the mesh."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flexla_dist.parallel import (
    global_token_count,
    mean_loss,
    sequence_context,
    sequence_loss,
    shard_sequence,
)
from flexla_dist.train.data import Sampler


@torch.no_grad()
def held_out_bits(
    model: nn.Module,
    sampler: Sampler,
    mesh: DeviceMesh,
    sequences: int,
    per_rank: int,
    device: torch.device,
) -> float:
    """Bits per byte over `sequences` held-out sequences, `per_rank` of them at a time for each
    sequence group; each starts without memory. All ranks call it together."""
    groups, place = mesh["dp"].size(), mesh["dp"].get_local_rank()
    sequences = min(sequences, sampler.count)
    rounds = math.ceil(sequences / (groups * per_rank))
    was_training = model.training
    model.eval()
    total, counted = 0.0, 0
    for number in range(rounds):
        first = (number * groups + place) * per_rank
        batch = sampler.spread(sequences, range(first, first + per_rank))
        with sequence_context(mesh["cp"], cu_seqlens=batch.cu_seqlens):
            tokens = shard_sequence(batch.tokens.to(device), mesh["cp"])
            labels = shard_sequence(batch.labels.to(device), mesh["cp"])
            count = int(global_token_count(labels, mesh))
            loss = sequence_loss(model(tokens), labels, mesh, count=count)
        total += float(mean_loss(loss, mesh)) * count
        counted += count
    model.train(was_training)
    return total / counted / math.log(2.0)
