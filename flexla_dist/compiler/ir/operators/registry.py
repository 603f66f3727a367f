"""What the compiler knows of an operator, and the table of all of them.

Contract: `operator` registers the function it decorates; nothing here knows a particular operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexla_dist.shapes import UNIT_DIM, Dims

DimsRule = Callable[..., Dims]
Number = int | float


class ShapeRuleError(ValueError):
    """Operands do not fit the operator; the tracer adds stage and source line."""


@dataclass(frozen=True)
class Sizes:
    """Run-time sizes of the named dims with the device and dtype of constants."""

    dims: Mapping[str, int]
    device: torch.device
    dtype: torch.dtype

    def of(self, dims: Dims) -> tuple[int, ...]:
        """Sizes of `dims`; the dim `1` has size one."""
        return tuple(1 if dim == UNIT_DIM else self.dims[dim] for dim in dims)


@dataclass(frozen=True)
class Operator:
    """What the compiler knows of one operator, keyed by the function that computes it."""

    name: str
    kind: str  # elementwise | reduce | shape | contract | mask | domain | source | cast
    dims: DimsRule
    linear: tuple[int, ...] = ()  # operands in which the result is linear, each alone


OPERATORS: dict[Callable[..., Any], Operator] = {}


def operator(kind: str, dims: DimsRule, linear: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Register the decorated function as an operator of the graphs."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[fn] = Operator(fn.__name__, kind, dims, linear)
        return fn

    return register
