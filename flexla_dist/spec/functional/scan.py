"""`decay_scan`: the elementwise linear recurrence inside a chunk, forward and reversed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexla_dist.spec.functional.common import (
    batch_to_front,
    common_dtype,
    compute_dtype,
    expand_batch,
    require,
    to_dtype,
)


def decay_scan(g: Tensor, x: Tensor) -> Tensor:
    """Elementwise recurrence over a chunk, `h[r] = exp(g[r]) h[r-1] + x[r]` with `h[-1] = 0`.

    Pairs of tokens are merged, the half-length recurrence is solved, and the skipped tokens are
    filled in: logarithmic depth, linear work, only products of decays. Right for every g <= 0,
    -inf included.

    Args:
        g: natural-log decays, `[..., C, D]`.
        x: inputs, `[..., C, D]`.

    Returns:
        `h`, `[..., C, D]` in the promoted dtype.

    Raises:
        ArgumentError: shapes that do not fit.

    Source: the recurrence of HGRN (arXiv 2311.04823). Gradients: `dx = decay_scan_reverse(g, dh)`,
    `dg[r] = dx[r] exp(g[r]) h[r-1]`.
    """
    if torch.overrides.has_torch_function((g, x)):
        return torch.overrides.handle_torch_function(decay_scan, (g, x), g, x)
    return _DecayScan.apply(*_operands("decay_scan", g, x))


def decay_scan_reverse(g: Tensor, d: Tensor) -> Tensor:
    """Adjoint of `decay_scan` in x: `e[r] = d[r] + exp(g[r+1]) e[r+1]`, zero beyond the chunk.

    Args:
        g: natural-log decays, `[..., C, D]`; that of the first token is not used.
        d: inputs, `[..., C, D]`.

    Returns:
        `e`, `[..., C, D]` in the promoted dtype.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    if torch.overrides.has_torch_function((g, d)):
        return torch.overrides.handle_torch_function(decay_scan_reverse, (g, d), g, d)
    return _DecayScanReverse.apply(*_operands("decay_scan_reverse", g, d))


def _operands(name: str, g: Tensor, x: Tensor) -> list[Tensor]:
    require(
        min(g.ndim, x.ndim) >= 2 and g.shape[-2:] == x.shape[-2:],
        name,
        "g [..., C, D] and inputs [..., C, D] with one C and one D",
        g=g,
        x=x,
    )
    return expand_batch(name, 2, g=g, x=x)


def _scan(decay: Tensor, x: Tensor) -> Tensor:
    """Odd-even reduction of `h[r] = decay[r] h[r-1] + x[r]` along dim -2."""
    tokens = x.shape[-2]
    if tokens <= 1:
        return x
    paired = tokens - tokens % 2
    decay_odd, x_even = decay[..., 1::2, :], x[..., 0:paired:2, :]
    merged = torch.addcmul(x[..., 1::2, :], decay_odd, x_even)
    odd = _scan(decay_odd * decay[..., 0:paired:2, :], merged)
    h = torch.empty_like(x)
    h[..., 0, :] = x[..., 0, :]
    h[..., 1::2, :] = odd
    later = (tokens - 1) // 2  # even tokens after the first
    h[..., 2::2, :] = torch.addcmul(x[..., 2::2, :], decay[..., 2::2, :], odd[..., :later, :])
    return h


def _forward_scan(g: Tensor, x: Tensor) -> Tensor:
    dtype = common_dtype(g, x)
    g, x = to_dtype(compute_dtype(dtype), g, x)
    return _scan(g.exp(), x).to(dtype) if x.shape[-2] > 1 else x.to(dtype, copy=True)


def _reverse_scan(g: Tensor, d: Tensor) -> Tensor:
    dtype = common_dtype(g, d)
    g, d = to_dtype(compute_dtype(dtype), g, d)
    if d.shape[-2] <= 1:
        return d.to(dtype, copy=True)
    decay = g.exp().roll(-1, -2).flip(-2)  # the wrapped decay meets only the zero beyond the end
    return _scan(decay, d.flip(-2)).flip(-2).to(dtype)


def _shift_later(h: Tensor) -> Tensor:
    """`h[r-1]`, zero at the first token."""
    return torch.nn.functional.pad(h, (0, 0, 1, 0))[..., : h.shape[-2], :]


class _DecayScan(torch.autograd.Function):
    @staticmethod
    def forward(g: Tensor, x: Tensor) -> Tensor:
        return _forward_scan(g, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.dtypes = tuple(value.dtype for value in inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        g, h = ctx.saved_tensors
        dx = decay_scan_reverse(g, grad)
        dg = dx * g.exp() * _shift_later(h)
        return dg.to(ctx.dtypes[0]), dx.to(ctx.dtypes[1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        return decay_scan(*batch_to_front(info.batch_size, in_dims, args)), 0


class _DecayScanReverse(torch.autograd.Function):
    @staticmethod
    def forward(g: Tensor, d: Tensor) -> Tensor:
        return _reverse_scan(g, d)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.dtypes = tuple(value.dtype for value in inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        g, e = ctx.saved_tensors
        dd = decay_scan(g, grad)
        dg = _shift_later(dd) * g.exp() * e
        return dg.to(ctx.dtypes[0]), dd.to(ctx.dtypes[1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        return decay_scan_reverse(*batch_to_front(info.batch_size, in_dims, args)), 0
