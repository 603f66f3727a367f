"""Short depthwise causal convolution over tokens, aware of packed documents and of a halo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flexla_dist.compiler.executor.tables import device_table

Starts: TypeAlias = Tensor | Sequence[int] | None


def document_positions(
    cu_seqlens: Tensor | Sequence[int], tokens: int, device: torch.device
) -> Tensor:
    """Distance [T] of every token of a packed row from the first token of its document."""
    there = isinstance(cu_seqlens, Tensor) and cu_seqlens.device == device
    if there or torch.compiler.is_compiling():
        starts = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=device)
    else:  # copied once, so that a CUDA graph can be captured
        starts = device_table(torch.as_tensor(cu_seqlens).tolist(), device, torch.int64)
    index = torch.arange(tokens, device=device)
    document = torch.searchsorted(starts, index, right=True) - 1
    return index - starts[document]


class ShortConvolution(nn.Module):
    """Depthwise causal convolution of `width` taps, then SiLU.

    y_t = silu(sum_j weight[j] * x_{t-j}), j = 0 .. width-1, where x is zero before the start of t's
    document. Mamba and the delta-rule layers put it on q, k and v.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        if width < 2:
            raise ValueError(f"a short convolution needs width >= 2, got {width}")
        self.width = width
        self.weight = nn.Parameter(torch.zeros(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity on the current token, and little of the tokens before it."""
        with torch.no_grad():
            self.weight.uniform_(-0.5, 0.5).mul_(self.width**-0.5)
            self.weight[0].add_(1.0)

    def forward(self, x: Tensor, halo: Tensor, cu_seqlens: Starts = None) -> Tensor:
        """Convolve.

        Args:
            x: [B, T, D].
            halo: [B, width-1, D], the tokens before x, zero where they belong to another document.
            cu_seqlens: document starts [N+1] of a packed x (B = 1). The halo belongs to the first
                document; the others see zeros before their first token.
        Returns:
            [B, T, D] in the dtype of x.
        """
        tokens = x.shape[1]
        weight = self.weight.to(x.dtype)
        padded = torch.cat([halo.to(x.dtype), x], dim=1)
        reach = self._reach(x, cu_seqlens)
        y = x * weight[0]
        for tap in range(1, self.width):
            first = self.width - 1 - tap
            earlier = padded[:, first : first + tokens]
            if reach is not None:
                earlier = torch.where((reach >= tap)[:, None], earlier, 0)
            y = torch.addcmul(y, earlier, weight[tap])
        return nn.functional.silu(y)

    def _reach(self, x: Tensor, cu_seqlens: Starts) -> Tensor | None:
        """How many earlier tokens each token may see; None where the halo alone decides."""
        if cu_seqlens is None or x.shape[1] == 0:
            return None
        positions = document_positions(cu_seqlens, x.shape[1], x.device)
        index = torch.arange(x.shape[1], device=x.device)
        in_first_document = positions == index
        return torch.where(in_first_document, self.width, positions)
