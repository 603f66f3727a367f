"""The scaling program on two ranks, and a training step by other systems than ours."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flexla_dist.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scaling_runs.baselines import Settings  # noqa: E402
from scaling_runs.weak_cases import CheckFailed, Setup, check_system  # noqa: E402
from scaling_runs.weak_grid import Point  # noqa: E402
from scaling_runs.weak_step import StepCase  # noqa: E402

SYSTEMS = ("chain", "lasp", "lasp2", "ulysses")


def point(system: str, placement: str = "step") -> Point:
    return Point(
        system=system,
        variant="gated_delta_rule",
        mode="weak",
        placement=placement,
        direction="fwdbwd",
        P=2,
        T=17,
        total=33,
        B=1,
        H=2,
        K=8,
        V=8,
        dtype="float32",
    )


def setup() -> Setup:
    return Setup(dist.group.WORLD, torch.device("cpu"), Settings(timeout=30.0), (0, 0))


def step_results(rank: int, world: int) -> dict[str, tuple[float, list[torch.Tensor]]]:
    """Loss summed over the ranks and averaged gradients of a step, by system."""
    found = {}
    for system in SYSTEMS:
        case = StepCase(point(system), setup(), layers=2)
        loss = case.loss()
        loss.backward()
        gradients = [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
        total = loss.detach().clone()
        dist.all_reduce(total)
        found[system] = (float(total), gradients)
    return found


def test_a_step_is_the_same_by_every_system() -> None:
    first, second = run_ranks(step_results, 2)
    loss, gradients = first["chain"]
    for system in SYSTEMS:
        for other_loss, other in (first[system], second[system]):
            assert abs(other_loss - loss) < 1e-4 * loss
            assert len(other) == len(gradients)
            for a, b in zip(other, gradients, strict=True):
                assert (a - b).norm() <= 2e-4 * b.norm() + 1e-7, system


def wrong_system(rank: int, world: int) -> str:
    """What is said of a system whose results are wrong: a floor that claims to be exact."""
    from dataclasses import replace

    from scaling_runs.baselines import systems

    floor = systems.SYSTEMS["ideal_best"]
    systems.SYSTEMS["ideal_best"] = replace(floor, exact=True)
    try:
        check_system(point("ideal_best"), setup())
    except CheckFailed as why:
        return str(why)
    finally:
        systems.SYSTEMS["ideal_best"] = floor
    return ""


def test_a_wrong_system_is_not_timed() -> None:
    for text in run_ranks(wrong_system, 2):
        assert "ideal_best gated_delta_rule on 2 ranks: an error is" in text


def test_program_on_two_ranks(tmp_path: Path) -> None:
    """Measured, refused; bytes as by formula."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        str(ROOT / "scaling_runs" / "weak_scaling.py"),
        *(
            "--systems",
            "chain,lasp2,zeco,chain_device",
            "--variants",
            "gated_delta_rule",
            "--ranks",
            "2,4",
        ),
        *("--tokens-per-rank", "64", "--shapes", "1x2x8x8", "--dtype", "float32"),
        *("--seconds", "0.01", "--placements", "barrier,exchange", "--directions", "fwd"),
        *("--results", str(tmp_path), "--commit", "one"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "points on [4] are left out" in ran.stdout
    with next(tmp_path.glob("*.csv")).open() as file:
        rows = list(csv.DictReader(file))
    status = {(row["system"], row["placement"]): row["status"] for row in rows}
    assert status["chain", "barrier"] == status["lasp2", "exchange"] == "ok"
    assert status["zeco", "barrier"] == status["chain_device", "barrier"] == "refused"
    [kernels] = [r for r in rows if (r["system"], r["placement"]) == ("chain_device", "barrier")]
    assert kernels["note"].startswith("chain_device needs the device engine: rank 0")
    [chain] = [r for r in rows if (r["system"], r["placement"]) == ("chain", "barrier")]
    assert int(chain["received_bytes"]) == int(chain["formula_bytes"]) == 4 * 2 * 8 * 8 + 64
