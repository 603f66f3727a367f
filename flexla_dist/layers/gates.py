"""Log-decays of the variants: modules x [B, T, D] -> g, in float32 or better and never positive.

g is [B, T, heads] for one decay a head, [B, T, heads, key_dim] for one each key channel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexla_dist.spec.variants import lightning, retention


def accurate(x: Tensor) -> Tensor:
    """x in float32, or unchanged where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RetentionDecay(nn.Module):
    """Constant per head: g_h = log(1 - 2**(-5 - h)) (RetNet)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        decay = retention.head_decay(self.heads, x.device).to(accurate(x).dtype)
        return decay.expand(x.shape[0], x.shape[1], self.heads)


class LightningDecay(nn.Module):
    """Constant per head: g_h = -(8 / H) * (1 - layer / num_layers) * h (Lightning Attention)."""

    def __init__(self, heads: int, layer_index: int, num_layers: int) -> None:
        super().__init__()
        self.place = (heads, layer_index, num_layers)

    def forward(self, x: Tensor) -> Tensor:
        decay = lightning.head_decay(*self.place, x.device).to(accurate(x).dtype)
        return decay.expand(x.shape[0], x.shape[1], self.place[0])


class SigmoidDecay(nn.Module):
    """Learned per head: g = logsigmoid(x W + b) / normaliser (simple GLA)."""

    def __init__(self, width: int, heads: int, normaliser: float = 16.0) -> None:
        super().__init__()
        self.normaliser = normaliser
        self.project = nn.Linear(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return F.logsigmoid(accurate(self.project(x))) / self.normaliser


class LowRankSigmoidDecay(nn.Module):
    """Learned per key channel: g = logsigmoid(x W1 W2 + b) / normaliser, W1 of rank 16 (GLA)."""

    def __init__(
        self, width: int, heads: int, key_dim: int, rank: int = 16, normaliser: float = 16.0
    ) -> None:
        super().__init__()
        self.shape = (heads, key_dim)
        self.normaliser = normaliser
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, heads * key_dim)

    def forward(self, x: Tensor) -> Tensor:
        logits = accurate(self.up(self.down(x)))
        return (F.logsigmoid(logits) / self.normaliser).unflatten(-1, self.shape)


class StepDecay(nn.Module):
    """Per head, a rate over a learned step (Mamba2, gated delta rule):
    step = softplus(x W + dt_bias), g = -exp(A_log) * step.

    exp(A_log) starts uniform in [1, 16] and the step log-uniform in [0.001, 0.1], so that heads
    remember from about one to a thousand tokens.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise_rate(self.A_log)
        initialise_step(self.dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        step = F.softplus(accurate(self.project(x)) + self.dt_bias)
        return -torch.exp(accurate(self.A_log)) * step


class LowRankStepDecay(nn.Module):
    """Per key channel: g = -exp(A_log) * softplus(x W1 W2 + dt_bias), A_log per head (KDA)."""

    def __init__(self, width: int, heads: int, key_dim: int, rank: int = 16) -> None:
        super().__init__()
        self.shape = (heads, key_dim)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, heads * key_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads, key_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise_rate(self.A_log)
        initialise_step(self.dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        logits = accurate(self.up(self.down(x))).unflatten(-1, self.shape)
        return -torch.exp(accurate(self.A_log))[:, None] * F.softplus(logits + self.dt_bias)


class ForgetGate(nn.Module):
    """Per channel of a vector state: f = low + (1 - low) * sigmoid(x W + b), g = log f (HGRN).

    The bound low = layer / (2 * num_layers) grows with depth: deep layers remember longer.
    """

    def __init__(
        self, width: int, heads: int, channels: int, layer_index: int, num_layers: int
    ) -> None:
        super().__init__()
        self.shape = (heads, channels)
        self.low = layer_index / (2.0 * num_layers)
        self.project = nn.Linear(width, heads * channels)

    def forward(self, x: Tensor) -> Tensor:
        logits = accurate(self.project(x)).unflatten(-1, self.shape)
        if self.low == 0.0:
            return F.logsigmoid(logits)
        return torch.log(self.low + (1.0 - self.low) * torch.sigmoid(logits))


def initialise_rate(log_rate: nn.Parameter, low: float = 1.0, high: float = 16.0) -> None:
    """Rates uniform in [low, high], stored as logarithms."""
    with torch.no_grad():
        log_rate.copy_(torch.empty_like(log_rate).uniform_(low, high).log_())


def initialise_step(bias: nn.Parameter, low: float = 1e-3, high: float = 0.1) -> None:
    """Steps log-uniform in [low, high], stored as the argument of softplus."""
    with torch.no_grad():
        step = torch.empty_like(bias).uniform_(math.log(low), math.log(high)).exp_()
        bias.copy_(step + torch.log(-torch.expm1(-step)))
