"""The metric of every comparison: one bad chunk fails, and so does anything not finite."""

from __future__ import annotations

import pytest
import torch

from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.budget import BOUNDS, check, measure
from flexla_dist.testing.inputs import make_inputs
from scaling_runs import plain_chunk


def tensor() -> torch.Tensor:
    return torch.randn(2, 640, 3, generator=torch.Generator().manual_seed(0)).double()


def test_equal_tensors_have_no_error() -> None:
    report = measure(tensor(), tensor(), dim=1)
    assert (report.ratio, report.worst_chunk) == (0.0, 0.0) and report.within(0.0)


def test_one_bad_chunk_fails_although_the_ratio_passes() -> None:
    got = tensor()
    got[:, 128:192] *= 1 + 2e-2
    report = measure(got, tensor(), dim=1)
    assert report.chunk_index == 2 and report.ratio < 7e-3
    assert report.worst_chunk == pytest.approx(2e-2, rel=1e-3)
    with pytest.raises(AssertionError, match=r"o: RMSE ratio .* worst chunk 2: 2.000e-02"):
        check("o", got, tensor(), 6.6e-3, dim=1)


def test_a_chunk_of_small_values_is_measured_against_the_tensor() -> None:
    want = tensor()
    want[:, :64] *= 1e-6
    got = want.clone()
    got[:, :64] = 0
    assert measure(got, want, dim=1).worst_chunk < 1.1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_fails(value: float) -> None:
    got = tensor()
    got[0, 5, 0] = value
    assert not measure(got, tensor(), dim=1).within(1e6)
    assert not measure(tensor(), got, dim=1).within(1e6)


def test_zero_and_empty_tensors() -> None:
    zero = torch.zeros(4, 3)
    assert measure(zero, zero, dim=0).within(0.0)
    assert not measure(zero + 1e-3, zero, dim=0).within(1.0)
    assert measure(zero[:0], zero[:0], dim=0).within(0.0)
    with pytest.raises(AssertionError, match="shape"):
        measure(zero, zero[:2])


def test_gates_have_their_own_bound() -> None:
    bounds = BOUNDS[torch.bfloat16]
    assert [bounds.of(n) for n in ("o", "state", "dq", "dbeta", "dg")] == [
        5e-3, 5e-3, 8e-3, 2e-2, 2e-2
    ]  # fmt: skip


def test_inputs_are_seeded_and_heads_have_different_gates() -> None:
    spec = get_variant("kda")
    a, b = make_inputs(spec, seed=3), make_inputs(spec, seed=3)
    assert all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
    assert not torch.equal(a.inputs["v"], make_inputs(spec, seed=4).inputs["v"])
    decay = a.inputs["g"].exp().mean((0, 1, 3))
    assert decay.diff().min() > 0.01 and bool((a.inputs["g"] <= 0).all())
    assert a.inputs["q"].shape[2] == 2 and a.inputs["g"].shape[2] == 4
    half = a.to(torch.bfloat16)
    assert half.inputs["g"].dtype == torch.bfloat16 and half.initial_state.dtype == torch.float32
    assert set(a.leaves()) == {*spec.inputs, "initial_state"}


@pytest.mark.long
def test_a_plain_float32_run_misses_the_bound_of_a_gates_parameter() -> None:
    """How strict it is for a sum over all tokens: PyTorch's autograd, plain form of mamba2."""
    spec, worst = get_variant("mamba2"), []
    for seed in range(101, 107):
        call = make_inputs(
            spec,
            tokens=1024,
            heads=1,
            value_heads=2,
            sizes={"K": 64, "V": 128},
            dtype=torch.float32,
            seed=seed,
        )
        g = torch.Generator().manual_seed(seed + 1)
        grad = torch.randn(call.inputs["v"].shape, generator=g)
        exact = call.to(torch.float64)
        out = compile(spec)(**exact.inputs, **exact.params, **exact.scalars)[0]
        want = torch.autograd.grad(out, exact.params["A_log"], grad.double())[0]
        q, k = (call.inputs[name].detach().expand(-1, -1, 2, -1) for name in "qk")
        v, dt = (call.inputs[name].detach() for name in ("v", "dt"))
        step = torch.nn.functional.softplus(dt + call.params["dt_bias"])
        gate = -call.params["A_log"].exp() * step
        plain = plain_chunk.simple_gla(q, k, v * step[..., None], gate, 1.0)
        got = torch.autograd.grad(plain, call.params["A_log"], grad)[0]
        worst.append(measure(got, want).ratio)
    bound = BOUNDS[torch.float32].of("dA_log")
    assert sorted(worst)[len(worst) // 2] > bound


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_plain_bfloat16_run_misses_the_rule_of_chunks() -> None:
    """How strict it is for the gate of a slow decay: PyTorch's autograd, plain form, keeps the
    bound of the whole tensor and misses that of a chunk."""
    spec = get_variant("lightning")
    worst = 0.0
    for seed in range(3):
        call = make_inputs(
            spec,
            batch=1,
            tokens=16384,
            heads=1,
            value_heads=2,
            sizes={"K": 128, "V": 128},
            dtype=torch.bfloat16,
            seed=seed,
        )
        g = torch.Generator().manual_seed(seed + 1)
        like = call.inputs["v"]
        grad = torch.randn(like.shape, generator=g).to(like.dtype)
        q, k = (call.inputs[name].detach().expand(-1, -1, 2, -1) for name in "qk")
        v, gate = (call.inputs[name].detach() for name in "vg")
        gate.requires_grad_()
        out = plain_chunk.simple_gla(q, k, v, gate, **call.scalars)
        (got,) = torch.autograd.grad(out, gate, grad)
        exact = {n: x.detach().double().requires_grad_() for n, x in call.inputs.items()}
        wanted = compile(spec)(**exact, **call.scalars)[0]
        (want,) = torch.autograd.grad(wanted, exact["g"], grad.double())
        report = measure(got, want, dim=1)
        assert report.ratio < BOUNDS[torch.bfloat16].of("dg")
        worst = max(worst, report.worst_chunk)
    assert worst > 3 * BOUNDS[torch.bfloat16].of("dg")
