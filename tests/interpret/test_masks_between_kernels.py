"""Masks that one kernel computes and another reads are masks again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexla_dist
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec import functional as F
from flexla_dist.spec.chunked import run_chunks


def mixed(x: Any) -> Any:
    """A value that is dear enough to wait in memory."""
    return torch.softmax(F.unit_tril_inverse(0.1 * (x.q @ x.k.T).tril()), -1) @ x.v


MASKS = {
    "and": lambda x: torch.where((mixed(x) > 0) & ~(x.v.sigmoid() <= 0.3), mixed(x), 0.5),
    "or": lambda x: torch.where((mixed(x) > 0) | ~(x.v > 0), mixed(x), 0.5),
    "not": lambda x: torch.where(~(mixed(x) > 0), mixed(x), 0.5),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_wait_in_memory(name: str) -> None:
    spec = LinearAttentionSpec(
        name="masked",
        inputs={"q": "C K", "k": "C K", "v": "C V"},
        chunk_mode=lambda x, p: {"q": x.q, "k": x.k, "v": x.v, "out": MASKS[name](x)},
        decay_mode=lambda S, c: S + c.k.T @ c.v,
        merge_mode=lambda S, c: c.q @ S + c.out,
    )
    torch.manual_seed(0)
    inputs = {n: torch.randn(1, 16, 1, 3, requires_grad=True) for n in "qkv"}
    op = flexla_dist.compile(spec, executor="triton", chunk_size=16)
    found = []
    for call in (lambda: op(**inputs)[0], lambda: run_chunks(spec, inputs, chunk_size=16)[0]):
        output = call()
        found.append([output, *torch.autograd.grad(output.square().sum(), list(inputs.values()))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
