"""M of a segment where it is dense: it has as many columns as rows, however wide the state is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec import functional as F
from flexla_dist.testing.inputs import CallInputs, make_inputs

from ..unit.compiled import call_op, compare, results

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore::DeprecationWarning")


def wy(k: Any, v: Any, beta: Any) -> tuple[Any, Any]:
    weights = beta[:, None]
    T = F.unit_tril_inverse((weights * (k @ k.T)).tril(-1))
    return T @ (weights * v), T @ (weights * k)


def two_chunk(x: Any, p: Any) -> dict[str, Any]:
    U, W = wy(x.k, x.v, x.beta)
    Y, Z = wy(0.2 * x.n, x.k, x.beta)
    scores, near = (x.q @ x.k.T).tril(), (x.n @ x.n.T).tril()
    return {"q": x.q, "k": x.k, "n": 0.2 * x.n, "near": near, "s": scores} | {
        "U": U, "W": W, "Y": Y, "Z": Z,
    }  # fmt: skip


def two_decay(S: Any, c: Any) -> dict[str, Any]:
    return {"A": S.A + c.k.T @ (c.U - c.W @ S.A), "B": S.B + c.n.T @ (c.Y - c.Z @ S.B)}


def two_merge(S: Any, c: Any) -> Any:
    keys = c.n @ S.B + c.near @ (c.Y - c.Z @ S.B)
    return (c.q + keys) @ S.A + c.s @ (c.U - c.W @ S.A)


TWO_DELTAS = LinearAttentionSpec(
    name="two_deltas",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "n": "C M", "beta": "C"},
    state={"A": "K V", "B": "M K"},
    chunk_mode=two_chunk,
    decay_mode=two_decay,
    merge_mode=two_merge,
)


def sized_chunk(x: Any, p: Any) -> dict[str, Any]:
    U, W = wy(x.k, x.v, x.beta)
    size = 1 / (1 + (x.v * x.v).sum(-1))
    return {"q": x.q, "s": (x.q @ x.k.T).tril(), "U": U, "W": W, "k": x.k * size[:, None]}


SIZED_WRITES = LinearAttentionSpec(
    name="sized_writes",
    inputs={"q": "C K @qk", "k": "C K @qk", "v": "C V", "beta": "C"},
    chunk_mode=sized_chunk,
    decay_mode=lambda S, c: S + c.k.T @ (c.U - c.W @ S),
    merge_mode=lambda S, c: c.q @ S + c.s @ (c.U - c.W @ S),
)


def found(op: LinearAttentionOp, call: CallInputs) -> dict[str, Tensor]:
    return results(op.spec, call, *call_op(op, call))


@pytest.mark.parametrize("sizes", [{"K": 20, "V": 8, "M": 6}, {"K": 16, "V": 32, "M": 33}])
@pytest.mark.parametrize("spec", [TWO_DELTAS, SIZED_WRITES], ids=lambda spec: spec.name)
def test_maps_of_states_of_any_width(spec: LinearAttentionSpec, sizes: dict[str, int]) -> None:
    call = make_inputs(spec, tokens=40, sizes=sizes, heads=1, value_heads=2, dtype=torch.float32)
    op = compile(spec, executor="triton", chunk_size=16)
    executor: Any = op.executor("triton")
    executor.segment_chunks = 1
    want = found(compile(spec, executor="torch", chunk_size=16), call.to(torch.float64))
    reports = compare(found(op, call), want, call)
    bad = {name: report.ratio for name, report in reports.items() if not report.within(1e-5)}
    assert not bad
