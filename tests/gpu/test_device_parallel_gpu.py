"""States by kernels between two processes on one GPU, through torch's symmetric memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.comm.heaps.torch_symm import OVERLAP
from flexla_dist.testing.ranks import run_ranks

from ..interpret import device_parallel_cases as cases
from ..interpret import device_parallel_programs as programs
from ..interpret.device_parallel_cases import STRATEGIES, Case
from . import device_parallel_streams as streams

pytestmark = pytest.mark.gpu
SHARED = {OVERLAP: "1"}
DEVICE = "cuda:0"
BOUND = 5e-5  # TF32x3 products, chained
GRADIENTS = 2e-4  # of gates, whose sums cancel


def worst_of(size: int, chosen: list[Case], backend: str) -> dict[str, float]:
    ranks = run_ranks(
        cases.run_shards, size, chosen, DEVICE, backend, environment=SHARED, timeout=300
    )
    found: dict[str, float] = {}
    for number, case in enumerate(chosen):
        for name, error in cases.errors(case, [values[number] for values in ranks]).items():
            found[f"{case.spec} {case.strategy} {name}"] = error
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_two_processes(strategy: str) -> None:
    lengths, packed = (150, 90), (0, 40, 150, 151, 240)
    names = ("simple_gla", "gla", "gated_delta_rule")
    chosen = [Case(n, strategy, lengths, batch=2, executor="triton", width=32) for n in names]
    chosen += [Case(n, strategy, lengths, packed, executor="triton", width=32) for n in names]
    found = worst_of(2, chosen, "auto")
    print(strategy, max(found.values()), max(found, key=lambda name: found[name]))
    for name, error in found.items():
        assert error < (GRADIENTS if "grad." in name else BOUND), (name, error)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("variant", ["gated_delta_rule", "simple_gla"])
def test_training_equals_one_process(variant: str) -> None:
    steps, length = 20, 256
    losses, parameters = programs.train_whole(variant, steps, length, 4, DEVICE)
    ranks = run_ranks(
        programs.train_shards, 2, variant, steps, length, 4, DEVICE, environment=SHARED, timeout=300
    )
    assert losses[-1] < 0.8 * losses[0]
    for own, values in ranks:
        assert own == pytest.approx(losses, rel=1e-3)
        for p, q in zip(values, parameters, strict=True):
            assert programs.relative(p, q) < 1e-3


@pytest.mark.parametrize("run", [(False, True, None), (True, True, None), (False, False, 0)])
def test_layers_equal_one_process(run: tuple) -> None:
    found = run_ranks(programs.forward_backward, 2, *run, DEVICE, environment=SHARED)
    for worst, seen in found:
        assert worst < 1e-4
        assert (seen.count(False), seen.count(True)) == (4, 4)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["chain", "all_gather"])
def test_groups_of_heads(strategy: str) -> None:
    """Within bounds, and the bits of one group where segments are the same."""
    lengths, packed = (150, 90), (0, 40, 150, 151, 240)
    given = {"executor": "triton", "width": 32, "heads": 4, "segment": 1}
    names = ("simple_gla", "gla", "gated_delta_rule")
    chosen = [
        Case(name, strategy, lengths, documents, groups=groups, **given)  # type: ignore[arg-type]
        for name in names
        for documents in (None, packed)
        for groups in (1, 2, (1, 3))
    ]
    ranks = run_ranks(cases.run_shards, 2, chosen, DEVICE, "auto", environment=SHARED, timeout=300)
    for number, case in enumerate(chosen):
        for name, error in cases.errors(case, [values[number] for values in ranks]).items():
            assert error < (GRADIENTS if "grad." in name else BOUND), (case, name, error)
        if case.spec == "gated_delta_rule":
            continue  # products of PyTorch fold its segments: of fewer heads they may round apart
        for values in ranks:
            for name, x in values[number].items():
                assert torch.equal(x, values[number - number % 3][name]), (case, name)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_graph(strategy: str, groups: int | None) -> None:
    found = run_ranks(streams.captured, 2, strategy, DEVICE, groups, environment=SHARED)
    assert max(found) == 0.0, found


@pytest.mark.parametrize("groups", [None, 2])
def test_two_streams(groups: int | None) -> None:
    assert all(run_ranks(streams.side_by_side, 2, DEVICE, groups, environment=SHARED))


def test_late_rank() -> None:
    for text, right in run_ranks(programs.late_rank, 2, DEVICE, environment=SHARED):
        assert "rank 1 did not come in time" in text, text
        assert right


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_others_hear_of_a_rank_that_fails(how: str) -> None:
    found = run_ranks(
        programs.failing_rank, 2, how, DEVICE, expect_errors=True, environment=SHARED, timeout=90
    )
    assert found[1].type == ("Died" if how == "killed" else "ShardingError"), found
    assert found[0].type == "RemoteRankError" and "rank 1" in found[0].message, found
