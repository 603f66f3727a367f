"""The three callables of every spec against its own token recurrence, forward and backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError, ArgumentTypeError, SpecError
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec.chunked import run_chunks
from flexla_dist.spec.oracle import run_recurrence, true_states
from flexla_dist.spec.variants import get_variant, variant_names
from flexla_dist.testing.inputs import CallInputs, make_inputs

from .extra_specs import EXTRA_SPECS

SPECS = {**{name: get_variant(name) for name in variant_names()}, **EXTRA_SPECS}


def evaluate(run, spec: LinearAttentionSpec, call: CallInputs, **options):  # type: ignore[no-untyped-def]
    out, state = run(
        spec, call.inputs, call.params, call.scalars, call.initial_state,
        cu_seqlens=call.cu_seqlens, **options,
    )  # fmt: skip
    return out, true_states(spec, state)


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-12)).item()


def gradients(out: Tensor, states: tuple[Tensor, ...], call: CallInputs) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in (out, *states)
    )
    leaves = call.leaves()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


@pytest.mark.parametrize("name", SPECS)
def test_chunks_equal_the_recurrence(name: str) -> None:
    spec = SPECS[name]
    call = make_inputs(spec, tokens=37)
    want, want_states = evaluate(run_recurrence, spec, call)
    want_gradients = gradients(want, want_states, call)
    for chunk_size in (1, 5, 16, 64):
        got, states = evaluate(run_chunks, spec, call, chunk_size=chunk_size)
        assert error(got, want) < 1e-12
        for a, b in zip(states, want_states, strict=True):
            assert error(a, b) < 1e-12
        for leaf, g in gradients(got, states, call).items():
            assert error(g, want_gradients[leaf]) < 1e-11, (chunk_size, leaf)


@pytest.mark.parametrize("name", SPECS)
def test_packed_documents_equal_separate_calls(name: str) -> None:
    spec = SPECS[name]
    bounds = torch.tensor([0, 3, 3, 20, 21])
    call = make_inputs(spec, batch=1, tokens=21, cu_seqlens=bounds)
    for run, options in ((run_recurrence, {}), (run_chunks, {"chunk_size": 8})):
        out, states = evaluate(run, spec, call, **options)
        for n, (begin, end) in enumerate(pairwise(bounds.tolist())):
            initial = call.initial_state
            alone = CallInputs(
                {key: x[:, begin:end] for key, x in call.inputs.items()},
                call.params,
                call.scalars,
                tuple(x[n : n + 1] for x in initial)
                if isinstance(initial, tuple)
                else initial[n : n + 1],
            )
            one, one_states = evaluate(run, spec, alone, **options)
            assert torch.equal(out[:, begin:end], one)
            for a, b in zip(states, one_states, strict=True):
                assert torch.equal(a[n : n + 1], b)


@pytest.mark.parametrize("bias", [-80.0, 80.0])
def test_mlstm_with_extreme_input_gates(bias: float) -> None:
    spec = EXTRA_SPECS["mlstm"]
    call = make_inputs(spec, tokens=23)
    with torch.no_grad():
        call.inputs["i"][:, 4:15] += bias
    want, _ = evaluate(run_recurrence, spec, call)
    for chunk_size in (1, 5, 16):
        got, states = evaluate(run_chunks, spec, call, chunk_size=chunk_size)
        assert error(got, want) < 1e-12
        for g in gradients(got, states, call).values():
            assert g.isfinite().all()


@pytest.mark.parametrize("name", SPECS)
def test_float32_chunks_stay_close_to_the_oracle(name: str) -> None:
    spec = SPECS[name]
    call = make_inputs(spec, tokens=70, requires_grad=False)
    want, _ = evaluate(run_recurrence, spec, call)
    got, _ = evaluate(run_chunks, spec, call.to(torch.float32), chunk_size=64)
    assert got.dtype == torch.float32
    assert error(got.double(), want) < 1e-5


def test_zero_state_by_default_and_no_state_on_request() -> None:
    spec = SPECS["gla"]
    call = make_inputs(spec, tokens=9)
    zero = torch.zeros_like(call.initial_state)  # type: ignore[arg-type]
    for run in (run_recurrence, run_chunks):
        given = run(spec, call.inputs, call.params, call.scalars, zero)
        out, state = run(spec, call.inputs, {}, call.scalars, output_final_state=False)
        assert torch.equal(out, given[0]) and state is None


def test_clear_errors() -> None:
    spec = SPECS["gla"]
    call = make_inputs(spec, tokens=4)
    with pytest.raises(ArgumentError, match="scalar 'scale' has no default"):
        run_recurrence(spec, call.inputs)
    with pytest.raises(ArgumentError, match="input g missing"):
        run_chunks(spec, {k: x for k, x in call.inputs.items() if k != "g"}, {}, call.scalars)
    with pytest.raises(ArgumentError, match="no input named 'gg'"):
        run_chunks(spec, {**call.inputs, "gg": call.inputs["g"]}, {}, call.scalars)
    with pytest.raises(ArgumentError, match="'g' has K = 7, elsewhere K = 8"):
        run_chunks(spec, {**call.inputs, "g": call.inputs["g"][..., :7]}, {}, call.scalars)
    with pytest.raises(ArgumentError, match="cu_seqlens means B = 1"):
        run_chunks(spec, call.inputs, {}, call.scalars, cu_seqlens=torch.tensor([0, 4]))
    bare = LinearAttentionSpec(
        "bare", {"x": "C V"}, lambda x, p: {}, lambda S, c: S, lambda S, c: S, state="V"
    )
    with pytest.raises(SpecError, match="no recurrence"):
        run_recurrence(bare, {"x": call.inputs["v"]})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool], ids=str)
def test_states_are_of_a_floating_type(dtype: torch.dtype) -> None:
    spec = get_variant("gla")
    call = make_inputs(spec, batch=1, tokens=4, heads=1, value_heads=1, sizes={"K": 2, "V": 3})
    state = torch.zeros(1, 1, 2, 3, dtype=dtype)
    for run in (run_chunks, run_recurrence):
        with pytest.raises(ArgumentTypeError, match="initial state 'S' has dtype"):
            run(spec, call.inputs, call.params, call.scalars, state)
