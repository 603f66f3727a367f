"""Calls that the programs for one GPU measure: their shapes, arguments and names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.compiler.aot import describe_call
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import CallInputs, make_inputs
from scaling_runs.implementations import SOFTMAX, FlashQla

CHECKED_HEADS = 2


@dataclass(frozen=True)
class Shape:
    """One call: variant, direction and sizes. HV: heads of the state, where H are groups of them;
    0 where they are the same."""

    variant: str
    direction: str
    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str
    HV: int = 0

    @property
    def heads(self) -> int:
        """Heads of the call; hgrn has one that is H * V wide."""
        return 1 if self.variant == "hgrn" else self.H

    @property
    def value_heads(self) -> int:
        """Heads of the state and the output."""
        return self.HV or self.heads

    @property
    def checked(self) -> int:
        """Heads of the state that are compared with a reference: whole groups."""
        return max(min(CHECKED_HEADS, self.value_heads), self.value_heads // self.heads)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the named dims."""
        return {"K": self.K, "V": self.V, "D": self.H * self.V}


@dataclass(frozen=True)
class Point:
    """The directions of one call, and the implementations that are wanted."""

    shapes: tuple[Shape, ...]
    impls: tuple[str, ...]


Work = dict[Shape, list[str]]  # what to measure: the implementations of each direction of a call


def make_call(shape: Shape, device: str = "cuda") -> CallInputs:
    """Seeded arguments that want gradients; without initial state."""
    variant = "linear_attn" if shape.variant == SOFTMAX else shape.variant
    return make_inputs(
        get_variant(variant),
        batch=shape.B,
        tokens=shape.T,
        heads=shape.heads,
        value_heads=shape.value_heads,
        sizes=shape.sizes,
        dtype=getattr(torch, shape.dtype),
        device=device,
    )


def our_call(shape: Shape) -> tuple[Graphs, Problem]:
    """Our operator's graphs, and a call of that shape without memory."""
    graphs = compile(get_variant(shape.variant)).graphs
    problem = describe_call(
        graphs,
        batch=shape.B,
        tokens=shape.T,
        heads=shape.heads,
        value_heads=shape.value_heads,
        sizes=shape.sizes,
        dtype=getattr(torch, shape.dtype),
    )
    return graphs, problem


def gradient_seed(shape: Shape, call: CallInputs) -> Tensor:
    """A gradient of the output."""
    like = call.inputs["x" if shape.variant == "hgrn" else "v"]
    generator = torch.Generator(like.device).manual_seed(5)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def first_heads(shape: Shape, x: Tensor) -> Tensor:
    """The heads that are compared; of hgrn, the first columns; of inputs of groups, theirs."""
    if shape.variant == "hgrn":
        return x[..., : CHECKED_HEADS * shape.V]
    return x[:, :, : shape.checked * x.shape[2] // shape.value_heads]


def label_of(shape: Shape, name: str) -> str:
    """A shape and an implementation in one line."""
    heads = f"{shape.H}/{shape.HV}" if shape.HV else str(shape.H)
    sizes = f"B={shape.B} T={shape.T} H={heads} D={shape.V}"
    return f"{shape.variant} {shape.direction} {sizes} {name}"


def fits(shape: Shape, name: str) -> bool:
    """Softmax attention is sdpa's, all else is not; FlashQLA has one variant."""
    if name == "flashqla":
        return shape.variant == FlashQla.VARIANT
    return (name == "sdpa") == (shape.variant == SOFTMAX)
