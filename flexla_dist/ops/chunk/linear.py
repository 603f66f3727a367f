"""`chunk_linear_attn`: linear attention without decay."""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.ops.chunk.common import CallOptions, State, default_scale, require, run


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """Linear attention, `S_t = S_{t-1} + k_t v_t'`, `o_t = scale q_t S_t`, by default normalised.

    With normalize, `z_t = z_{t-1} + k_t` and `o_t` is divided by `scale q_t z_t + 1e-10`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        scale: default `K ** -0.5`.
        initial_state: `[N, HV, K, V]`; with normalize a tuple with z `[N, 1, HV, K]`, or the first
            alone with z = 0.
        output_final_state: return the final state, in the same form.
        normalize: divide by the sum of weights.
        cu_seqlens: `[N + 1]` bounds of packed documents; then B = 1.
        chunk_size, executor: as in `flexla_dist.compile`.

    Returns:
        `o` `[B, T, HV, V]` in v's dtype, and the final state or None.

    Raises:
        ArgumentError: shapes, dtypes or bounds that do not fit.

    Source: arXiv 2006.16236; arguments of FLA's function of this name.
    """
    require("chunk_linear_attn", q=q, k=k, v=v)
    tensors = {"q": q, "k": k, "v": v}
    scale = default_scale(scale, q)
    if not normalize:
        call = CallOptions(
            initial_state, output_final_state, cu_seqlens, chunk_size=chunk_size, executor=executor
        )
        return run("linear_attn", tensors, call, scale=scale)
    call = CallOptions(
        _with_weights(initial_state),
        output_final_state,
        cu_seqlens,
        chunk_size=chunk_size,
        executor=executor,
    )
    o, final = run("linear_attn_normalized", tensors, call, scale=scale)
    return o, None if final is None else (final[0], final[1].unsqueeze(1))


def _with_weights(initial: State) -> State:
    """The tuple (S, z) as the operator keeps it: z `[N, HV, K]`."""
    if initial is None:
        return None
    if isinstance(initial, Tensor):
        require("chunk_linear_attn", 1, initial_state=initial)
        return initial, torch.zeros_like(initial[..., 0])
    if not isinstance(initial, tuple | list):
        raise ArgumentTypeError(
            f"chunk_linear_attn: initial_state is {type(initial).__name__}; expected a tensor S or "
            "a tuple (S, z)"
        )
    if len(initial) != 2:
        raise ArgumentError(
            f"chunk_linear_attn: initial_state must be (S, z) or S, got {len(initial)} tensors"
        )
    S, z = initial
    require("chunk_linear_attn", 1, **{"the first state": S})
    if z is None:
        return S, torch.zeros_like(S[..., 0])
    require("chunk_linear_attn", 0, **{"the second state": z})
    if z.ndim != 4 or z.shape[1] != 1:
        raise ArgumentError(
            f"chunk_linear_attn: the second state is [N, 1, HV, K], got {list(z.shape)}"
        )
    return S, z.squeeze(1)
