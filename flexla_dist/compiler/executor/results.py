"""What an executor returns from the phases of a call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class ForwardResult:
    """Output [B, T, HV, V], exit states [N, HV, ...], and what backward needs beside the inputs."""

    output: Tensor
    exit: States
    saved: States


@dataclass(frozen=True)
class Gradients:
    """Gradients by name, each in the dtype of its tensor; `entry` in the compute dtype."""

    inputs: dict[str, Tensor]
    params: dict[str, Tensor]
    entry: States
