"""Functions whose decay is a vector: gla and hgrn."""

from __future__ import annotations

from torch import Tensor

from flexla_dist.errors import ArgumentError
from flexla_dist.ops.chunk.common import CallOptions, State, default_scale, require, run


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
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
    """Gated linear attention: `S_t = diag(exp(g_t)) S_{t-1} + k_t v_t'`, `o_t = scale q_t S_t`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: natural-log decays `[B, T, HV, K]`, not positive and without lower bound.
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
        ArgumentError: shapes, dtypes or bounds that do not fit.

    Source: arXiv 2312.06635; arguments of FLA's function of this name.
    """
    call = CallOptions(
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        state_v_first,
        chunk_size,
        executor,
    )
    require("chunk_gla", q=q, k=k, v=v, g=g)
    return run("gla", {"q": q, "k": k, "v": v, "g": g}, call, scale=default_scale(scale, q))


def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """HGRN's elementwise recurrence, `o_t = h_t = exp(g_t) h_{t-1} + x_t`.

    Args:
        x: `[B, T, D]`.
        g: natural-log decays `[B, T, D]`, not positive.
        initial_state: `[N, D]`.
        output_final_state: return the final state.
        cu_seqlens: `[N + 1]` bounds of packed documents; then B = 1.
        chunk_size, executor: as in `flexla_dist.compile`.

    Returns:
        `o` `[B, T, D]` in the dtype of x, and the final state `[N, D]` or None.

    Raises:
        ArgumentError: shapes, dtypes or bounds that do not fit.

    Source: arXiv 2311.04823; arguments of FLA's function of this name, and `cu_seqlens`.
    """
    require("chunk_hgrn", 0, x=x, g=g)
    if initial_state is not None:
        require("chunk_hgrn", 1, initial_state=initial_state)
    if x.ndim != 3 or g.shape != x.shape:
        raise ArgumentError(
            f"chunk_hgrn: expected x [B, T, D] and g of the same shape; "
            f"got x {list(x.shape)}, g {list(g.shape)}"
        )
    call = CallOptions(
        None if initial_state is None else initial_state.unsqueeze(1),
        output_final_state,
        cu_seqlens,
        chunk_size=chunk_size,
        executor=executor,
    )
    o, final = run("hgrn", {"x": x.unsqueeze(2), "g": g.unsqueeze(2)}, call)
    return o.squeeze(2).to(x.dtype), None if final is None else final.squeeze(1)
