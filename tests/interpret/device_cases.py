"""Inputs of the device functions, easy and hard, and the error measure of their tests."""

import torch
from torch import Tensor

GATES = ("zero", "mild", "middle", "steep", "mixed")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gate(kind: str, *shape: int, seed: int = 7) -> Tensor:
    """Log decays: zero, down to -0.2, -2 or -50, or mostly small with a few near -50.

    So a chunk of 64 tokens is served by one product, or by some levels of halving, or by all.
    """
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    if kind == "zero":
        return torch.zeros(*shape)
    if kind == "mixed":
        return -50 * uniform**8
    return -{"mild": 0.2, "middle": 2.0, "steep": 50.0}[kind] * uniform


def gates(*shape: int) -> Tensor:
    """Every kind of gate, stacked on a first dim: one case a program."""
    return torch.stack([gate(kind, *shape, seed=i) for i, kind in enumerate(GATES)])


def unwritten(*shape: int) -> Tensor:
    """A result that fails wherever the kernel does not write it."""
    return torch.full(shape, float("nan"))


def close(got: Tensor, want: Tensor, bound: float = 1e-6) -> None:
    """AssertionError unless every case is within `bound`, relative to the case's norm."""
    assert got.shape == want.shape
    for case, (x, y) in enumerate(zip(got.double(), want.double(), strict=True)):
        error = (x - y).norm().item()
        size = max(y.norm().item(), 1e-30)
        assert error <= bound * size, f"case {case}: relative error {error / size:.2e}"
