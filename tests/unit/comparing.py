"""Calls whose results and gradients are compared bit by bit between two ways of running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import CallInputs, make_inputs

from .compiled import SPECS

PACKED = {"batch": 1, "tokens": 40, "cu_seqlens": torch.tensor([0, 3, 3, 25, 40])}


def run(op: LinearAttentionOp, call: CallInputs) -> tuple[Tensor, ...]:
    """Output and final states of a call."""
    o, states = op(
        **call.inputs,
        **call.params,
        **call.scalars,
        initial_state=call.initial_state,
        output_final_state=True,
        cu_seqlens=call.cu_seqlens,
    )
    return (o, *((states,) if isinstance(states, Tensor) else states))


def number(results: tuple[Tensor, ...]) -> Tensor:
    """One number that depends on every result that is differentiable."""
    parts = [x * torch.linspace(0.1, 1.0, x.numel()).view(x.shape) for x in results]
    return torch.stack([x.sum() for x in parts if x.requires_grad]).sum()


def with_gradients(call: CallInputs, function: Callable[[], tuple[Tensor, ...]]) -> list[Tensor]:
    """Results of a function of a call's leaves, and the gradients of a number made of them."""
    leaves = list(call.leaves().values())
    results = function()
    grads = torch.autograd.grad(number(results), leaves, allow_unused=True)
    return [*(x.detach() for x in results), *(g for g in grads if g is not None)]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def small(name: str = "gla", **options: Any) -> CallInputs:
    """A call of few tokens, float32."""
    shape = {"batch": 2, "tokens": 40, "heads": 1, "value_heads": 2} | options
    return make_inputs(SPECS[name], **{"dtype": torch.float32} | shape)


def qkvg() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors of chunk_gla."""
    inputs = small().inputs
    return inputs["q"], inputs["k"], inputs["v"], inputs["g"]
