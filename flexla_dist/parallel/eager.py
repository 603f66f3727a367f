"""Calls that `torch.compile` leaves alone: exchanges of ranks are no part of a traced graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def eager(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`torch.compiler.disable` that imports the compiler only in programs which use it."""
    disabled: Callable[Arguments, Result] | None = None

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
