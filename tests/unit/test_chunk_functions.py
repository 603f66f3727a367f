"""The functions named as in FLA: signatures, values against the oracle, options, refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexla_dist import ops
from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.spec.oracle import run_recurrence
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.budget import check
from flexla_dist.testing.inputs import CallInputs, make_inputs

COMMON = "scale initial_state output_final_state"
SIGNATURES = {
    "chunk_linear_attn": f"q k v {COMMON} normalize cu_seqlens",
    "chunk_retention": f"q k v {COMMON} cu_seqlens",
    "chunk_lightning_attn": f"q k v layer_idx num_layers {COMMON} cu_seqlens",
    "chunk_simple_gla": f"q k v g g_gamma {COMMON} state_v_first cu_seqlens cu_seqlens_cpu",
    "chunk_gla": f"q k v g {COMMON} state_v_first cu_seqlens cu_seqlens_cpu",
    "chunk_hgrn": "x g initial_state output_final_state cu_seqlens",
    "chunk_delta_rule": f"q k v beta {COMMON} use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu",
    "chunk_gated_delta_rule": f"q k v g beta {COMMON} use_qk_l2norm_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu "
    "chunk_indices cp_context",
    "chunk_kda": f"q k v g beta {COMMON} use_qk_l2norm_in_kernel use_gate_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
    "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context "
    "use_graph max_num_seqs",
}
DEFAULTS = {"normalize": True, "output_final_state": False}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_fla(name: str) -> None:
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == SIGNATURES[name].split()
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    required = {"q", "k", "v", "x", "g", "beta", "layer_idx", "num_layers"}
    for p in positional:
        if p.default is p.empty:
            assert p.name in required
        else:
            assert p.default is DEFAULTS.get(p.name, p.default)
            assert p.default in (None, False) or p.name == "normalize"


def test_gdn_is_an_alias() -> None:
    assert ops.chunk_gdn is ops.chunk_gated_delta_rule


# How each variant is called: its own inputs, and the spec that is its oracle.
CALLS: dict[str, Callable[..., Any]] = {
    "linear_attn": lambda q, k, v, **o: ops.chunk_linear_attn(q, k, v, normalize=False, **o),
    "retention": lambda q, k, v, g, **o: ops.chunk_retention(q, k, v, **o),
    "lightning": lambda q, k, v, g, **o: ops.chunk_lightning_attn(q, k, v, 1, 4, **o),
    "simple_gla": ops.chunk_simple_gla,
    "mamba2": ops.chunk_mamba2,
    "gla": ops.chunk_gla,
    "delta_rule": ops.chunk_delta_rule,
    "gated_delta_rule": ops.chunk_gated_delta_rule,
    "kda": ops.chunk_kda,
}


def reference(name: str, call: CallInputs) -> tuple[Tensor, Any]:
    spec = get_variant(name)
    return run_recurrence(
        spec, call.inputs, call.params, call.scalars, call.initial_state,
        cu_seqlens=call.cu_seqlens,
    )  # fmt: skip


def close(name: str, got: Tensor, want: Tensor, bound: float = 1e-9) -> None:
    check(name, got, want, bound, dim=1 if want.ndim > 2 else None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_equal_the_oracle(name: str, packed: bool) -> None:
    bounds = torch.tensor([0, 30, 30, 67, 70]) if packed else None
    call = make_inputs(get_variant(name), batch=1 if packed else 2, tokens=70, cu_seqlens=bounds)
    scale = {"scale": 0.3} if "scale" in call.scalars else {}
    call.scalars.update(scale)
    o, final = CALLS[name](
        **call.inputs, **call.params, **scale, initial_state=call.initial_state,
        output_final_state=True, cu_seqlens=bounds,
    )  # fmt: skip
    want, want_final = reference(name, call)
    close("o", o, want)
    close("state", final, want_final)
    constant = ("g",) if name in ("retention", "lightning") else ()
    leaves = {key: x for key, x in call.leaves().items() if key not in constant}
    weights = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    got_gradients = torch.autograd.grad((o * weights).sum() + final.sum(), leaves.values())
    want_gradients = torch.autograd.grad((want * weights).sum() + want_final.sum(), leaves.values())
    for key, a, b in zip(leaves, got_gradients, want_gradients, strict=True):
        close(f"d{key}", a, b)


@pytest.mark.parametrize("name", CALLS)
def test_default_scale_and_no_final_state(name: str) -> None:
    call = make_inputs(get_variant(name), tokens=9, requires_grad=False)
    o, final = CALLS[name](**call.inputs, **call.params)
    assert final is None
    zeros = CallInputs(call.inputs, call.params, call.scalars, torch.zeros_like(call.initial_state))
    close("o", o, reference(name, zeros)[0])


def test_normalised_linear_attention_takes_and_returns_the_tuple() -> None:
    call = make_inputs(get_variant("linear_attn_normalized"), tokens=70, requires_grad=False)
    S, z = call.initial_state
    o, final = ops.chunk_linear_attn(
        **call.inputs, initial_state=(S, z.unsqueeze(1)), output_final_state=True
    )
    want, (want_S, want_z) = reference("linear_attn_normalized", call)
    close("o", o, want)
    close("S", final[0], want_S)
    assert final[1].shape == (2, 1, 4, 8)
    close("z", final[1].squeeze(1), want_z)
    alone, _ = ops.chunk_linear_attn(**call.inputs, initial_state=S)
    both, _ = ops.chunk_linear_attn(**call.inputs, initial_state=(S, torch.zeros(2, 1, 4, 8)))
    assert torch.equal(alone, both)
    with pytest.raises(ArgumentError, match=r"the second state is \[N, 1, HV, K\]"):
        ops.chunk_linear_attn(**call.inputs, initial_state=(S, z))


def test_hgrn_has_no_heads() -> None:
    call = make_inputs(get_variant("hgrn"), value_heads=1, batch=1, tokens=70,
                       cu_seqlens=torch.tensor([0, 20, 70]))  # fmt: skip
    x, g = call.inputs["x"].squeeze(2), call.inputs["g"].squeeze(2)
    o, final = ops.chunk_hgrn(x, g, call.initial_state.squeeze(1), True, call.cu_seqlens)
    want, want_final = reference("hgrn", call)
    close("o", o, want.squeeze(2))
    close("state", final, want_final.squeeze(1))
    with pytest.raises(ArgumentError, match=r"expected x \[B, T, D\]"):
        ops.chunk_hgrn(call.inputs["x"], call.inputs["g"])


def test_constant_decay_and_none_of_simple_gla() -> None:
    call = make_inputs(get_variant("simple_gla"), tokens=20, requires_grad=False)
    q, k, v = (call.inputs[name] for name in "qkv")
    gamma = torch.tensor([-0.1, -0.2, -0.5, 0.0], dtype=q.dtype)
    a, _ = ops.chunk_simple_gla(q, k, v, g_gamma=gamma)
    b, _ = ops.chunk_simple_gla(q, k, v, g=gamma.expand(2, 20, 4))
    assert torch.equal(a, b)
    plain, _ = ops.chunk_simple_gla(q, k, v)
    assert torch.equal(plain, ops.chunk_linear_attn(q, k, v, normalize=False)[0])
    with pytest.raises(ArgumentError, match="not both"):
        ops.chunk_simple_gla(q, k, v, b[..., 0], gamma)
    with pytest.raises(ArgumentError, match=r"one number a head: expected \[4\], got \[2\]"):
        ops.chunk_simple_gla(q, k, v, g_gamma=gamma[:2])


@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "kda"])
def test_v_first_states(name: str) -> None:
    call = make_inputs(get_variant(name), tokens=20, requires_grad=False)
    options = {"output_final_state": True}
    o, final = CALLS[name](**call.inputs, initial_state=call.initial_state, **options)
    turned, v_first = CALLS[name](
        **call.inputs, initial_state=call.initial_state.mT, state_v_first=True, **options
    )
    assert torch.equal(o, turned) and torch.equal(final, v_first.mT)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def options_case(name: str, bounded: bool, bias: bool) -> tuple[dict, dict, dict]:
    """Raw tensors, the options that prepare them, and the tensors prepared by hand."""
    call = make_inputs(get_variant(name), tokens=20)
    generator = torch.Generator().manual_seed(3)
    raw = {key: x.detach().clone() for key, x in call.inputs.items()}
    raw["k"] = torch.randn(raw["k"].shape, generator=generator, dtype=torch.float64)
    raw["beta"] = torch.randn(raw["beta"].shape, generator=generator, dtype=torch.float64)
    raw["g"] = torch.randn(raw["g"].shape, generator=generator, dtype=torch.float64)
    raw["A_log"] = torch.randn(4, generator=generator, dtype=torch.float64)
    if bias:
        shape = raw["g"].shape[2:]
        raw["dt_bias"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    for x in raw.values():
        x.requires_grad_()
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "use_gate_in_kernel": True,
        **({"lower_bound": -5.0, "safe_gate": True} if bounded else {}),
    }
    shifted = raw["g"] + raw["dt_bias"] if bias else raw["g"]
    speed = raw["A_log"].exp().view(4, *(1,) * (shifted.ndim - 3))
    gate = -5.0 * torch.sigmoid(speed * shifted) if bounded else -speed * softplus(shifted)
    prepared = {
        "q": unit(raw["q"]), "k": unit(raw["k"]), "v": raw["v"], "g": gate,
        "beta": 2 * raw["beta"].sigmoid(),
    }  # fmt: skip
    return raw, options, prepared


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "bounded"), [("gated_delta_rule", False), ("kda", False), ("kda", True)]
)
def test_raw_inputs_are_prepared_inside(name: str, bounded: bool, bias: bool) -> None:
    raw, options, prepared = options_case(name, bounded, bias)
    o, _ = CALLS[name](**raw, **options)
    want, _ = CALLS[name](**prepared)
    close("o", o, want)
    weights = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((o * weights).sum(), raw.values())
    expected = torch.autograd.grad((want * weights).sum(), raw.values())
    for key, a, b in zip(raw, got, expected, strict=True):
        close(f"d{key}", a, b)


def test_kda_takes_a_flat_bias_and_no_speed_with_a_bound() -> None:
    raw, options, _ = options_case("kda", True, True)
    o, _ = ops.chunk_kda(**raw, **options)
    flat, _ = ops.chunk_kda(**{**raw, "dt_bias": raw["dt_bias"].flatten()}, **options)
    assert torch.equal(o, flat)
    speed = raw.pop("A_log")
    without, _ = ops.chunk_kda(**raw, **options)
    ones, _ = ops.chunk_kda(**raw, A_log=torch.zeros_like(speed), **options)
    close("o", without, ones)


def test_contradicting_and_unsupported_options_are_named() -> None:
    raw, options, _ = options_case("kda", True, True)
    for wrong, message in (
        ({"use_gate_in_kernel": False}, "A_log, dt_bias have an effect only with"),
        ({"use_beta_sigmoid_in_kernel": False}, "allow_neg_eigval needs use_beta_sigmoid"),
        ({"lower_bound": -7.0}, r"needs lower_bound in \[-5, 0\), got -7.0"),
        ({"lower_bound": 1.0, "safe_gate": False}, "lower_bound must be negative"),
        ({"disable_recompute": True}, "chunk_kda: disable_recompute is not supported"),
        ({"return_intermediate_states": True}, "return_intermediate_states is not supported"),
        ({"use_graph": True}, "use_graph is not supported"),
        ({"max_num_seqs": 4}, "max_num_seqs is not supported"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ops.chunk_kda(**raw, **{**options, **wrong})
    with pytest.raises(ArgumentError, match=r"expected dt_bias \[HV \* K\] .* got dt_bias \[3\]"):
        ops.chunk_kda(**{**raw, "dt_bias": torch.zeros(3)}, **options)
    with pytest.raises(ArgumentError, match=r"A_log .* is needed"):
        ops.chunk_kda(**{k: x for k, x in raw.items() if k != "A_log"}, use_gate_in_kernel=True)
    raw, options, _ = options_case("gated_delta_rule", False, True)
    with pytest.raises(ArgumentError, match="chunk_indices is not supported"):
        ops.chunk_gdn(**raw, **options, chunk_indices=torch.zeros(1, 2))
    with pytest.raises(ArgumentError, match=r"cp_context is not supported.*SequenceParallelOp"):
        ops.chunk_gdn(**raw, **options, cp_context=object())


def test_bounds_on_the_cpu() -> None:
    bounds = torch.tensor([0, 5, 20])
    call = make_inputs(get_variant("gla"), batch=1, tokens=20, cu_seqlens=bounds)
    a, _ = ops.chunk_gla(**call.inputs, cu_seqlens=bounds)
    b, _ = ops.chunk_gla(**call.inputs, cu_seqlens=bounds, cu_seqlens_cpu=bounds)
    assert torch.equal(a, b)
    with pytest.raises(ArgumentError, match="give both, of one shape"):
        ops.chunk_gla(**call.inputs, cu_seqlens_cpu=bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "kda"])
def test_low_precision_keeps_to_its_budget(name: str, dtype: torch.dtype) -> None:
    full = make_inputs(get_variant(name), tokens=130, requires_grad=False)
    call = full.to(dtype)
    o, _ = CALLS[name](**call.inputs, initial_state=call.initial_state)
    exact = CallInputs(
        {key: x.double() for key, x in call.inputs.items()}, {}, full.scalars,
        call.initial_state.double(),
    )  # fmt: skip
    assert o.dtype == dtype
    close("o", o, reference(name, exact)[0], 1e-5 if dtype == torch.float32 else 5e-3)


def test_operators_are_compiled_once_per_option() -> None:
    from flexla_dist.ops.chunk.common import operator
    from flexla_dist.spec.variants.options import TokenOptions

    one = operator("kda", TokenOptions(unit_qk=True), None)
    assert one is operator("kda", TokenOptions(unit_qk=True), None)
    assert one is not operator("kda", TokenOptions(), None)


@pytest.mark.parametrize("place", [(5, 2), (-1, 2), (3, 2), (0, 0), (0.5, 2), ("0", 2)], ids=str)
def test_lightning_layers_count_from_zero(place: tuple[Any, Any]) -> None:
    q = torch.randn(1, 4, 2, 4)
    with pytest.raises(ArgumentError, match=r"layer_idx = .* of num_layers = .*; expected whole"):
        ops.chunk_lightning_attn(q, q, q, *place)
    o, _ = ops.chunk_lightning_attn(q, q, q, 1, 2)
    assert o.shape == q.shape


Q, V = torch.randn(1, 4, 2, 4), torch.randn(1, 4, 2, 3)
GATE, EMPTY = -torch.rand(1, 4, 2), torch.zeros(1, 4, 2, 0)
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no q": (lambda: ops.chunk_gla(None, Q, V, Q), ArgumentTypeError, "chunk_gla: q is NoneType"),
    "list": (lambda: ops.chunk_gla([1], Q, V, Q), ArgumentTypeError, "q is list; expected"),
    "number": (
        lambda: ops.chunk_gla(torch.tensor(1.0), Q, V, Q), ArgumentError,
        r"q is \[\]; expected at least 3 dims, \[B, T, heads",
    ),
    "no K": (lambda: ops.chunk_gla(EMPTY, EMPTY, V, EMPTY), ArgumentError, "K = 0: give scale"),
    "gamma": (
        lambda: ops.chunk_simple_gla(Q, Q, V, g_gamma=[0.1, 0.2]), ArgumentTypeError,
        "g_gamma is list; expected a tensor",
    ),
    "A_log": (
        lambda: ops.chunk_mamba2(Q, Q, V, GATE, None), ArgumentTypeError, "A_log is NoneType",
    ),
    "x": (lambda: ops.chunk_hgrn(None, Q), ArgumentTypeError, "chunk_hgrn: x is NoneType"),
    "vector state": (
        lambda: ops.chunk_simple_gla(
            Q, Q, V, GATE, initial_state=torch.zeros(4), state_v_first=True
        ),
        ArgumentError, "initial state 'S' has shape",
    ),
    "pair": (
        lambda: ops.chunk_linear_attn(Q, Q, V, initial_state="S"), ArgumentTypeError,
        r"initial_state is str; expected a tensor S or a tuple \(S, z\)",
    ),
    "beta": (lambda: ops.chunk_delta_rule(Q, Q, V, 0.5), ArgumentTypeError, "beta is float"),
    "v": (lambda: ops.chunk_retention(Q, Q, None), ArgumentTypeError, "chunk_retention: v is"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_tensor(name: str) -> None:
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        call()
