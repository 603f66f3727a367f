"""What an executor returns from the phases of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class ForwardResult:
    """Output [B, T, HV, V], exit states [N, HV, ...], and what backward needs beside the inputs."""

    output: Tensor
    exit: States
    saved: States


@dataclass(frozen=True)
class Saved:
    """Shape and dtype of one tensor that a forward pass saves.

    Where it follows from an outline alone, rows (the first dim) are as many as any call of that
    outline may save: a call fills the first ones.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Gradients:
    """Gradients by name, each in the dtype of its tensor; `entry` in the compute dtype."""

    inputs: dict[str, Tensor]
    params: dict[str, Tensor]
    entry: States
