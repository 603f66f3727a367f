"""Uninitialised memory filled with NaN, so that a test sees whoever reads it before writing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flexla_dist.compiler.executor import memory

PACKAGE = "flexla_dist"


def _poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = function(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        ours = caller == PACKAGE or caller.startswith(PACKAGE + ".")
        if ours and (tensor.is_floating_point() or tensor.is_complex()):
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return allocate


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, floating-point results of `torch.empty`, `torch.empty_like`,
    `torch.empty_strided`, `Tensor.new_empty`, `Tensor.new_empty_strided` and the functions of
    `flexla_dist.compiler.executor.memory` called from modules of this package hold NaN."""
    places: list[tuple[Any, str]] = [
        (torch, name) for name in ("empty", "empty_like", "empty_strided")
    ]
    places += [(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")]
    places += [(memory, name) for name in ("empty_cpu", "empty_cuda")]
    originals = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, original in originals:
        setattr(place, name, _poisoned(original))
    try:
        yield
    finally:
        for place, name, original in originals:
            setattr(place, name, original)
