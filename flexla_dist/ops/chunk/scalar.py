"""Functions whose decay is one number a head: simple_gla, retention, lightning, Mamba2."""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError
from flexla_dist.ops.chunk.common import CallOptions, State, default_scale, require, run, spread
from flexla_dist.spec.variants import lightning, retention


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """Gated linear attention, one decay a head.

    `S_t = exp(g_t) S_{t-1} + k_t v_t'`, `o_t = scale q_t S_t`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: natural-log decays `[B, T, HV]`, not positive.
        g_gamma: constant log decays `[HV]` instead of g; without either there is no decay.
        scale: default `K ** -0.5`.
        initial_state: `[N, HV, K, V]`.
        output_final_state: return the final state.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]` bounds of packed documents; then B = 1.
        cu_seqlens_cpu: the same on the CPU, which saves a synchronisation.
        chunk_size, executor: as in `flexla_dist.compile`.

    Returns:
        `o` `[B, T, HV, V]` in v's dtype, and the final state or None.

    Raises:
        ArgumentError: g and g_gamma both given; shapes, dtypes or bounds that do not fit.

    Source: the recurrence of Mamba2, arXiv 2405.21060; arguments of FLA's function of this name.
    """
    if g is not None and g_gamma is not None:
        raise ArgumentError("chunk_simple_gla: give g or g_gamma, not both")
    require("chunk_simple_gla", q=q, k=k, v=v)
    call = CallOptions(
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        state_v_first,
        chunk_size,
        executor,
    )
    tensors = {"q": q, "k": k, "v": v}
    scale = default_scale(scale, q)
    if g is None and g_gamma is None:
        return run("linear_attn", tensors, call, scale=scale)
    gate = spread(g_gamma, v) if g_gamma is not None else g
    assert gate is not None
    return run("simple_gla", {**tensors, "g": gate}, call, scale=scale)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """RetNet's retention: `chunk_simple_gla` with the constant decay `1 - 2^(-5-h)` of head h.

    Arguments, returns and errors as in `chunk_simple_gla`. Source: arXiv 2307.08621.
    """
    require("chunk_retention", q=q, k=k, v=v)
    decay = retention.head_decay(v.shape[2], v.device).to(_gate_dtype(v))
    call = CallOptions(
        initial_state, output_final_state, cu_seqlens, chunk_size=chunk_size, executor=executor
    )
    tensors = {"q": q, "k": k, "v": v, "g": spread(decay, v)}
    return run("retention", tensors, call, scale=default_scale(scale, q))


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """Lightning Attention: `chunk_simple_gla` with a constant decay by head and layer.

    The log decay of head h is `-(8 h / HV) (1 - layer_idx / num_layers)`.
    Arguments, returns and errors as in `chunk_simple_gla`. Source: arXiv 2405.17381.
    """
    require("chunk_lightning_attn", q=q, k=k, v=v)
    decay = lightning.head_decay(v.shape[2], layer_idx, num_layers, v.device)
    call = CallOptions(
        initial_state, output_final_state, cu_seqlens, chunk_size=chunk_size, executor=executor
    )
    tensors = {"q": q, "k": k, "v": v, "g": spread(decay.to(_gate_dtype(v)), v)}
    return run("lightning", tensors, call, scale=default_scale(scale, q))


def chunk_mamba2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """Mamba2's layer from the raw step: `d_t = softplus(dt_t + dt_bias)`, `o_t = q_t S_t + D v_t`.

    `S_t = exp(-exp(A_log) d_t) S_{t-1} + d_t k_t v_t'`; Mamba2 calls q C, k B and v x.

    Args:
        q, k: `[B, T, H, K]`; H is Mamba2's number of groups.
        v: `[B, T, HV, V]`.
        dt: raw steps `[B, T, HV]`.
        A_log: `[HV]`.
        dt_bias, D: `[HV]`, default 0.
        initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, chunk_size, executor: as in
            `chunk_simple_gla`.

    Returns:
        `o` `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` or None.

    Raises:
        ArgumentError: shapes, dtypes or bounds that do not fit.

    Source: arXiv 2405.21060.
    """
    call = CallOptions(
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        chunk_size=chunk_size,
        executor=executor,
    )
    require("chunk_mamba2", q=q, k=k, v=v, dt=dt)
    require("chunk_mamba2", 0, A_log=A_log)
    zero = torch.zeros_like(A_log, requires_grad=False)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "dt": dt,
        "A_log": A_log,
        "dt_bias": zero if dt_bias is None else dt_bias,
        "D": zero if D is None else D,
    }
    return run("mamba2", tensors, call)


def _gate_dtype(v: Tensor) -> torch.dtype:
    return torch.float64 if v.dtype == torch.float64 else torch.float32
