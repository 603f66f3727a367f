"""What the functions of this folder share: operators by variant, document bounds, state layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.ops.custom_ops import PUBLISHED
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.ops.op import compile as compile_spec
from flexla_dist.spec.variants import get_variant
from flexla_dist.spec.variants.options import TokenOptions, with_options

_OPTION_NAMES = tuple(field.name for field in fields(TokenOptions))
State = Tensor | tuple[Tensor, ...] | None


def operator(variant: str, options: TokenOptions, chunk_size: int | None) -> LinearAttentionOp:
    """The compiled operator of a variant with these options; compiled once."""
    if torch.compiler.is_compiling():
        plain = tuple(getattr(options, name) for name in _OPTION_NAMES)
        return getattr(PUBLISHED, _publish(variant, plain, chunk_size))
    return _compiled(variant, options, chunk_size)


@torch.compiler.assume_constant_result
def _publish(variant: str, plain: tuple[Any, ...], chunk_size: int | None) -> str:
    """Run by Dynamo, not traced: compiling a spec is no part of a graph.

    Takes plain numbers and strings, because Dynamo gives a dataclass with its defaults instead.
    """
    return PUBLISHED.add(_compiled(variant, TokenOptions(*plain), chunk_size))


@lru_cache(maxsize=128)
def _compiled(variant: str, options: TokenOptions, chunk_size: int | None) -> LinearAttentionOp:
    return compile_spec(with_options(get_variant(variant), options), chunk_size=chunk_size)


@dataclass(frozen=True)
class CallOptions:
    """Arguments that every function takes."""

    initial_state: State = None
    output_final_state: bool = False
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    state_v_first: bool = False
    chunk_size: int | None = None
    executor: str | None = None


def run(
    variant: str,
    tensors: Mapping[str, Tensor],
    call: CallOptions,
    options: TokenOptions | None = None,
    **scalars: float,
) -> tuple[Tensor, Any]:
    """Call a variant's operator, with states turned to `[K, V]` and back."""
    op = operator(variant, options or TokenOptions(), call.chunk_size)
    o, final = op(
        **tensors,
        **scalars,
        initial_state=_turn(call.initial_state, call.state_v_first),
        output_final_state=call.output_final_state,
        cu_seqlens=_bounds(call.cu_seqlens, call.cu_seqlens_cpu),
        executor=call.executor,
    )
    return o, _turn(final, call.state_v_first)


def require(function: str, dims: int = 3, **tensors: object) -> None:
    """Raise unless these are tensors of at least `dims` dims; the operator checks the rest."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{function}: {name} is {type(x).__name__}; expected a tensor")
        if x.ndim < dims:
            raise ArgumentError(
                f"{function}: {name} is {list(x.shape)}; expected at least {dims} dims"
                + (", [B, T, heads, ...]" if dims == 3 else "")
            )


def default_scale(scale: float | None, q: Tensor) -> float:
    """`K ** -0.5` unless given."""
    if scale is not None:
        return scale
    if q.shape[-1] == 0:
        raise ArgumentError(f"q is {list(q.shape)}, K = 0: give scale, which is K ** -0.5 else")
    return q.shape[-1] ** -0.5


def spread(head_decay: Tensor, v: Tensor) -> Tensor:
    """One log decay a head, `[HV]`, as a gate of every token `[B, T, HV]` without copying it."""
    require("a constant decay", 0, g_gamma=head_decay)
    if head_decay.shape != v.shape[2:3]:
        raise ArgumentError(
            f"a constant decay has one number a head: expected [{v.shape[2]}], "
            f"got {list(head_decay.shape)}"
        )
    return head_decay.expand(v.shape[:3])


def refuse(function: str, reason: str, **options: object) -> None:
    """Raise ArgumentError for the first option that is set: neither None nor False."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ArgumentError(f"{function}: {name} is not supported: {reason}")


def _turn(state: Any, v_first: bool) -> Any:
    turns = v_first and isinstance(state, Tensor) and state.ndim > 1
    return state.mT.contiguous() if turns else state


def _bounds(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    if cu_seqlens_cpu is None:
        return cu_seqlens
    if cu_seqlens is None or cu_seqlens.shape != cu_seqlens_cpu.shape:
        raise ArgumentError(
            "cu_seqlens_cpu is the copy of cu_seqlens on the CPU: give both, of one shape"
        )
    return cu_seqlens_cpu
