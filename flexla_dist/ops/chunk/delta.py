"""Functions of the delta rule: delta_rule, gated_delta_rule, kda."""

from __future__ import annotations

from torch import Tensor

from flexla_dist.errors import ArgumentError
from flexla_dist.ops.chunk.common import CallOptions, State, default_scale, refuse, require, run
from flexla_dist.spec.variants.options import TokenOptions

OVER_RANKS = (
    "a sequence over ranks is the work of flexla_dist.parallel: wrap the layer in "
    "SequenceParallelLA, or the operator in SequenceParallelOp"
)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """DeltaNet: `S_t = S_{t-1} + beta_t k_t (v_t - k_t S_{t-1})'`, `o_t = scale q_t S_t`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        beta: writing strengths `[B, T, HV]`, in [0, 1] or [0, 2].
        scale: default `K ** -0.5`.
        initial_state: `[N, HV, K, V]`.
        output_final_state: return the final state.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(|x|^2 + 1e-6)` first.
        cu_seqlens: `[N + 1]` bounds of packed documents; then B = 1.
        cu_seqlens_cpu: the same on the CPU, which saves a synchronisation.
        chunk_size, executor: as in `flexla_dist.compile`.

    Returns:
        `o` `[B, T, HV, V]` in v's dtype, and the final state or None.

    Raises:
        ArgumentError: shapes, dtypes or bounds that do not fit.

    Source: arXiv 2406.06484; arguments of FLA's function of this name.
    """
    call = CallOptions(
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        chunk_size=chunk_size,
        executor=executor,
    )
    require("chunk_delta_rule", q=q, k=k, v=v, beta=beta)
    options = TokenOptions(unit_qk=use_qk_l2norm_in_kernel)
    tensors = {"q": q, "k": k, "v": v, "beta": beta}
    return run("delta_rule", tensors, call, options, scale=default_scale(scale, q))


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """Gated DeltaNet: the delta rule with one decay a head.

    `R = exp(g_t) S_{t-1}`, `S_t = R + beta_t k_t (v_t - k_t R)'`, `o_t = scale q_t S_t`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: natural-log decays `[B, T, HV]`, not positive; raw with use_gate_in_kernel.
        beta: writing strengths `[B, T, HV]`; raw with use_beta_sigmoid_in_kernel.
        scale: default `K ** -0.5`.
        initial_state: `[N, HV, K, V]`.
        output_final_state: return the final state.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(|x|^2 + 1e-6)` first.
        use_beta_sigmoid_in_kernel: beta becomes `sigmoid(beta)`, doubled with allow_neg_eigval.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]` bounds of packed documents; then B = 1.
        cu_seqlens_cpu: the same on the CPU, which saves a synchronisation.
        chunk_indices: refused; they are found from cu_seqlens.
        cp_context: refused; a sequence over ranks is SequenceParallelLA's or SequenceParallelOp's.
        use_gate_in_kernel: g becomes `-exp(A_log) softplus(g + dt_bias)`.
        A_log, dt_bias: `[HV]`, for use_gate_in_kernel; dt_bias may be left out.
        chunk_size, executor: as in `flexla_dist.compile`.

    Returns:
        `o` `[B, T, HV, V]` in v's dtype, and the final state or None.

    Raises:
        ArgumentError: options that contradict each other or are not supported; shapes, dtypes or
            bounds that do not fit.

    Source: arXiv 2412.06464; arguments of FLA's function of this name, without context parallelism.
    """
    name = "chunk_gated_delta_rule"
    require(name, q=q, k=k, v=v, g=g, beta=beta)
    refuse(name, "chunks are found from cu_seqlens; leave it out", chunk_indices=chunk_indices)
    refuse(name, OVER_RANKS, cp_context=cp_context)
    call = CallOptions(
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        state_v_first,
        chunk_size,
        executor,
    )
    options, extra = _token_options(
        name,
        unit_qk=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        raw_gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **extra}
    return run("gated_delta_rule", tensors, call, options, scale=default_scale(scale, q))


chunk_gdn = chunk_gated_delta_rule


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    executor: str | None = None,
) -> tuple[Tensor, State]:
    """Kimi Delta Attention: the gated delta rule with one decay a key dim.

    `R = diag(exp(g_t)) S_{t-1}`, `S_t = R + beta_t k_t (v_t - k_t R)'`, `o_t = scale q_t S_t`.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: natural-log decays `[B, T, HV, K]`, not positive; raw with use_gate_in_kernel.
        beta: writing strengths `[B, T, HV]`; raw with use_beta_sigmoid_in_kernel.
        scale: default `K ** -0.5`.
        initial_state: `[N, HV, K, V]`.
        output_final_state: return the final state.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(|x|^2 + 1e-6)` first.
        use_gate_in_kernel: g becomes `-exp(A_log) softplus(g + dt_bias)`, or with lower_bound
            `lower_bound sigmoid(exp(A_log) (g + dt_bias))`.
        use_beta_sigmoid_in_kernel: beta becomes `sigmoid(beta)`, doubled with allow_neg_eigval.
        safe_gate: promises that g is at least lower_bound. The scores are exact for any gate, so
            nothing changes but the check that lower_bound is in [-5, 0).
        lower_bound: see use_gate_in_kernel.
        disable_recompute, return_intermediate_states, use_graph, max_num_seqs: refused when set.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]` bounds of packed documents; then B = 1.
        cu_seqlens_cpu: the same on the CPU, which saves a synchronisation.
        cp_context: refused; a sequence over ranks is SequenceParallelLA's or SequenceParallelOp's.
        A_log: `[HV]`, for use_gate_in_kernel; with lower_bound it may be left out.
        dt_bias: `[HV * K]` or `[HV, K]`, for use_gate_in_kernel; may be left out.
        chunk_size, executor: as in `flexla_dist.compile`.

    Returns:
        `o` `[B, T, HV, V]` in v's dtype, and the final state or None.

    Raises:
        ArgumentError: options that contradict each other or are not supported; shapes, dtypes or
            bounds that do not fit.

    Source: arXiv 2510.26692; arguments of FLA's function of this name, without context parallelism.
    """
    name = "chunk_kda"
    require(name, q=q, k=k, v=v, g=g, beta=beta)
    refuse(name, OVER_RANKS, cp_context=cp_context)
    refuse(
        name,
        "chunk values are recomputed in backward; leave it out",
        disable_recompute=disable_recompute,
    )
    refuse(
        name,
        "only the final state is returned; split the sequence to see states between",
        return_intermediate_states=return_intermediate_states,
    )
    refuse(
        name,
        "wrap the call in torch.cuda.graph instead",
        use_graph=use_graph,
        max_num_seqs=max_num_seqs,
    )
    if safe_gate and use_gate_in_kernel and not (lower_bound is not None and -5 <= lower_bound < 0):
        raise ArgumentError(
            f"{name}: safe_gate with use_gate_in_kernel needs lower_bound in [-5, 0), "
            f"got {lower_bound}"
        )
    call = CallOptions(
        initial_state,
        output_final_state,
        cu_seqlens,
        cu_seqlens_cpu,
        state_v_first,
        chunk_size,
        executor,
    )
    options, extra = _token_options(
        name,
        unit_qk=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        raw_gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=_by_head(name, dt_bias, g),
        lower_bound=lower_bound,
    )
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **extra}
    return run("kda", tensors, call, options, scale=default_scale(scale, q))


def _by_head(name: str, dt_bias: Tensor | None, g: Tensor) -> Tensor | None:
    """The bias `[HV * K]` as `[HV, K]`."""
    if dt_bias is None:
        return None
    require(name, 0, dt_bias=dt_bias)
    if g.ndim != 4 or dt_bias.numel() != g.shape[2] * g.shape[3]:
        raise ArgumentError(
            f"{name}: expected dt_bias [HV * K] or [HV, K] and g [B, T, HV, K]; "
            f"got dt_bias {list(dt_bias.shape)}, g {list(g.shape)}"
        )
    return dt_bias.reshape(g.shape[2:])


def _token_options(
    name: str,
    *,
    unit_qk: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    raw_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
) -> tuple[TokenOptions, dict[str, Tensor]]:
    """The token options, and the parameters that a raw gate needs."""
    if neg_eigval and not beta_sigmoid:
        raise ArgumentError(f"{name}: allow_neg_eigval needs use_beta_sigmoid_in_kernel=True")
    params = {"A_log": A_log, "dt_bias": dt_bias}
    extra = {key: x for key, x in params.items() if x is not None}
    if extra and not raw_gate:
        raise ArgumentError(
            f"{name}: {', '.join(extra)} have an effect only with use_gate_in_kernel=True"
        )
    options = TokenOptions(
        unit_qk=unit_qk,
        beta_range=0 if not beta_sigmoid else 2 if neg_eigval else 1,
        gate="given" if not raw_gate else "softplus" if lower_bound is None else "bounded",
        has_scale=A_log is not None or not raw_gate,
        has_bias=dt_bias is not None or not raw_gate,
        lower_bound=float(lower_bound) if raw_gate and lower_bound is not None else None,
    )
    return options, extra
