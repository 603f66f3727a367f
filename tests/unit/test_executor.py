"""The torch executor against the float64 token recurrence: forward and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import Chunk
from flexla_dist.compiler.executor.scan import log_scale_scan
from flexla_dist.spec.oracle import true_states
from flexla_dist.testing.budget import BOUNDS, check
from flexla_dist.testing.inputs import CallInputs, make_inputs

from .compiled import (
    DISTINCT,
    SPECS,
    call_op,
    call_oracle,
    op_of,
    results,
    token_dim,
)

TIGHT = 1e-11  # float64 results are expected near 1e-14; the promise is 1e-9
LENGTHS = (0, 1, 15, 63, 64, 65, 200)
GATED = [n for n in DISTINCT if any(i.log_decay for i in SPECS[n].input_specs.values())]


def verify(
    name: str,
    call: CallInputs,
    chunk_size: int | None = None,
    exact: CallInputs | None = None,
    bound: float | None = None,
) -> None:
    """Output, states and gradients of a call within the bounds of its dtype."""
    spec, op = SPECS[name], op_of(name, chunk_size)
    exact = exact or call
    got = results(spec, call, *call_op(op, call))
    want = results(spec, exact, *call_oracle(spec, exact))
    dtype = next(iter(call.inputs.values())).dtype
    for key, expected in want.items():
        limit = bound or (TIGHT if dtype == torch.float64 else BOUNDS[dtype].of(key))
        dim = token_dim(key, call)
        check(f"{name} {key}", got[key], expected, limit, dim=dim, chunk=op.last_plan.chunk_size)


def packed(*offsets: int) -> dict[str, Any]:
    return {"batch": 1, "tokens": offsets[-1], "cu_seqlens": torch.tensor(offsets)}


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_any_length(name: str) -> None:
    for at, tokens in enumerate(LENGTHS):
        verify(name, make_inputs(SPECS[name], tokens=tokens, batch=1 + at % 3, seed=at))


@pytest.mark.parametrize("name", DISTINCT)
def test_a_thousand_tokens(name: str) -> None:
    verify(name, make_inputs(SPECS[name], tokens=1000, batch=1, heads=1, value_heads=2))


@pytest.mark.parametrize("name", DISTINCT)
def test_any_chunk_size(name: str) -> None:
    call = make_inputs(SPECS[name], tokens=70, batch=1)
    for chunk_size in (1, 2, 16, 64, 128):
        verify(name, call, chunk_size)


WIDTHS = {
    "linear_attn_normalized": [(7, 1), (100, 3)],  # with K = 1 the output does not depend on q
}


@pytest.mark.parametrize("name", DISTINCT)
def test_any_widths_and_heads(name: str) -> None:
    for key, value in WIDTHS.get(name, [(1, 6), (7, 1), (100, 3)]):
        sizes = {"K": key, "V": value, "D": key, "M": value}
        shape = {"tokens": 18, "batch": 1, "heads": 1, "value_heads": 4}
        verify(name, make_inputs(SPECS[name], sizes=sizes, **shape))
    sizes = {"K": 5, "V": 256, "D": 256, "M": 3}
    verify(name, make_inputs(SPECS[name], sizes=sizes, tokens=3, batch=1, heads=2, value_heads=2))


@pytest.mark.parametrize("name", SPECS)
def test_packed_documents(name: str) -> None:
    spec = SPECS[name]
    verify(name, make_inputs(spec, **packed(0, 0, 1, 64, 64, 65, 140, 140)))
    verify(name, make_inputs(spec, **packed(0, 3, 19, 35, 36, 40)), chunk_size=16)
    verify(name, make_inputs(spec, **packed(0, 0, 0)))
    verify(name, make_inputs(spec, **packed(0, 20)))


@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_the_whole_grid(name: str) -> None:
    spec = SPECS[name]
    for tokens in LENGTHS:
        for batch in (1, 2, 3):
            for chunk_size in (None, 1, 16, 128):
                verify(name, make_inputs(spec, tokens=tokens, batch=batch), chunk_size)
    for key, value in ((1, 1), (1, 256), (7, 100), (100, 7), (256, 7), (256, 256)):
        if key > 1 or name != "linear_attn_normalized":
            sizes = {"K": key, "V": value, "D": key, "M": value}
            verify(name, make_inputs(spec, sizes=sizes, tokens=70, heads=1, value_heads=2))
    for heads, value_heads in ((1, 4), (2, 4), (4, 4), (2, 6)):
        verify(name, make_inputs(spec, tokens=130, heads=heads, value_heads=value_heads))
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        cuts = torch.randint(0, 201, (7,), generator=generator).sort().values.tolist()
        for chunk_size in (None, 8):
            verify(name, make_inputs(spec, **packed(0, *cuts, 200)), chunk_size)
    verify(name, make_inputs(spec, tokens=1000, batch=2))


# -- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISTINCT)
def test_no_initial_state_is_zero_and_the_final_one_is_only_given_on_request(name: str) -> None:
    spec, op = SPECS[name], op_of(name)
    call = make_inputs(spec, tokens=70, requires_grad=False)
    arguments = {**call.inputs, **call.params, **call.scalars}
    output, nothing = op(**arguments)
    assert nothing is None
    names = [*spec.state_dims, *(["m"] if spec.log_scaled else [])]
    given = call.initial_state if isinstance(call.initial_state, tuple) else (call.initial_state,)
    zeros = tuple(
        torch.full_like(x, -torch.inf if key == "m" else 0.0)
        for key, x in zip(names, given, strict=True)
    )
    again, state = op(
        **arguments,
        initial_state=zeros if len(zeros) > 1 else zeros[0],
        output_final_state=True,
    )
    assert torch.equal(output, again)
    states = state if isinstance(state, tuple) else (state,)
    assert isinstance(state, tuple) == (len(names) > 1)
    assert [x.shape for x in states] == [x.shape for x in given]


@pytest.mark.parametrize("name", DISTINCT)
def test_a_sequence_in_two_calls_equals_one(name: str) -> None:
    """Also through the gradient of the state that passes between them."""
    spec, op = SPECS[name], op_of(name)
    call = make_inputs(spec, tokens=100, batch=1)

    def in_parts(cuts: Sequence[int]) -> dict[str, Tensor]:
        state, outputs = call.initial_state, []
        for begin, end in pairwise(cuts):
            part = {key: x[:, begin:end] for key, x in call.inputs.items()}
            out, state = op(
                **part, **call.params, **call.scalars, initial_state=state, output_final_state=True
            )
            outputs.append(out)
        return results(spec, call, torch.cat(outputs, 1), state)

    whole = in_parts((0, 100))
    for key, x in in_parts((0, 37, 38, 100)).items():
        check(f"{name} {key}", x, whole[key], TIGHT, dim=token_dim(key, call))


# -- bits, strides, what wants a gradient ---------------------------------------------------------


@pytest.mark.parametrize("name", DISTINCT)
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    spec = SPECS[name]
    for kwargs in ({"tokens": 130, "batch": 2}, packed(0, 3, 70, 70, 130)):
        call = make_inputs(spec, **kwargs).to(torch.float32)
        first = results(spec, call, *call_op(op_of(name), call))
        again = results(spec, call, *call_op(op_of(name), call))
        for key, x in first.items():
            assert torch.equal(x, again[key]), key


@pytest.mark.parametrize("name", DISTINCT)
def test_strides_do_not_matter(name: str) -> None:
    spec, op = SPECS[name], op_of(name)
    call = make_inputs(spec, tokens=70)
    want = results(spec, call, *call_op(op, call))

    def turned(x: Tensor) -> Tensor:
        """The same numbers, last dim first in memory."""
        out = x.detach().movedim(-1, 0).contiguous().movedim(0, -1)
        return out.requires_grad_(x.requires_grad)

    states = call.initial_state
    strided = CallInputs(
        {key: turned(x) for key, x in call.inputs.items()},
        {key: turned(x) for key, x in call.params.items()},
        call.scalars,
        tuple(turned(x) for x in states) if isinstance(states, tuple) else turned(states),
    )
    assert any(not x.is_contiguous() for x in strided.inputs.values())
    got = results(spec, strided, *call_op(op, strided))
    for key, x in want.items():
        assert torch.equal(got[key], x), key


@pytest.mark.parametrize("name", ["simple_gla", "kda", "mlstm", "gsa"])
def test_gradients_that_come_in_strided_or_not_at_all(name: str) -> None:
    spec, op = SPECS[name], op_of(name)
    call = make_inputs(spec, tokens=70)
    leaves = list(call.leaves().values())
    output, states = call_op(op, call)
    ones = torch.ones_like(output)
    want = torch.autograd.grad(output, leaves, ones, retain_graph=True)
    stride_zero = torch.ones((), dtype=output.dtype).expand_as(output)
    turned = ones.movedim(-1, 0).contiguous().movedim(0, -1)
    for seed in (stride_zero, turned):
        for a, b in zip(
            torch.autograd.grad(output, leaves, seed, retain_graph=True), want, strict=True
        ):
            assert torch.equal(a, b)
    loss = sum(x.sum() for x in true_states(spec, states))  # the output itself has no gradient
    got = torch.autograd.grad(loss, leaves, allow_unused=True)
    loss = sum(x.sum() for x in true_states(spec, call_oracle(spec, call)[1]))
    expected = torch.autograd.grad(loss, leaves, allow_unused=True)
    for leaf, a, b in zip(call.leaves(), got, expected, strict=True):
        x = torch.zeros_like(a) if b is None else b
        check(f"{name} {leaf}", a, x, TIGHT)


@pytest.mark.parametrize("name", DISTINCT)
def test_gradients_wanted_for_some_only(name: str) -> None:
    spec, op = SPECS[name], op_of(name)
    call = make_inputs(spec, tokens=66, batch=1)
    full = results(spec, call, *call_op(op, call))
    for wanted in call.leaves():
        for leaf, x in call.leaves().items():
            x.requires_grad_(leaf == wanted)
        got = results(spec, call, *call_op(op, call))
        assert [k for k in got if k.startswith("d")] == [f"d{wanted}"]
        for key, x in got.items():
            assert torch.equal(x, full[key]), (wanted, key)
        call = make_inputs(spec, tokens=66, batch=1)


def test_no_gradient_no_graph() -> None:
    op = op_of("gla")
    call = make_inputs(SPECS["gla"], tokens=20, requires_grad=False)
    output, state = call_op(op, call)
    assert not output.requires_grad and not state.requires_grad
    call = make_inputs(SPECS["gla"], tokens=20)
    with torch.no_grad():
        assert not call_op(op, call)[0].requires_grad


def test_the_log_scale_has_no_gradient() -> None:
    call = make_inputs(SPECS["mlstm"], tokens=20)
    _, states = call_op(op_of("mlstm"), call)
    assert [x.requires_grad for x in states] == [True, True, False]


def test_inputs_are_not_changed() -> None:
    for name in DISTINCT:
        call = make_inputs(SPECS[name], tokens=70).to(torch.float32)
        before = {key: x.detach().clone() for key, x in call.leaves().items()}
        results(SPECS[name], call, *call_op(op_of(name), call))
        for key, x in call.leaves().items():
            assert torch.equal(x, before[key]), (name, key)


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", DISTINCT)
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    call = make_inputs(SPECS[name], tokens=150, batch=1).to(dtype)
    verify(name, call, exact=call.to(torch.float64))
    output, states = call_op(op_of(name), call)
    assert output.dtype == dtype
    assert {x.dtype for x in true_states(SPECS[name], states)} == {torch.float32}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", DISTINCT)
def test_lower_precision_of_wide_heads_and_long_sequences(name: str, dtype: torch.dtype) -> None:
    sizes = {"K": 64, "V": 64, "D": 64, "M": 32}
    for kwargs in ({"tokens": 300, "sizes": sizes}, {"tokens": 1000, "value_heads": 2}):
        call = make_inputs(SPECS[name], batch=1, **kwargs).to(dtype)
        verify(name, call, exact=call.to(torch.float64))


# The divisor of mLSTM cancels: the token recurrence in float32 is off by up to 6e-5 here.
ILL_CONDITIONED = {"mlstm": 1e-4}


def strong_gates(name: str, strength: float) -> CallInputs:
    """Gates of 0, of `strength` and in between, side by side."""
    call = make_inputs(SPECS[name], tokens=130, batch=1, gate_scale=0.1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, item in SPECS[name].input_specs.items():
            if item.log_decay:
                g = call.inputs[key]
                kind = torch.randint(0, 3, g.shape, generator=generator)
                g[kind == 0] = 0.0
                g[kind == 1] = strength
    return call


@pytest.mark.parametrize("name", GATED)
def test_strong_gates(name: str) -> None:
    verify(name, strong_gates(name, -50.0), bound=1e-10)
    call = strong_gates(name, -50.0).to(torch.float32)
    verify(name, call, exact=call.to(torch.float64), bound=ILL_CONDITIONED.get(name))


@pytest.mark.parametrize("name", GATED)
def test_gates_of_zero(name: str) -> None:
    call = strong_gates(name, 0.0)
    with torch.no_grad():
        for key, item in SPECS[name].input_specs.items():
            if item.log_decay:
                call.inputs[key].zero_()
    verify(name, call)


@pytest.mark.parametrize("name", GATED)
def test_gates_that_forget_everything_stay_finite(name: str) -> None:
    for strength in (-1e3, -1e6):
        call = strong_gates(name, strength).to(torch.float32)
        for key, x in results(SPECS[name], call, *call_op(op_of(name), call)).items():
            assert x.isfinite().all(), key


def test_a_log_scaled_state_in_which_nothing_was_written_stays_empty() -> None:
    empty = torch.full((1, 1, 2), -torch.inf)
    chunks = (Chunk(0, 4, 0, True, False), Chunk(4, 4, 0, False, True))
    left: dict[int, Tensor] = {}
    scales, m = log_scale_scan(
        -torch.ones(1, 1, 2), empty, chunks, m=empty[:, :, 0], enter=lambda n: empty[:, :, 0],
        leave=left.__setitem__,
    )  # fmt: skip
    assert torch.equal(scales.entering, empty) and torch.equal(m, empty[:, :, 0])
    assert not scales.carry.any() and not scales.fresh.isnan().any() and list(left) == [0]


@pytest.mark.parametrize("bias", [-80.0, 80.0])
def test_extreme_input_gates_of_a_log_scaled_spec(bias: float) -> None:
    call = make_inputs(SPECS["mlstm"], tokens=130, batch=1)
    with torch.no_grad():
        call.inputs["i"][:, 20:75] += bias
    verify("mlstm", call, bound=1e-9)
    verify("mlstm", call, chunk_size=4, bound=1e-9)
    low = call.to(torch.float32)
    verify("mlstm", low, exact=low.to(torch.float64), bound=ILL_CONDITIONED["mlstm"])
