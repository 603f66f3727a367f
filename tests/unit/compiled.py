"""Compiled operators beside the float64 oracle, for tests of the compiler and the executor."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexla_dist.compiler.pipeline import Graphs, compile_graphs
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec.oracle import run_recurrence, true_states
from flexla_dist.spec.variants import get_variant, variant_names
from flexla_dist.testing.budget import ErrorReport, measure
from flexla_dist.testing.inputs import CallInputs

from .extra_specs import EXTRA_SPECS

SPECS = {**{name: get_variant(name) for name in variant_names()}, **EXTRA_SPECS}
DISTINCT = [name for name in SPECS if name not in ("retention", "lightning")]  # simple_gla's graph


@functools.cache
def graphs_of(name: str) -> Graphs:
    return compile_graphs(SPECS[name])


@functools.cache
def op_of(name: str, chunk_size: int | None = None) -> LinearAttentionOp:
    return LinearAttentionOp(graphs_of(name), None, chunk_size)


def call_op(op: LinearAttentionOp, call: CallInputs, **options: Any) -> Any:
    """The operator on a call, with its initial state and the final one asked for."""
    return op(
        **call.inputs,
        **call.params,
        **call.scalars,
        initial_state=call.initial_state,
        output_final_state=True,
        cu_seqlens=call.cu_seqlens,
        **options,
    )


def call_oracle(spec: LinearAttentionSpec, call: CallInputs) -> Any:
    return run_recurrence(
        spec, call.inputs, call.params, call.scalars, call.initial_state, True, call.cu_seqlens
    )


def gradients(
    spec: LinearAttentionSpec, call: CallInputs, output: Tensor, states: Any
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """True states, and the gradients of one random number made of output and states."""
    states = true_states(spec, states)
    generator = torch.Generator().manual_seed(11)
    loss = output.new_zeros((), dtype=torch.float64)
    for x in (output, *states):
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        loss = loss + (x.double() * weight).sum()
    leaves = call.leaves()
    if not leaves:
        return states, {}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return states, {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), found, strict=True)
    }


def results(
    spec: LinearAttentionSpec, call: CallInputs, output: Tensor, state: Any
) -> dict[str, Tensor]:
    """Everything that a call computes, by name: o, state<i>, d<leaf>."""
    states, grads = gradients(spec, call, output, state)
    named = {"o": output, **{f"state{i}": x for i, x in enumerate(states)}}
    return {**named, **{f"d{name}": g for name, g in grads.items()}}


def token_dim(name: str, call: CallInputs) -> int | None:
    """The dim of tokens of a result, if it has one."""
    return 1 if name == "o" or name[1:] in call.inputs else None


def compare(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], call: CallInputs
) -> dict[str, ErrorReport]:
    assert got.keys() == want.keys()
    return {name: measure(got[name], want[name], dim=token_dim(name, call)) for name in want}


def errors(op: LinearAttentionOp, call: CallInputs, exact: CallInputs | None = None) -> Any:
    """Errors of every result against the oracle, which sees `exact` (default the same call)."""
    exact = exact or call
    got = results(op.spec, call, *call_op(op, call))
    want = results(op.spec, exact, *call_oracle(op.spec, exact))
    return compare(got, want, call)
