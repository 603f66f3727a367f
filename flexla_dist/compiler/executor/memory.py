"""Memory for the results and workspaces of repeated calls.

Contract: contiguous tensors of a shape and its strides on the current device, not initialised. They
come from where PyTorch's own compiler takes the memory of its kernels, a function without
dispatch: about a third of the host time of `torch.empty`. Callers look the functions up in this
module at every call, so that tests can fill what they return.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, dtype
from torch._C._dynamo import guards

Maker = Callable[[tuple[int, ...], tuple[int, ...], dtype], Tensor]

empty_cpu: Maker = guards._empty_strided_cpu  # type: ignore[attr-defined]
empty_cuda: Maker = guards._empty_strided_cuda  # type: ignore[attr-defined]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
