"""The compiled operator as a user meets it: errors, plans, decoding, checks, one's own variant."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flexla_dist
from flexla_dist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckError,
    DoubleBackwardError,
    ExecutorError,
)
from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec import functional as F
from flexla_dist.spec.oracle import true_states
from flexla_dist.testing.budget import check
from flexla_dist.testing.inputs import CallInputs, make_inputs

from .compiled import DISTINCT, SPECS, call_op, call_oracle, op_of, results, token_dim

# -- errors ---------------------------------------------------------------------------------------


def arguments(name: str = "mamba2", **changes: Any) -> dict[str, Any]:
    """Arguments of a call with B = 2, T = 7, H = 2, HV = 4, K = 8, V = 6; None takes one away."""
    call = make_inputs(SPECS[name], tokens=7, requires_grad=False)
    given = {**call.inputs, **call.params, **call.scalars, **changes}
    return {key: value for key, value in given.items() if value is not None}


q, k, v = (torch.zeros(2, 7, 2, 8), torch.zeros(2, 7, 2, 8), torch.zeros(2, 7, 4, 6))
WRONG: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "unknown name": (
        "gla",
        {"gg": v},
        ArgumentTypeError,
        r"gla: unexpected argument 'gg' \(did you mean 'g'\?\); expected q, k, v, g, scale",
    ),
    "missing input": ("gla", {"g": None}, ArgumentError, "input 'g' is missing; expected q, k"),
    "missing parameter": ("mamba2", {"D": None}, ArgumentError, "parameter 'D' is missing"),
    "missing scalar": ("gla", {"scale": None}, ArgumentError, "scalar 'scale' has no default"),
    "no tensor": ("gla", {"q": 1.0}, ArgumentTypeError, "input 'q' is float; expected a tensor"),
    "whole numbers": (
        "gla",
        {"q": q.long()},
        ArgumentTypeError,
        "input 'q' has dtype torch.int64; expected float16, bfloat16, float32 or float64",
    ),
    "rank": (
        "gla",
        {"q": q[0]},
        ArgumentError,
        r"'q' has shape \(7, 2, 8\); expected 4 dims \[B, T, H, K\]",
    ),
    "rank of a gate": (
        "simple_gla",
        {"g": v},
        ArgumentError,
        r"'g' has shape \(2, 7, 4, 6\); expected 3 dims \[B, T, HV\]",
    ),
    "heads before tokens": (
        "gla",
        {"v": v.transpose(1, 2)},
        ArgumentError,
        r"'v' has \[B, T\] = \(2, 4\), 'q' has \(2, 7\); the layout is \[B, T, heads, ...\]",
    ),
    "one group": (
        "gla",
        {"k": torch.zeros(2, 7, 1, 8)},
        ArgumentError,
        "'k' has 1 heads, 'q' has 2; inputs of one head group must agree",
    ),
    "ungrouped heads": (
        "gla",
        {"v": torch.zeros(2, 7, 2, 6)},
        ArgumentError,
        "'g' has 4 heads, 'v' has 2",
    ),
    "heads that do not divide": (
        "delta_rule",
        {"v": torch.zeros(2, 7, 3, 6), "beta": torch.zeros(2, 7, 3)},
        ArgumentError,
        "'q' of group 'qk' has 2 heads, which must divide the 3 heads of the state",
    ),
    "no heads": (
        "linear_attn",
        {"q": q[:, :, :0], "k": k[:, :, :0]},
        ArgumentError,
        "has 0 heads, which must divide the 4 heads",
    ),
    "widths": (
        "gla",
        {"k": torch.zeros(2, 7, 2, 5)},
        ArgumentError,
        "dim K is 5 in 'k' and 8 in 'q'",
    ),
    "parameter shape": (
        "mamba2",
        {"D": torch.zeros(3)},
        ArgumentError,
        r"parameter 'D' has shape \(3,\); expected \[HV\] with HV = 4",
    ),
    "parameter dims": (
        "rwkv6",
        {"u": torch.zeros(4, 7)},
        ArgumentError,
        "dim K is 7 in 'u' and 8 in 'q'",
    ),
    "scalar tensor": (
        "gla",
        {"scale": torch.tensor(1.0)},
        ArgumentTypeError,
        "scalar 'scale' is Tensor; expected a Python number. For a learned number declare a param",
    ),
    "scalar truth": ("gla", {"scale": True}, ArgumentTypeError, "scalar 'scale' is bool"),
    "device": (
        "gla",
        {"v": v.to("meta")},
        ArgumentError,
        "input 'v' is on meta, 'q' on cpu",
    ),
    "parameter device": (
        "mamba2",
        {"D": torch.zeros(4, device="meta")},
        ArgumentError,
        "parameter 'D' is on meta, the inputs on cpu",
    ),
    "packed batch": (
        "gla",
        {"cu_seqlens": torch.tensor([0, 7])},
        ArgumentError,
        r"needs B = 1, got B = 2; reshape \[B, T\] to \[1, B \* T\]",
    ),
    "state shape": (
        "gla",
        {"initial_state": torch.zeros(2, 2, 8, 6)},
        ArgumentError,
        r"state 'S' has shape \(2, 2, 8, 6\); expected \(2, 4, 8, 6\) = \[N, HV, K, V\]",
    ),
    "one state of two": (
        "gsa",
        {"initial_state": torch.zeros(2, 4, 8, 5)},
        ArgumentError,
        r"initial_state has 1 tensor\(s\); expected 2: \(slot_keys, slot_values\)",
    ),
    "no log scale": (
        "mlstm",
        {"initial_state": (torch.zeros(2, 4, 8, 6), torch.zeros(2, 4, 8))},
        ArgumentError,
        r"has 2 tensor\(s\); expected 3: \(S, z, m\)",
    ),
    "log scale shape": (
        "mlstm",
        {"initial_state": (torch.zeros(2, 4, 8, 6), torch.zeros(2, 4, 8), torch.zeros(2))},
        ArgumentError,
        r"state 'm' has shape \(2,\); expected \(2, 4\) = \[N, HV\]",
    ),
    "state of another kind": (
        "gla",
        {"initial_state": 0.0},
        ArgumentTypeError,
        "initial_state is float; expected a tensor or a tuple of tensors",
    ),
    "state inside": (
        "gsa",
        {"initial_state": (torch.zeros(2, 4, 8, 5), None)},
        ArgumentTypeError,
        "initial state 'slot_values' is NoneType, not a tensor",
    ),
    "complex state": (
        "gla",
        {"initial_state": torch.zeros(2, 4, 8, 6, dtype=torch.complex64)},
        ArgumentTypeError,
        "initial state 'S' has dtype torch.complex64; expected a floating type",
    ),
    "whole state": (
        "gla",
        {"initial_state": torch.zeros(2, 4, 8, 6, dtype=torch.int64)},
        ArgumentTypeError,
        r"initial state 'S' has dtype torch.int64; .*\.float\(\)",
    ),
    "truth state": (
        "gla",
        {"initial_state": torch.zeros(2, 4, 8, 6, dtype=torch.bool)},
        ArgumentTypeError,
        "initial state 'S' has dtype torch.bool",
    ),
    "state device": (
        "gla",
        {"initial_state": torch.zeros(2, 4, 8, 6, device="meta")},
        ArgumentError,
        "initial state 'S' is on meta, the inputs on cpu",
    ),
    "executor": (
        "gla",
        {"executor": "tritn"},
        ExecutorError,
        r"executor 'tritn' does not exist \(did you mean 'triton'\?\); expected one of: torch",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    name, changes, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as caught:
        op_of(name)(**arguments(name, **changes))
    assert isinstance(caught.value, ValueError | TypeError)


def test_arguments_without_a_name() -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        op_of("gla")(q, k, v)
    assert "gla: 3 argument(s) without a name; give all by name: op(q=q, k=k," in str(caught.value)


def test_functions_have_near_names() -> None:
    with pytest.raises(AttributeError, match=r"'chunk_glaa' \(did you mean 'chunk_gla'\?\)"):
        flexla_dist.ops.chunk_glaa  # noqa: B018


def test_wrong_documents() -> None:
    op = op_of("gla")
    one = {key: x[:1] if isinstance(x, Tensor) else x for key, x in arguments("gla").items()}
    for offsets, message in (
        ([0, 3], r"cu_seqlens = \[0, 3\]; expected non-decreasing offsets from 0 to T = 7"),
        ([1, 7], "expected non-decreasing offsets from 0"),
        ([0, 5, 3, 7], "expected non-decreasing offsets from 0"),
        ([0], "of at least one document"),
        ([], "of at least one document"),
        ([0, *[3] * 20, 8], r"\[0, 3, 3, 3, 3, 3\] \.\.\. \[3, 3, 8\]"),
    ):
        for given in (offsets, torch.tensor(offsets, dtype=torch.int32)):
            with pytest.raises(ArgumentError, match=message):
                op(**one, cu_seqlens=given)
    for tensor in (torch.tensor([0.0, 7.0]), torch.tensor([[0, 7]])):
        with pytest.raises(ArgumentTypeError, match="expected int32 or int64 with shape"):
            op(**one, cu_seqlens=tensor)
    for numbers in ([0, 3.5, 7], [False, 3, 7], np.array([0, 3.0, 7]), 7, [0, np.True_, 7]):
        with pytest.raises(ArgumentTypeError, match=r"gla: cu_seqlens.*expected whole numbers"):
            op(**one, cu_seqlens=numbers)
    packed = torch.tensor([0, 3, 7])
    with pytest.raises(
        ArgumentError, match=r"expected \(2, 4, 8, 6\) = \[N, HV, K, V\], one state"
    ):
        op(**one, cu_seqlens=packed, initial_state=torch.zeros(1, 4, 8, 6))
    same = op(**one, cu_seqlens=[0, 3, 7])[0], op(**one, cu_seqlens=packed.int())[0]
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], op(**one, cu_seqlens=np.array([0, 3, 7]))[0])


def test_wrong_settings() -> None:
    spec = SPECS["gla"]
    for size in (0, -1, 3, 48, 64.0, True, "64"):
        with pytest.raises(ArgumentError, match="chunk_size must be a power of two, got "):
            compile(spec, chunk_size=size)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="compile takes a LinearAttentionSpec, got str"):
        compile("gla")  # type: ignore[arg-type]
    with pytest.raises(ExecutorError, match="executor 'cuda' does not exist"):
        compile(spec, executor="cuda")
    with pytest.raises(ExecutorError, match="does not exist"):
        op_of("gla").executor("nothing")


# -- plans, defaults ------------------------------------------------------------------------------


def test_the_plan_says_what_ran() -> None:
    op = LinearAttentionOp(op_of("gla").graphs, None, None)
    assert op.last_plan is None
    call = make_inputs(SPECS["gla"], tokens=150, requires_grad=False)
    call_op(op, call)
    plan = op.last_plan
    assert plan is not None and plan.kernels == "batched"
    assert (plan.executor, plan.chunk_size, plan.num_chunks, plan.num_sequences) == (
        "torch",
        64,
        3,
        2,
    )
    bounds = torch.tensor([0, 3, 3, 8])
    call_op(op, make_inputs(SPECS["gla"], batch=1, tokens=8, cu_seqlens=bounds), executor="torch")
    plan = op.last_plan
    assert plan is not None and (plan.chunk_size, plan.num_chunks, plan.num_sequences) == (8, 2, 3)
    op.recurrent_step(**arguments_of_token(call, 0))
    assert op.last_plan is not None and op.last_plan.chunk_size == 1


def test_the_backward_plan_says_what_backward_ran() -> None:
    op = LinearAttentionOp(op_of("gla").graphs, None, None)
    calls = [make_inputs(SPECS["gla"], tokens=tokens) for tokens in (150, 7)]
    outputs = [call_op(op, call)[0] for call in calls]
    assert op.last_backward_plan is None
    for output, chunks in zip(outputs, (3, 1), strict=True):
        output.sum().backward()
        plan = op.last_backward_plan
        assert plan is not None and (plan.executor, plan.kernels) == ("torch", "batched")
        assert plan.num_chunks == chunks
    assert op.last_plan is not None and op.last_plan.num_chunks == 1


@pytest.mark.parametrize(
    ("dtype", "K", "chunk_size"),
    [(torch.float32, 160, 32), (torch.float32, 128, 64), (torch.bfloat16, 160, 64)],
)
def test_wide_float32_states_have_shorter_chunks(
    dtype: torch.dtype, K: int, chunk_size: int
) -> None:
    """Else a chunk's rows and the state do not fit a GPU's shared memory; on every device."""
    op = LinearAttentionOp(op_of("gla").graphs, None, None)
    sizes = {"K": K, "V": 16}
    call_op(op, make_inputs(SPECS["gla"], tokens=70, sizes=sizes, dtype=dtype, requires_grad=False))
    assert op.last_plan is not None and op.last_plan.chunk_size == chunk_size
    fixed = LinearAttentionOp(op_of("gla").graphs, None, 16)
    call_op(fixed, make_inputs(SPECS["gla"], tokens=70, sizes=sizes, requires_grad=False))
    assert fixed.last_plan is not None and fixed.last_plan.chunk_size == 16


def test_a_scalar_with_a_default_may_be_left_out() -> None:
    spec = replace(SPECS["linear_attn"], scalars={"scale": 0.25})
    op = compile(spec)
    given = arguments("linear_attn")
    first, _ = op(**{**given, "scale": 0.25})
    given.pop("scale")
    assert torch.equal(op(**given)[0], first)


def test_the_output_has_the_dtype_of_the_values() -> None:
    given = arguments("gla")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low = {
            key: x.to(dtype if key == "v" else torch.float32) if isinstance(x, Tensor) else x
            for key, x in given.items()
        }
        output, state = op_of("gla")(**low, output_final_state=True)
        assert output.dtype == dtype and state.dtype == torch.float32


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            {"v": torch.float64},
            r"mamba2: float64 is mixed with other dtypes \(float32: q, .*; float64: v\); give all",
        ),
        ({"D": torch.float64}, "float64: D"),
        (
            {"q": torch.bfloat16, "k": torch.float16},
            r"bfloat16 and float16 are mixed \(bfloat16: q; float16: k; float32: v, .*cast to one",
        ),
    ],
)
def test_mixes_of_dtypes_that_are_refused(kinds: dict[str, torch.dtype], message: str) -> None:
    given = {n: x.float() if isinstance(x, Tensor) else x for n, x in arguments().items()}
    given |= {name: given[name].to(dtype) for name, dtype in kinds.items()}
    for autocast in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            pytest.raises(ArgumentTypeError, match=message),
        ):
            op_of("mamba2")(**given)


def test_an_operator_shows_its_kind() -> None:
    assert repr(op_of("gsa")) == (
        "LinearAttentionOp(gsa, M = {slot_keys: columns, slot_values: rows})"
    )
    assert flexla_dist.compile is compile and flexla_dist.LinearAttentionSpec is LinearAttentionSpec


# -- decoding -------------------------------------------------------------------------------------


def arguments_of_token(call: CallInputs, t: int) -> dict[str, Any]:
    tokens = {key: x[:, t : t + 1] for key, x in call.inputs.items()}
    return {**tokens, **call.params, **call.scalars}


@pytest.mark.parametrize("name", DISTINCT)
def test_decoding_token_by_token_equals_the_chunk_form(name: str) -> None:
    op, spec = op_of(name), SPECS[name]
    call = make_inputs(spec, tokens=21, requires_grad=False)
    want, want_state = call_op(op, call)
    state: Any = call.initial_state
    outputs = []
    for t in range(21):
        output, state = op.recurrent_step(state, **arguments_of_token(call, t))
        outputs.append(output)
    check("o", torch.cat(outputs, 1), want, 1e-12, dim=1)
    for a, b in zip(true_states(spec, state), true_states(spec, want_state), strict=True):
        check("state", a, b, 1e-12)


def test_decoding_starts_from_zero_and_takes_one_token() -> None:
    op, spec = op_of("mlstm"), SPECS["mlstm"]
    call = make_inputs(spec, tokens=5, requires_grad=False)
    output, state = op.recurrent_step(**arguments_of_token(call, 0))
    bare = {key: x[:, :1] for key, x in call.inputs.items()}
    want, want_state = op(**bare, **call.scalars, output_final_state=True)
    assert torch.equal(output, want)
    assert all(torch.equal(a, b) for a, b in zip(state, want_state, strict=True))
    with pytest.raises(ArgumentError, match=r"takes one token, input 'q' has T = 5; call the oper"):
        op.recurrent_step(state, **call.inputs, **call.scalars)


def test_decoding_has_gradients() -> None:
    op, spec = op_of("gated_delta_rule"), SPECS["gated_delta_rule"]
    call = make_inputs(spec, tokens=3)
    state: Any = call.initial_state
    outputs = []
    for t in range(3):
        output, state = op.recurrent_step(state, **arguments_of_token(call, t))
        outputs.append(output)
    got = results(spec, call, torch.cat(outputs, 1), state)
    for key, x in results(spec, call, *call_op(op, call)).items():
        check(key, got[key], x, 1e-12, dim=token_dim(key, call))


# -- second derivatives ---------------------------------------------------------------------------


def test_double_backward_is_refused_by_name() -> None:
    call = make_inputs(SPECS["gla"], tokens=5)
    output, _ = call_op(op_of("gla"), call)
    with pytest.raises(DoubleBackwardError, match=r"gla: a second derivative was asked for"):
        (first,) = torch.autograd.grad(output.sum(), call.inputs["q"], create_graph=True)
        torch.autograd.grad(first.sum(), call.inputs["k"])


# -- compile(check=True) --------------------------------------------------------------------------


def chunk_gla(x: Any, p: Any) -> dict[str, Any]:
    b = x.g.cumsum(0)
    return {
        "q_in": x.q * b.exp()[:, None],
        "late": x.q * (b - x.g).exp()[:, None],
        "k_out": x.k * (b[-1] - b).exp()[:, None],
        "k_late": x.k * b.exp()[:, None],
        "scores": (x.q @ x.k.T) * F.decay_matrix(b, b),
        "undecayed": (x.q @ x.k.T).tril(),
        "v": x.v,
        "decay": b[-1].exp(),
    }


def gla_like(decay_mode: Callable[..., Any], merge_mode: Callable[..., Any]) -> LinearAttentionSpec:
    return LinearAttentionSpec(
        name="mine",
        inputs={"q": "C K", "k": "C K", "v": "C V", "g": "C <=0"},
        chunk_mode=chunk_gla,
        decay_mode=decay_mode,
        merge_mode=merge_mode,
    )


def good_decay(S: Any, c: Any) -> Any:
    return c.decay * S + c.k_out.T @ c.v


def good_merge(S: Any, c: Any) -> Any:
    return c.q_in @ S + c.scores @ c.v


BROKEN: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "state decayed too little": ("decay_mode", lambda S, c: S + c.k_out.T @ c.v, good_merge),
    "keys decayed from the start": (
        "decay_mode",
        lambda S, c: c.decay * S + c.k_late.T @ c.v,
        good_merge,
    ),
    "output one token late": ("merge_mode", good_decay, lambda S, c: c.late @ S + c.scores @ c.v),
    "chunk undecayed": ("merge_mode", good_decay, lambda S, c: c.q_in @ S + c.undecayed @ c.v),
    "no own tokens": ("merge_mode", good_decay, lambda S, c: c.q_in @ S),
}


@pytest.mark.parametrize("case", BROKEN)
def test_check_names_the_stage_that_is_wrong(case: str) -> None:
    stage, decay_mode, merge_mode = BROKEN[case]
    spec = gla_like(decay_mode, merge_mode)
    compile(spec)
    with pytest.raises(CheckError, match=rf"mine\.{stage}: the (state 'S'|output) .*differs by"):
        compile(spec, check=True)


def test_check_passes_what_is_right() -> None:
    compile(gla_like(good_decay, good_merge), check=True)
    for name in SPECS:
        compile(SPECS[name], check=True)


def gla_token(S: Any, x: Any, p: Any) -> Any:
    S = x.g.exp()[..., None, None] * S + x.k[..., None] * x.v[..., None, :]
    return S, (x.q[..., None] * S).sum(-2)


WRONG_TOKENS: dict[str, tuple[Callable[..., Any], str]] = {
    "output": (
        lambda S, x, p: (gla_token(S, x, p)[0], x.v),
        r"output [\d.e+-]+, gradient of q .*\(relative; the bound is 1e-08\)",
    ),
    "state": (
        lambda S, x, p: gla_token(1.001 * S, x, p),
        r"output [\d.e+-]+, state 'S' [\d.e+-]+, gradient of q .*gradient of initial S",
    ),
    "gradient alone": (
        lambda S, x, p: (
            gla_token(S, x, p)
            if not x.g.requires_grad
            else gla_token(
                S, type(x)({n: getattr(x, n) for n in "qkv"} | {"g": x.g.detach()}, ""), p
            )
        ),
        r"in float64: gradient of g [\d.e+]+ \(relative",
    ),
    "shape": (
        lambda S, x, p: (gla_token(S, x, p)[0], x.q),
        r"output has shape \(1, 67, 2, 5\) after 67 tokens; expected \(1, 67, 2, 6\)",
    ),
    "failure": (
        lambda S, x, p: (S, x.kk),
        r"it failed on one token, \w+: .*kk.*returns \(next state, output of the token\)",
    ),
}


@pytest.mark.parametrize("case", WRONG_TOKENS)
def test_check_compares_with_the_recurrence(case: str) -> None:
    token, message = WRONG_TOKENS[case]
    right = replace(gla_like(good_decay, good_merge), recurrence=gla_token)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile(right, check=True)
    with pytest.raises(CheckError, match=rf"(?s)mine\.recurrence: .*{message}"):
        compile(replace(right, recurrence=token), check=True)


# -- a variant of one's own -----------------------------------------------------------------------


def erase_write() -> LinearAttentionSpec:
    """Gated delta rule that erases and writes through gates of their own (Gated DeltaNet-2)."""

    def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
        b = x.g.cumsum(0)
        erase, grown, q = x.erase * x.k, b.exp(), x.q * p.scale
        T = F.unit_tril_inverse(F.decay_scores(erase, x.k, b, b, strict=True))
        return {
            "U": T @ (x.write * x.v), "W": T @ (erase * grown), "q_in": q * grown,
            "scores": F.decay_scores(q, x.k, b, b), "k_out": x.k * (b[-1] - b).exp(),
            "decay": grown[-1],
        }  # fmt: skip

    def decay_mode(S: Any, c: Any) -> Any:
        return c.decay[:, None] * S + c.k_out.T @ (c.U - c.W @ S)

    def merge_mode(S: Any, c: Any) -> Any:
        return c.q_in @ S + c.scores @ (c.U - c.W @ S)

    def recurrence(S: Any, x: Any, p: Any) -> Any:
        S = x.g.exp()[..., None] * S
        erased = ((x.erase * x.k)[..., None] * S).sum(-2)
        S = S + x.k[..., None] * (x.write * x.v - erased)[..., None, :]
        return S, p.scale * (x.q[..., None] * S).sum(-2)

    return LinearAttentionSpec(
        name="erase_write",
        inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "g": "C K <=0",
                "erase": "C K", "write": "C V"},
        scalars={"scale": None},
        chunk_mode=chunk_mode, decay_mode=decay_mode, merge_mode=merge_mode,
        recurrence=recurrence,
    )  # fmt: skip


def normalised_delta() -> LinearAttentionSpec:
    """The delta rule divided by its own weights: two dense transitions, a state of one column."""

    def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
        beta, scores = x.beta[:, None], (x.q @ x.k.T).tril()
        T = F.unit_tril_inverse(beta * (x.k @ x.k.T))
        W = T @ (beta * x.k)
        return {"q": x.q, "k": x.k, "scores": scores, "U": T @ (beta * x.v), "W": W, "u": T @ beta}

    def decay_mode(S: Any, c: Any) -> dict[str, Any]:
        return {"S": S.S + c.k.T @ (c.U - c.W @ S.S), "z": S.z + c.k.T @ (c.u - c.W @ S.z)}

    def merge_mode(S: Any, c: Any) -> Any:
        weight = c.q @ S.z + c.scores @ (c.u - c.W @ S.z)
        return (c.q @ S.S + c.scores @ (c.U - c.W @ S.S)) / (1 + weight.square())

    def recurrence(S: Any, x: Any, p: Any) -> Any:
        def step(state: Any, value: Any) -> Any:
            kept = (x.k[..., None] * state).sum(-2)
            return state + x.beta[..., None, None] * x.k[..., None] * (value - kept)[..., None, :]

        new, z = step(S.S, x.v), step(S.z, 1.0)
        weight = (x.q[..., None] * z).sum(-2)
        return {"S": new, "z": z}, (x.q[..., None] * new).sum(-2) / (1 + weight.square())

    return LinearAttentionSpec(
        name="normalised_delta",
        inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "beta": "C"},
        state={"S": "K V", "z": "K 1"},
        chunk_mode=chunk_mode, decay_mode=decay_mode, merge_mode=merge_mode,
        recurrence=recurrence,
    )  # fmt: skip


def own_inputs(spec: LinearAttentionSpec, **changes: Any) -> CallInputs:
    call = make_inputs(spec, **changes)
    with torch.no_grad():
        for name in call.inputs.keys() & {"erase", "write"}:
            call.inputs[name].sigmoid_()
        call.inputs["k"].copy_(torch.nn.functional.normalize(call.inputs["k"], dim=-1))
    return call


def test_a_variant_takes_at_most_forty_lines() -> None:
    for make in (erase_write, normalised_delta):
        assert len(inspect.getsource(make).splitlines()) <= 41


@pytest.mark.parametrize("make", [erase_write, normalised_delta])
def test_a_variant_of_ones_own_matches_its_recurrence_and_decodes(
    make: Callable[[], LinearAttentionSpec],
) -> None:
    spec = make()
    op = compile(spec, strict=True, check=True)
    for changes in (
        {"tokens": 100},
        {"batch": 1, "tokens": 90, "cu_seqlens": torch.tensor([0, 3, 3, 64, 90])},
    ):
        call = own_inputs(spec, **changes)
        got = results(spec, call, *call_op(op, call))
        for key, x in results(spec, call, *call_oracle(spec, call)).items():
            check(key, got[key], x, 1e-11, dim=token_dim(key, call))
    call = own_inputs(spec, tokens=9, requires_grad=False)
    want, _ = call_op(op, call)
    state: Any = call.initial_state
    for t in range(9):
        output, state = op.recurrent_step(state, **arguments_of_token(call, t))
        check("o", output, want[:, t : t + 1], 1e-12)


def test_a_variant_of_ones_own_trains() -> None:
    spec = erase_write()
    op = compile(spec)
    torch.manual_seed(0)
    width, heads, size, tokens = 24, 2, 8, 80
    project = torch.nn.Linear(width, heads * 6 * size)
    back = torch.nn.Linear(heads * size, width)
    modules = torch.nn.ModuleList([project, back])
    optimiser = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    x = torch.randn(2, tokens, width)
    target = x.roll(3, 1)  # remember what came three tokens ago
    losses = []
    for _ in range(12):
        parts = project(x).unflatten(-1, (heads, 6 * size)).chunk(6, -1)
        q, k, v, g, erase, write = parts
        output, _ = op(
            q=q,
            k=torch.nn.functional.normalize(k, dim=-1),
            v=v,
            g=torch.nn.functional.logsigmoid(g + 4),
            erase=erase.sigmoid(),
            write=write.sigmoid(),
            scale=size**-0.5,
        )
        loss = (back(output.flatten(2)) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0] and losses[-1] == min(losses), losses
