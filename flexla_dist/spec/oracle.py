"""Float64 oracle: a spec's token recurrence, run token by token.

Contract: `run_recurrence` uses `spec.recurrence` alone, none of the three callables, so that the
two can be compared. It is vectorised over batch and heads, differentiable by autograd, and slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError, SpecError
from flexla_dist.spec.layout import (
    Layout,
    States,
    document_spans,
    expand_heads,
    named_states,
    ordered_states,
    scalar_values,
)
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.values import Values


def run_recurrence(
    spec: LinearAttentionSpec,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor] | None = None,
    scalars: Mapping[str, float] | None = None,
    initial_state: States | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """Run `spec.recurrence` in float64 over all tokens.

    Inputs are given raw, before `token_mode`: the recurrence stands for the whole variant.

    Args:
        spec: a spec with a `recurrence`.
        inputs: `[B, T, heads, ...]` by name; a head group may have fewer heads than the rest.
        params: per-head parameters `[HV, ...]` by name.
        scalars: run-time numbers by name; those with a default may be left out.
        initial_state: `[N, HV, ...]`, or a tuple of them in declared order, for a log-scaled spec
            followed by m `[N, HV]`; None is zeros.
        output_final_state: return the states after the last token.
        cu_seqlens: `[N + 1]` document bounds; then B = 1.

    Returns:
        The output `[B, T, HV, ...]` and the final state (or None), both float64. The states of a
        log-scaled spec are true ones, with m = 0.

    Raises:
        SpecError: the spec has no recurrence.
        ArgumentError: names or shapes that do not fit.
    """
    if spec.recurrence is None:
        raise SpecError(f"{spec.name}: no recurrence was given, so there is no oracle")
    layout = Layout.of(spec, inputs, params or {}, cu_seqlens)
    numbers = scalar_values(spec, scalars or {})
    tokens = {name: expand_heads(x.double(), layout.heads) for name, x in inputs.items()}
    weights = {name: x.double() for name, x in (params or {}).items()}
    p = Values({**weights, **numbers}, "parameter")
    start = _true_states(spec, layout, initial_state)
    outputs, finals = [], []
    for batch, document, begin, end in document_spans(layout, cu_seqlens):
        span = {name: x[batch, begin:end] for name, x in tokens.items()}
        state = {name: x[document] for name, x in start.items()}
        output, state = _run_span(spec, span, p, state, end - begin)
        outputs.append(output)
        finals.append(state)
    output = torch.cat(outputs, 1) if layout.packed else torch.cat(outputs, 0)
    if not output_final_state:
        return output, None
    return output, _final_states(spec, finals)


def _run_span(
    spec: LinearAttentionSpec, span: dict[str, Tensor], p: Values, state: dict[str, Tensor], n: int
) -> tuple[Tensor, dict[str, Tensor]]:
    steps = {name: x.unbind(1) for name, x in span.items()}
    outputs = []
    for t in range(n):
        x = Values({name: values[t] for name, values in steps.items()}, "input")
        entering: Any = state["S"] if spec.single_state else Values(state, "state")
        assert spec.recurrence is not None
        leaving, out = spec.recurrence(entering, x, p)
        state = {"S": leaving} if spec.single_state else dict(leaving)
        outputs.append(out)
    if not outputs:
        return _no_tokens(spec, span), state
    return torch.stack(outputs, 1), state


def _no_tokens(spec: LinearAttentionSpec, span: dict[str, Tensor]) -> Tensor:
    sizes: dict[str, int] = {}
    for name, item in spec.input_specs.items():
        sizes.update(zip(item.dims[1:], span[name].shape[3:], strict=True))
    first = next(iter(span.values()))
    return first.new_zeros(*first.shape[:3], *(sizes[dim] for dim in spec.output_dims[1:]))


def _true_states(
    spec: LinearAttentionSpec, layout: Layout, initial: States | None
) -> dict[str, Tensor]:
    states = named_states(spec, layout, initial, torch.float64)
    if spec.log_scaled is None:
        return states
    scale = states.pop("m").exp()
    return {
        name: x * scale.reshape(*scale.shape, *(1,) * (x.ndim - 2)) for name, x in states.items()
    }


def _final_states(spec: LinearAttentionSpec, finals: list[dict[str, Tensor]]) -> States:
    states = {name: torch.cat([final[name] for final in finals]) for name in spec.state_dims}
    if spec.log_scaled is not None:
        first = next(iter(states.values()))
        states["m"] = first.new_zeros(first.shape[:2])
    return ordered_states(states)


def true_states(spec: LinearAttentionSpec, states: States) -> tuple[Tensor, ...]:
    """States free of the choice of log scale, for comparisons: `exp(m) * S~` if log-scaled."""
    values = states if isinstance(states, tuple) else (states,)
    if spec.log_scaled is None:
        return values
    expected = len(spec.state_dims) + 1
    if len(values) != expected:
        raise ArgumentError(
            f"{spec.name}: expected {expected} states with m last, got {len(values)}"
        )
    *scaled, m = values
    return tuple(x * m.exp().reshape(*m.shape, *(1,) * (x.ndim - 2)) for x in scaled)
