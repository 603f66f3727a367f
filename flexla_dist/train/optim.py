"""AdamW with decay on matrices only, and the schedule of its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from flexla_dist.train.config import OptimConfig

_UNDECAYED = ("decay", "beta", "conv", "norm", "attn_norm", "mlp_norm", "embedding")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices outside norms, gates, convolutions, embedding."""
    return parameter.dim() >= 2 and not set(name.split(".")) & set(_UNDECAYED)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters in two groups, with and without decay."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    """Rate of step `step` (from 0) when the run is at `progress` in [0, 1]: linear warm-up times a
    cosine from the peak to `final_lr` of it."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return config.lr * warm * (config.final_lr + (1.0 - config.final_lr) * cosine)
