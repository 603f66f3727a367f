"""A model made to run on the mesh: sequence parallelism, recomputation, data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from flexla_dist.layers import LinearAttentionModel
from flexla_dist.parallel import parallelize_sequence
from flexla_dist.train.config import TrainConfig


def build_model(config: TrainConfig, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model of the settings on this rank. All ranks start from the same seed, hence parameters;
    afterwards each goes on with a seed of its own."""
    torch.manual_seed(config.seed)
    model = LinearAttentionModel(config.model).to(device)
    torch.manual_seed(config.seed + 1 + mesh.get_rank())
    model.checkpoint_activations = config.checkpoint_activations
    parallelize_sequence(
        model,
        mesh["cp"],
        strategy=config.mesh.strategy,
        backend=config.mesh.backend,
        node_size=config.mesh.node_size,
        timeout=config.mesh.timeout,
    )
    if mesh.size() == 1:
        return model
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    if config.mesh.wrapper == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
        return model
    devices = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=everyone.get_group())


@contextmanager
def gradients_reduced(model: nn.Module, reduce: bool) -> Iterator[None]:
    """Within the block, a backward pass averages gradients over the ranks, or only adds them up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
        yield
    elif isinstance(model, DistributedDataParallel) and not reduce:
        with model.no_sync():
            yield
    else:
        yield


def clip_gradients(model: nn.Module, largest: float) -> float:
    """Scale the gradient to at most this norm; returns its norm before, over all ranks."""
    norm = clip_grad_norm_(model.parameters(), largest)
    full = getattr(norm, "full_tensor", None)
    return float(norm if full is None else full())
