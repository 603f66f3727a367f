"""States by kernels in what people run: checkpointing, accumulation, training, failures."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from flexla_dist.testing.ranks import run_ranks

from . import device_parallel_programs as programs
from .device_parallel_cases import PRELOAD

BOUND = 1e-5
RUNS = {
    "two micro-batches": (False, False, None),
    "micro-batches in flight": (False, True, None),
    "recomputed": (True, True, None),
}


@pytest.mark.parametrize("name", RUNS)
def test_layers_equal_one_process(name: str) -> None:
    found = run_ranks(programs.forward_backward, 2, *RUNS[name], "cpu", preload=PRELOAD)
    forward, backward = 2 * 2, 2 * 2  # layers and micro-batches: recomputing exchanges nothing
    for worst, seen in found:
        assert worst < BOUND
        assert (seen.count(False), seen.count(True)) == (forward, backward)


@pytest.mark.parametrize("wanted", [0, 2])
def test_gradient_wanted_on_one_rank_only(wanted: int) -> None:
    found = run_ranks(programs.forward_backward, 3, False, False, wanted, "cpu", preload=PRELOAD)
    assert max(worst for worst, _ in found) < BOUND
    assert all(seen.count(True) == 4 for _, seen in found)


@pytest.mark.parametrize(
    ("variant", "size", "conv_width"),
    [("gated_delta_rule", 2, 4), pytest.param("kda", 3, 0, marks=pytest.mark.long)],
)
def test_training_equals_one_process(variant: str, size: int, conv_width: int) -> None:
    steps, length = 20, 24
    losses, parameters = programs.train_whole(variant, steps, length, conv_width, "cpu")
    assert losses[-1] < 0.8 * losses[0]
    ranks = run_ranks(
        programs.train_shards, size, variant, steps, length, conv_width, "cpu", preload=PRELOAD
    )
    for own, values in ranks:
        assert own == pytest.approx(losses, rel=1e-5)
        for p, q in zip(values, parameters, strict=True):
            assert programs.relative(p, q) < BOUND


def test_refusals() -> None:
    for said in run_ranks(programs.refusals, 2, preload=PRELOAD):
        assert "log-scaled" in said["log-scaled"] and "use backend='host'" in said["log-scaled"]
        assert "torch.float64" in said["float64"] and "float32" in said["float64"]
        assert said["auto"].startswith("host engine, chain"), said["auto"]
        assert "the tensors are on cpu" in said["auto"]


def test_all_ranks_refuse_what_one_cannot_do() -> None:
    for text in run_ranks(programs.one_rank_without_interpreter, 2, preload=PRELOAD):
        assert "rank 1: the tensors are on the CPU" in text and "TRITON_INTERPRET=1" in text


def test_ranks_that_ask_for_different_engines_are_told() -> None:
    for text in run_ranks(programs.other_backend, 2, preload=PRELOAD):
        assert "backend='host' on rank 0" in text and "backend='device' on rank 1" in text, text


def test_late_rank_is_named_on_every_rank_and_the_next_step_is_right() -> None:
    for text, right in run_ranks(programs.late_rank, 3, preload=PRELOAD):
        assert "rank 1 did not come in time" in text, text
        assert "strategy" in text and "backward" in text, text
        assert right


def test_late_rank_is_named_after_a_forward_pass() -> None:
    for text in run_ranks(programs.late_rank_without_gradients, 2, preload=PRELOAD):
        assert "did not come in time" in text, text


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_others_hear_of_a_rank_that_fails(how: str) -> None:
    found = run_ranks(
        programs.failing_rank, 3, how, expect_errors=True, preload=PRELOAD, timeout=60
    )
    expected = "Died" if how == "killed" else "ShardingError"
    assert found[1].type == expected, found
    for rank in (0, 2):
        assert found[rank].type == "RemoteRankError", found
        assert "rank 1" in found[rank].message, found
