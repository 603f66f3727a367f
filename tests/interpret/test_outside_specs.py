"""What tests/gpu/test_outside_specs.py does on a GPU, at small size in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flexla_dist.ops.op import compile

from ..unit.outside_specs import OUTSIDE
from ..unit.outside_training import (
    Task,
    largest_difference,
    make_call,
    out_of_bounds,
    run_op,
    run_oracle,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SIZES = {"K": 16, "V": 16, "M": 16}
CHUNK = 16
TASK = Task(keys=4, values=2, pairs=4, batch=4, width=32, heads=1, rate=1e-2)
STEPS = 3


@pytest.mark.parametrize("name", OUTSIDE)
def test_matches_the_recurrence(name: str) -> None:
    spec = OUTSIDE[name]
    documents = (0, 3, 20)
    op = compile(spec, chunk_size=CHUNK)
    call = make_call(spec, torch.float32, "cpu", tokens=20, documents=documents, sizes=SIZES)
    got = run_op(op, call, "triton")
    assert op.last_plan is not None and op.last_plan.executor == "triton"
    bad = out_of_bounds(spec, call, got, run_oracle(spec, call))
    assert not bad, f"{name}: errors (all, worst chunk) out of bounds: {bad}"


def test_bfloat16_keeps_its_bounds() -> None:
    spec = OUTSIDE["two_gates"]
    call = make_call(spec, torch.bfloat16, "cpu", tokens=20, sizes=SIZES)
    got = run_op(compile(spec, chunk_size=CHUNK), call, "triton")
    assert not out_of_bounds(spec, call, got, run_oracle(spec, call))


@pytest.mark.parametrize("name", ["gsa", "lookup_delta", "two_gates"])
def test_training_steps_are_those_of_the_torch_executor(name: str) -> None:
    got, want = (
        train(OUTSIDE[name], executor, TASK, STEPS, "cpu", sizes=SIZES, chunk_size=CHUNK)
        for executor in ("triton", "torch")
    )
    assert largest_difference(got, want) < 1e-4
    for a, b in zip(got.losses, want.losses, strict=True):
        assert abs(a - b) < 1e-4


def test_kernels_alone_learn_one_batch() -> None:
    task = dataclasses.replace(TASK, batches=1, rate=2e-2)
    losses = train(OUTSIDE["two_gates"], "triton", task, 16, "cpu", sizes=SIZES, chunk_size=CHUNK)
    assert losses.losses[0] > 0.6 and losses.losses[-1] < 0.1, losses.losses
