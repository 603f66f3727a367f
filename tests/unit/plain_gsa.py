"""Gated slot attention as plain PyTorch over all pairs of tokens: an independent run in any dtype.

Contract: shares nothing with the compiler or its operators; quadratic in T, from a zero state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.testing.budget import measure
from flexla_dist.testing.inputs import CallInputs


def gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, scale: float) -> Tensor:
    """Outputs [B, T, H, V]; q, k [B, T, H, K], v [B, T, H, V], s, g [B, T, H, M].

    Products are in the dtype of q; decays and the softmax in float32 at least.
    """
    wide = torch.promote_types(g.dtype, torch.float32)
    q, k, v, s, b = (x.movedim(2, 1) for x in (q, k, v, s, g.to(wide).cumsum(1)))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[:, :, None]
    gap = b[:, :, :, None] - b[:, :, None]
    writes = (gap.masked_fill(~later, float("-inf")).exp() * s[:, :, None]).to(q.dtype)
    slots = (((q * scale) @ k.mT)[:, :, :, None] @ writes).squeeze(3)  # [B, H, T, M]
    weights = writes @ slots.to(wide).softmax(-1).to(q.dtype)[..., None]
    return (weights.squeeze(-1) @ v).movedim(1, 2)


def run(call: CallInputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of the inputs, named as the tests' results are."""
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in call.inputs.items()}
    heads = inputs["v"].shape[2]
    spread = {n: x.repeat_interleave(heads // x.shape[2], 2) for n, x in inputs.items()}
    out = gsa(**spread, scale=call.scalars["scale"])
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    grads = torch.autograd.grad(out, list(inputs.values()), seed.to(dtype))
    return {"o": out.detach(), **{f"d{n}": x for n, x in zip(inputs, grads, strict=True)}}


def bfloat16_errors(call: CallInputs) -> dict[str, float]:
    """RMSE ratios of the run in bfloat16 against the one in float64."""
    got, want = run(call, torch.bfloat16), run(call, torch.float64)
    return {name: measure(x, want[name]).ratio for name, x in got.items()}
