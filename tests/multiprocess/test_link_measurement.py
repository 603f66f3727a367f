"""Links measured between processes, the choice that follows, the doctor under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexla_dist.comm import Choice, StateExchanger, Tag, zero_state
from flexla_dist.testing.elements import random_element
from flexla_dist.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
sys.path.insert(0, str(ROOT))

from scaling_runs.link_times import ScanCase, time_scans  # noqa: E402
from scaling_runs.links import cases_of, parse, problems  # noqa: E402

CPU = torch.device("cpu")


def measured(rank: int, world: int, folder: str) -> tuple:
    """The survey with and without kept measurements."""
    os.environ["XDG_CACHE_HOME"] = folder
    exchanger = StateExchanger(timeout=30.0)
    first = exchanger.survey(CPU)
    kept = StateExchanger(timeout=30.0).survey(CPU)
    again = exchanger.survey(CPU, fresh=True)
    assert exchanger.survey(CPU) is again
    exchanger.flush()
    return first, kept, again


def test_links_are_measured_once(tmp_path: Path) -> None:
    found = run_ranks(measured, 3, str(tmp_path))
    first, kept, again = found[0]
    assert all(other == found[0] for other in found)
    assert first == kept
    link = first.links["shared_memory"]
    assert link.measured and 1e-6 < link.alpha < 0.1 and 1e7 < 1 / link.beta < 1e12
    assert link.seconds(8 << 20) > link.seconds(1 << 10)
    assert first.rates.measured and first.carrier == "gloo"
    assert first.topology.heap == "posix_shm" and first.topology.size == 3
    assert again.links["shared_memory"].measured


def scanned(rank: int, world: int, folder: str) -> tuple[list[Choice | None], float]:
    """What "auto" chose for small and large elements, and the largest error of the last scan."""
    os.environ["XDG_CACHE_HOME"] = folder
    auto = StateExchanger(timeout=60.0, node_size=2)
    choices, worst = [], 0.0
    crossing = (True,) * (world - 1)
    for kind in ("scalar", "dense"):
        element = random_element(kind, torch.Generator().manual_seed(rank))
        template = zero_state(element)
        got = auto.prefix(element, crossing, Tag(), template)
        choices.append(auto.last_choice)
        expected = auto.using("chain").prefix(element, crossing, Tag(), template)
        errors = [(a - b).abs().max().item() for a, b in zip(got, expected, strict=True)]
        worst = max(worst, *errors)
    forced = auto.using("all_gather")
    forced.prefix(element, crossing, Tag(), template)
    assert forced.last_choice is None
    auto.flush()
    return choices, worst


def test_auto_follows_the_model_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(scanned, 5, str(tmp_path))
    choices, _ = results[0]
    assert all(other == choices for other, _ in results)
    assert max(worst for _, worst in results) < 1e-12
    for choice in choices:
        assert choice is not None and {e.engine for e in choice.table} == {"host"}
        assert len(choice.table) == 4 and "5 ranks" in choice.reason
        near = min(e.exposed for e in choice.table)
        assert choice.seconds <= max(1.05 * near, near + 1e-6)


def few(rank: int, world: int) -> Choice | None:
    """Small groups ask nobody."""
    auto = StateExchanger(timeout=30.0)
    element = random_element("scalar", torch.Generator().manual_seed(rank))
    auto.prefix(element, (True,) * (world - 1), Tag(), zero_state(element))
    auto.flush()
    return auto.last_choice


def test_few_ranks_take_a_chain() -> None:
    for choice in run_ranks(few, 3):
        assert choice is not None and choice.strategy == "chain" and not choice.table


def timed(rank: int, world: int) -> list:
    """A few scans of small elements."""
    cases = [ScanCase(0.125, "scalar", name, world) for name in ("chain", "all_gather")]
    return time_scans(StateExchanger(timeout=60.0), cases, 5, CPU)


def test_scans_are_timed() -> None:
    found = run_ranks(timed, 2)
    assert found[0] == found[1]
    for time in found[0]:
        assert 0 < time.p20_ms <= time.median_ms <= time.p80_ms < 60000


def test_cases_and_verdicts() -> None:
    assert {c.strategy for c in cases_of(4, 4, ["scalar"])} == {"chain", "log_scan", "all_gather"}
    cases = cases_of(4, 2, ["scalar", "dense"])
    assert len(cases) == 24 and cases[0].heads == 8
    row = {"kind": "scalar", "state_mib": 2.0, "strategy": "chain", "predicted_ms": 1.0}
    good = row | {"median_ms": 1.1, "ratio": 1 / 1.1}
    bad = row | {"strategy": "log_scan", "median_ms": 3.0, "ratio": 1 / 3.0, "predicted_ms": 0.9}
    assert problems([good], True) == [] and len(problems([good, bad], True)) == 1
    assert problems([good, bad], False) == [
        "scalar, 2.0 MiB, chain is predicted slower than log_scan"
    ]
    near = bad | {"median_ms": 1.2}
    assert problems([good, near], False) == []
    with pytest.raises(SystemExit):
        parse(["--kinds", "sparse"])


def start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=100, env=environment, cwd=ROOT
    )


def test_doctor_describes_the_group_that_torchrun_started(tmp_path: Path) -> None:
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2"]
    words = ["doctor", "--strategies", "--kind", "dense", "--state-mib", "0.5"]
    result = start([*launcher, str(BIN / "flexla-dist"), *words], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("Topology") == 1 and "2 ranks on 1 node" in result.stdout
    assert "measured: " in result.stdout and "chosen: chain with the host engine" in result.stdout


def test_doctor_describes_a_cluster(tmp_path: Path) -> None:
    words = ["doctor", "--strategies", "--preset", "h20-ib400", "--ranks", "128", "--kind", "dense"]
    result = start([str(BIN / "flexla-dist"), *words], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "128 ranks on 16 nodes: 16 x 8" in result.stdout and "measured" not in result.stdout
    assert "chosen: hierarchical with the device engine" in result.stdout
    wrong = start([str(BIN / "flexla-dist"), *words, "--state-mib", "0.001"], tmp_path)
    assert wrong.returncode == 2 and "less than one head" in wrong.stderr
    forced = start([str(BIN / "flexla-dist"), *words, "--strategy", "all_gather"], tmp_path)
    assert "chosen: all_gather" in forced.stdout


def test_links_program_asks_for_torchrun() -> None:
    result = start([sys.executable, "scaling_runs/links.py"], ROOT)
    assert result.returncode == 2 and "start it with torchrun" in result.stderr
