"""The model's programs against real ranks and messages around local parts of known length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexla_dist.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs.model.clusters import Link
from scaling_runs.model.paced import paced_model, paced_systems

SYSTEMS = (
    *("ideal_best", "ideal_same_plan", "chain", "log_scan", "all_gather", "lasp", "lasp2"),
    *("lasp2_naive", "zeco", "ulysses"),
)


def measure(rank: int, world: int) -> dict[str, float]:
    """Median milliseconds of forward and backward by system."""
    return {name: t.median_ms for name, t in paced_systems(SYSTEMS, 0.01).items()}


def compared(ranks: int) -> dict[str, tuple[float, float]]:
    """Measured and modelled milliseconds, with links as quick as those between processes."""
    measured = run_ranks(measure, ranks)[0]
    links = {kind: Link(5e-4, 1e9) for kind in ("message", "p2p", "gather", "all_to_all")}
    return {s: (found, 1e3 * paced_model(s, ranks, links)) for s, found in measured.items()}


def test_programs_take_no_less_than_their_parts() -> None:
    """However busy the machine is: pauses end no earlier."""
    for system, (found, expected) in compared(4).items():
        assert found >= 0.8 * expected, f"{system}: {found:.0f} ms, modelled {expected:.0f}"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_programs_take_as_long_as_real_ranks(ranks: int) -> None:
    """Within 20%, on a machine with nothing else to do."""
    wrong = [
        f"{system} on {ranks} ranks: {found:.0f} ms, modelled {expected:.0f}"
        for system, (found, expected) in compared(ranks).items()
        if not 0.8 * expected <= found <= 1.2 * expected
    ]
    assert not wrong, "\n".join(wrong)
