"""Specs that mix columns, in kernels cut into column tiles, against the token recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.ops.op import compile
from flexla_dist.testing.inputs import make_inputs

from ..unit.column_specs import COLUMN_SPECS
from ..unit.outside_training import out_of_bounds, results_of, run_oracle

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore::DeprecationWarning")


@dataclass(frozen=True)
class Case:
    """Arguments of a call; `segment` cuts scans into segments of that many chunks."""

    tokens: int
    K: int = 16
    V: int = 40
    batch: int = 1
    documents: tuple[int, ...] = ()
    chunk_size: int | None = 16
    segment: int | None = None


CASES = {
    "one token": Case(1, batch=2),
    "15 tokens": Case(15, K=20, V=16),
    "three column tiles": Case(20, batch=2, V=72),
    "64 tokens": Case(64, V=72, chunk_size=None),
    "65 tokens": Case(65, V=80, chunk_size=64),
    "200 tokens": Case(200, V=40, chunk_size=64),
    "packed": Case(40, V=72, documents=(0, 0, 1, 17, 17, 40, 40)),
    "segments": Case(50, K=20, V=72, segment=2),
    "packed segments": Case(40, V=72, documents=(0, 3, 3, 40), segment=1),
    "row tiles": Case(33, K=72, V=72, segment=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", COLUMN_SPECS)
def test_matches_the_recurrence(name: str, case: Case) -> None:
    spec = COLUMN_SPECS[name]
    call = make_inputs(
        spec,
        batch=case.batch,
        tokens=case.tokens,
        heads=1,
        value_heads=2,
        sizes={"K": case.K, "V": case.V, "M": 16},
        dtype=torch.float32,
        cu_seqlens=torch.tensor(case.documents) if case.documents else None,
    )
    op = compile(spec, chunk_size=case.chunk_size)
    executor: Any = op.executor("triton")
    assert isinstance(executor, TritonExecutor)
    executor.segment_chunks = case.segment
    output, state = op(
        **call.inputs,
        **call.params,
        **call.scalars,
        initial_state=call.initial_state,
        output_final_state=True,
        cu_seqlens=call.cu_seqlens,
        executor="triton",
    )
    got = results_of(call, output, state)
    bad = out_of_bounds(spec, call, got, run_oracle(spec, call))
    assert not bad, f"{name}: errors (all, worst chunk) out of bounds: {bad}"
