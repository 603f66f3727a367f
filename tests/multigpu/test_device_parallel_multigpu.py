"""States by kernels between the GPUs of this host."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.testing.ranks import run_ranks

from ..gpu import device_parallel_streams as streams
from ..interpret import device_parallel_cases as cases
from ..interpret import device_parallel_programs as programs
from ..interpret.device_parallel_cases import STRATEGIES, Case

# Longer than the ranks may take: the limit of a test ends all tests.
pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]
BACKEND = "cpu:gloo,cuda:nccl"
BOUND = 5e-5  # TF32x3 products, chained
GRADIENTS = 2e-4  # of gates, whose sums cancel


def shards(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of every rank, one of them zero, and documents on and off the cuts."""
    lengths = tuple(0 if rank == 2 else 100 + 10 * rank for rank in range(size))
    total = sum(lengths)
    return lengths, (0, 40, lengths[0], lengths[0] + 1, total - 5, total)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_all_gpus(strategy: str) -> None:
    size = min(8, torch.cuda.device_count())
    lengths, packed = shards(size)
    names = ("simple_gla", "gla", "gated_delta_rule")
    chosen = [Case(n, strategy, lengths, batch=2, executor="triton", width=64) for n in names]
    chosen += [Case(n, strategy, lengths, packed, executor="triton", width=64) for n in names]
    ranks = run_ranks(cases.run_shards, size, chosen, "apart", "auto", backend=BACKEND, timeout=300)
    for number, case in enumerate(chosen):
        found = cases.errors(case, [values[number] for values in ranks])
        for name, error in found.items():
            assert error < (GRADIENTS if "grad." in name else BOUND), (case, name, error)


@pytest.mark.timeout(400)
def test_training_equals_one_process() -> None:
    steps, length = 20, 256
    losses, parameters = programs.train_whole("gated_delta_rule", steps, length, 4, "cuda:0")
    size = min(8, torch.cuda.device_count())
    ranks = run_ranks(
        programs.train_shards,
        size,
        "gated_delta_rule",
        steps,
        length,
        4,
        "apart",
        backend=BACKEND,
        timeout=300,
    )
    for own, values in ranks:
        assert own == pytest.approx(losses, rel=1e-3)
        for p, q in zip(values, parameters, strict=True):
            assert programs.relative(p, q) < 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_graph(strategy: str) -> None:
    size = min(8, torch.cuda.device_count())
    found = run_ranks(streams.captured, size, strategy, "apart", backend=BACKEND, timeout=240)
    assert max(found) == 0.0, found


@pytest.mark.parametrize("backend", ["host", "device"])
def test_time_of_engines(backend: str) -> None:
    """`pytest -s -k time` prints it; the check at the end of backward is in it."""
    size = min(8, torch.cuda.device_count())
    plan, time = run_ranks(streams.timed, size, backend, "apart", backend=BACKEND, timeout=240)[-1]
    print(f"\n{size} ranks of {streams.LONG}: {time:.3f} ms forward and backward by {plan}")
    assert plan.startswith(backend)


def test_two_streams() -> None:
    size = min(8, torch.cuda.device_count())
    assert all(run_ranks(streams.side_by_side, size, "apart", backend=BACKEND, timeout=240))
