"""Operators on single entries: arithmetic, functions, comparisons, selection."""

from __future__ import annotations

import torch
import torch.nn.functional as tnf
from torch import Tensor

from flexla_dist.compiler.ir.operators import dims as rules
from flexla_dist.compiler.ir.operators.registry import Number, operator


@operator("elementwise", rules.elementwise, linear=(0, 1))
def add(a: Tensor, b: Tensor | Number) -> Tensor:
    """a + b."""
    return a + b


@operator("elementwise", rules.elementwise, linear=(0, 1))
def sub(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a - b."""
    return a - b  # type: ignore[return-value]


@operator("elementwise", rules.elementwise, linear=(0, 1))
def mul(a: Tensor, b: Tensor | Number) -> Tensor:
    """a * b."""
    return a * b


@operator("elementwise", rules.elementwise, linear=(0,))
def div(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a / b."""
    return a / b  # type: ignore[return-value]


@operator("elementwise", rules.elementwise)
def maximum(a: Tensor, b: Tensor | Number) -> Tensor:
    """The larger of two values; the gradient goes to the first on ties."""
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp_min(b)


@operator("elementwise", rules.elementwise)
def minimum(a: Tensor, b: Tensor | Number) -> Tensor:
    """The smaller of two values; the gradient goes to the first on ties."""
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp_max(b)


@operator("elementwise", rules.same)
def power(x: Tensor, *, exponent: float) -> Tensor:
    """x to a constant power."""
    return x**exponent


@operator("elementwise", rules.same, linear=(0,))
def neg(x: Tensor) -> Tensor:
    """-x."""
    return -x


@operator("elementwise", rules.same)
def exp(x: Tensor) -> Tensor:
    """e to the x."""
    return torch.exp(x)


@operator("elementwise", rules.same)
def expm1(x: Tensor) -> Tensor:
    """e to the x, less one, exact near zero."""
    return torch.expm1(x)


@operator("elementwise", rules.same)
def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return torch.log(x)


@operator("elementwise", rules.same)
def log1p(x: Tensor) -> Tensor:
    """log(1 + x)."""
    return torch.log1p(x)


@operator("elementwise", rules.same)
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return torch.sigmoid(x)


@operator("elementwise", rules.same)
def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), a log-decay."""
    return tnf.logsigmoid(x)


@operator("elementwise", rules.same)
def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return tnf.softplus(x)


@operator("elementwise", rules.same)
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return torch.tanh(x)


@operator("elementwise", rules.same)
def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return torch.sqrt(x)


@operator("elementwise", rules.same)
def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return torch.rsqrt(x)


@operator("elementwise", rules.same)
def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return torch.abs(x)


@operator("elementwise", rules.same)
def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; no gradient."""
    return torch.sign(x)


@operator("elementwise", rules.same)
def sin(x: Tensor) -> Tensor:
    """Sine."""
    return torch.sin(x)


@operator("elementwise", rules.same)
def cos(x: Tensor) -> Tensor:
    """Cosine."""
    return torch.cos(x)


@operator("elementwise", rules.same)
def stop_gradient(x: Tensor) -> Tensor:
    """x, seen as a constant by differentiation."""
    return x


# -- masks ----------------------------------------------------------------------------------------


@operator("mask", rules.elementwise)
def greater_equal(a: Tensor, b: Tensor | Number) -> Tensor:
    """a >= b."""
    return a >= b


@operator("mask", rules.elementwise)
def greater(a: Tensor, b: Tensor | Number) -> Tensor:
    """a > b."""
    return a > b


@operator("mask", rules.elementwise)
def equal(a: Tensor, b: Tensor | Number) -> Tensor:
    """a == b."""
    return a == b


@operator("mask", rules.same)
def logical_not(a: Tensor) -> Tensor:
    """not a."""
    return torch.logical_not(a)


@operator("mask", rules.elementwise)
def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """a and b."""
    return torch.logical_and(a, b)


@operator("mask", rules.elementwise)
def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """a or b."""
    return torch.logical_or(a, b)


@operator("elementwise", rules.elementwise, linear=(1, 2))
def where(mask: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """a where the mask holds, else b; a selection, so NaN in the other branch does not leak."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = torch.full((), a, dtype=torch.get_default_dtype(), device=mask.device)
    return torch.where(mask, a, b)
