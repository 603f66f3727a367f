"""A rank that is killed or too late between two layers: the others raise, and their GPUs rest.

Every wait has a limit: ranks are ended after 150 s, in which kernels are compiled too, and a thread
waits for the device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.testing.ranks import run_ranks

from . import failing_programs as programs

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(240)]
BACKEND = "cpu:gloo,cuda:nccl"
ENGINES = ("host", "device")
LIMIT = 150.0
SECONDS = 10.0  # from the kill to the error


@pytest.mark.parametrize("engine", ENGINES)
def test_others_hear_of_a_killed_rank(engine: str, tmp_path: Path) -> None:
    size = min(8, torch.cuda.device_count())
    found = run_ranks(
        programs.killed,
        size,
        engine,
        str(tmp_path),
        backend=BACKEND,
        timeout=LIMIT,
        expect_errors=True,
    )
    dead = size // 2
    assert found[dead] is not None and found[dead].message == "signal 9", found
    for rank in {*range(size)} - {dead}:
        assert found[rank].message.startswith("RemoteRankError"), found
        seconds, problems = (tmp_path / f"rank{rank}").read_text().split("\n")
        print(f"\n{engine}, rank {rank}: {float(seconds):.1f} s: {found[rank].message}")
        assert problems == "" and float(seconds) < SECONDS, (rank, seconds, problems)


@pytest.mark.parametrize(("engine", "conv_width"), [("host", 4), ("host", 0), ("device", 4)])
def test_a_late_rank_over_nccl(engine: str, conv_width: int) -> None:
    size = min(8, torch.cuda.device_count())
    ranks = run_ranks(programs.late, size, engine, conv_width, backend=BACKEND, timeout=LIMIT)
    kinds = [kind for kind, _, _, _ in ranks]
    for rank, (kind, text, seconds, problems) in enumerate(ranks):
        print(f"\n{engine}, rank {rank}: {seconds:.1f} s: {kind}: {text}")
        assert problems == "", (rank, problems)
        if rank < size - 1:
            assert kind in ("ExchangeTimeout", "RemoteRankError"), ranks
            assert programs.LATE_LIMIT - 1 < seconds < programs.LATE_SECONDS, ranks
            assert "ExchangeTimeout" in f"{kind}: {text}", ranks
    assert "ExchangeTimeout" in kinds and kinds[-1] != "nothing", ranks


def test_a_late_rank_between_kernels_alone() -> None:
    """Without a convolution nothing goes over NCCL: every rank is told the same at the check."""
    size = min(8, torch.cuda.device_count())
    ranks = run_ranks(programs.late, size, "device", 0, backend=BACKEND, timeout=LIMIT)
    for kind, text, seconds, problems in ranks:
        assert kind == "ExchangeTimeout" and "did not come in time" in text, ranks
        assert seconds < programs.LATE_SECONDS + SECONDS and "busy" not in problems, ranks
