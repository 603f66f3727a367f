"""The generated kernels of every spec, forward and backward, against the token recurrence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.budget import BOUNDS
from flexla_dist.testing.inputs import CallInputs, make_inputs

from ..unit.compiled import DISTINCT, SPECS, call_op, call_oracle, compare, graphs_of, results

# A value that overflows or is not a number anywhere in a kernel, used or not, is a mistake.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore::DeprecationWarning")

PLAIN = [name for name in DISTINCT if SPECS[name].log_scaled is None]
FP32 = BOUNDS[torch.float32].output
# A sum over all tokens, small beside its terms. Mamba2's log decays add up to -100 in a chunk,
# where float32 has steps of 8e-6: so far off are the decays between neighbours, and all that is
# made of them. One case in thirteen is above 5e-6; exponents in float64 would bring it to 1e-6.
EXPONENTS = {"dA_log": 2e-5}


@dataclass(frozen=True)
class Case:
    """Arguments of a call; `segment` cuts scans into segments of that many chunks."""

    tokens: int
    batch: int = 1
    heads: int = 1
    value_heads: int = 2
    K: int = 16
    V: int = 24
    documents: tuple[int, ...] = ()
    strided: bool = False
    gate_scale: float = 1.0
    chunk_size: int | None = None
    segment: int | None = None


CASES = {
    "one token": Case(1, batch=2),
    "15 tokens": Case(15, K=20, V=16),
    "64 tokens": Case(64, heads=2),
    "65 tokens": Case(65, strided=True),
    "packed": Case(40, documents=(0, 0, 1, 17, 17, 40, 40), chunk_size=16),
    "steep gates": Case(32, K=16, V=16, gate_scale=30.0),
    "column tiles": Case(20, batch=2, V=72, chunk_size=16),
    "segments": Case(50, chunk_size=16, segment=2, K=20, V=24),
    "packed segments": Case(40, documents=(0, 3, 3, 40), chunk_size=16, segment=1),
}
LONG_CASES = {
    "200 tokens": Case(200, batch=2, heads=2, value_heads=4),
    "200 packed": Case(200, heads=2, value_heads=2, documents=(0, 64, 64, 65, 200)),
    "wide": Case(65, K=64, V=100),
    "uneven": Case(65, K=100, V=36, heads=3, value_heads=3),
}


def make_call(name: str, case: Case) -> CallInputs:
    call = make_inputs(
        SPECS[name],
        batch=case.batch,
        tokens=case.tokens,
        heads=case.heads,
        value_heads=case.value_heads,
        sizes={"K": case.K, "V": case.V, "D": case.V, "M": 16 if case.K == 16 else 12},
        dtype=torch.float32,
        cu_seqlens=torch.tensor(case.documents) if case.documents else None,
        gate_scale=case.gate_scale,
    )
    if not case.strided:
        return call
    return dataclasses.replace(call, inputs={n: strided(x) for n, x in call.inputs.items()})


def strided(x: Tensor) -> Tensor:
    """The same numbers, tokens and heads exchanged in memory."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def operator(name: str, case: Case) -> LinearAttentionOp:
    op = LinearAttentionOp(graphs_of(name), "triton", case.chunk_size)
    executor: Any = op.executor("triton")
    assert isinstance(executor, TritonExecutor)
    executor.segment_chunks = case.segment
    return op


def check(name: str, case: Case) -> None:
    call, spec = make_call(name, case), SPECS[name]
    got = results(spec, call, *call_op(operator(name, case), call))
    exact = call.to(torch.float64)
    want = results(spec, exact, *call_oracle(spec, exact))
    reports = compare(got, want, call)
    bad = {
        key: (report.ratio, report.worst_chunk)
        for key, report in reports.items()
        if not report.within(EXPONENTS.get(key, FP32))
    }
    assert not bad, f"{name}: errors (all, worst chunk) out of bounds: {bad}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", PLAIN)
def test_matches_the_recurrence(name: str, case: Case) -> None:
    check(name, case)


@pytest.mark.parametrize("name", ["retention", "lightning"])
def test_variants_that_share_a_graph(name: str) -> None:
    check(name, CASES["packed"])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LONG_CASES.values(), ids=LONG_CASES.keys())
@pytest.mark.parametrize("name", PLAIN)
def test_matches_the_recurrence_on_larger_calls(name: str, case: Case) -> None:
    check(name, case)


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_same_call_same_bits(name: str) -> None:
    case = CASES["packed"]
    call, spec = make_call(name, case), SPECS[name]
    op = operator(name, case)
    first = results(spec, call, *call_op(op, call))
    second = results(spec, call, *call_op(op, call))
    for key, x in first.items():
        assert torch.equal(x, second[key]), key


def test_no_tokens() -> None:
    call = make_call("gla", Case(0, batch=2))
    output, state = call_op(operator("gla", Case(0)), call)
    assert output.shape == (2, 0, 2, 24)
    assert torch.equal(state, call.initial_state)  # type: ignore[arg-type]


def test_gradient_that_is_not_contiguous() -> None:
    case = CASES["64 tokens"]
    call, spec = make_call("simple_gla", case), SPECS["simple_gla"]
    exact = call.to(torch.float64)
    seed = torch.randn(1, 2, 24, 64).permute(0, 3, 1, 2)
    output, _ = call_op(operator("simple_gla", case), call)
    reference, _ = call_oracle(spec, exact)
    got = torch.autograd.grad(output, list(call.inputs.values()), seed)
    want = torch.autograd.grad(reference, list(exact.inputs.values()), seed.double())
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
