"""The grid, the rows and the command line of the scaling program, without ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scaling_runs import weak_scaling  # noqa: E402
from scaling_runs.baselines.traffic import Traffic  # noqa: E402
from scaling_runs.machine import Machine  # noqa: E402
from scaling_runs.weak_grid import Grid, GridProblem, Point, read_grid  # noqa: E402
from scaling_runs.weak_rows import Provenance, Results, byte_columns, measured_times  # noqa: E402
from scaling_runs.weak_time import Times  # noqa: E402

CONFIGS = sorted((ROOT / "configs" / "weak_scaling").glob("*.yaml"))


def provenance(commit: str = "abc") -> Provenance:
    machine = Machine("2026-01-02", commit, "Some GPU", "2.0", "3.0")
    return Provenance(machine, "cpu", 2, "gloo", "torchrun", 4, (0, 0, 1, 1), "panels=2")


POINT = Point(
    system="chain",
    variant="gla",
    mode="weak",
    placement="barrier",
    direction="fwd",
    P=4,
    T=8,
    total=30,
    B=2,
    H=4,
    K=8,
    V=16,
    dtype="float32",
)


def point(**changes: Any) -> Point:
    return replace(POINT, **changes)


def test_list_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        weak_scaling.main(["--list", "--config", str(ROOT / "configs/weak_scaling/cpu.yaml")]) == 0
    )
    text = capsys.readouterr().out
    assert "chain simple_gla weak P=2 T=512 1x8x128x128 float32 fwd barrier" in text
    assert weak_scaling.main(["--systems", "chian"]) == 2
    assert "did you mean 'chain'" in capsys.readouterr().err


def test_every_option_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        weak_scaling.parse(["--help"])
    text = capsys.readouterr().out
    for name in ("--tokens-per-rank", "--node-size", "--rounds", "--check-only", "--config"):
        assert name in text


@pytest.mark.parametrize("path", CONFIGS, ids=[p.stem for p in CONFIGS])
def test_configs_are_grids(path: Path) -> None:
    grid = read_grid(path, {})
    points = grid.points()
    assert len(set(points)) == len(points)
    if path.stem.endswith("_gpus"):
        assert grid.ranks == (int(path.stem.split("_")[0]),)
        weak = next(p for p in points if p.mode == "weak")
        assert (weak.T, weak.B, weak.H, weak.K, weak.V) == (32768, 4, 32, 128, 128)
        assert weak.state_bytes == 8 << 20


def test_sizes_of_a_grid() -> None:
    assert {p.stem for p in CONFIGS} == {
        "cpu",
        "model_check",
        *(f"{n}_gpus" for n in (4, 8, 16, 32, 64, 128)),
    }


def test_points_of_weak_and_strong_scaling() -> None:
    grid = Grid(
        ranks=(2, 4),
        modes=("weak", "strong"),
        tokens_per_rank=(10,),
        total_tokens=(30,),
        directions=("fwd", "fwdbwd"),
        placements=("step", "exchange"),
    ).checked()
    points = grid.points()
    assert {(p.mode, p.P, p.total) for p in points} == {
        ("weak", 2, 20),
        ("weak", 4, 40),
        ("strong", 2, 30),
        ("strong", 4, 30),
    }
    assert {(p.placement, p.direction) for p in points} == {("step", "fwdbwd"), ("exchange", "fwd")}
    assert point().lengths == (8, 8, 7, 7)
    assert point(variant="hgrn").state_bytes == 4 * 2 * 4 * 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"systems": ("chian",)}, "'chian' does not exist"),
        ({"variants": ("glaa",)}, "did you mean|gla"),
        ({"shapes": ("4x32x128",)}, "expected BxHxKxV"),
        ({"ranks": (0,)}, "expected positive numbers"),
        ({"dtype": "int8"}, "expected one of float64"),
        ({"seconds": 0.0}, "expected a positive number"),
    ],
)
def test_wrong_grids_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(GridProblem, match=message):
        read_grid(None, changes)


def test_unknown_settings_of_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("sytems: [chain]\n")
    with pytest.raises(GridProblem, match="no setting 'sytems'"):
        read_grid(path, {})
    with pytest.raises(GridProblem, match="no file"):
        read_grid(tmp_path / "none.yaml", {})


def test_rows_are_resumed(tmp_path: Path) -> None:
    first, second = point(), point(system="lasp")
    results = Results(tmp_path, provenance())
    results.put(first, "ok", measured_times(Times.of([3.0, 1.0, 2.0])))
    results.put(second, "begun", {})
    again = Results(tmp_path, provenance())
    everything = [first, second, point(P=2)]
    assert again.pending(everything, again=False, keep=False) == [point(P=2)]
    assert again.pending(everything, again=True, keep=False) == everything
    newer = Results(tmp_path, provenance("def"))
    assert newer.pending(everything, again=False, keep=False) == everything
    assert newer.pending(everything, again=False, keep=True) == [point(P=2)]
    row = again.store.rows()[0]
    assert (row["median_ms"], row["samples"], row["nodes"]) == ("2.0000", "3", "2")
    assert (row["kind"], row["status"], row["state_bytes"]) == ("measured", "ok", "4096")


def test_columns_of_bytes() -> None:
    found = byte_columns(Traffic(1, 2, 3), None, 20)
    assert found == {"sent_bytes": 1, "received_bytes": 20, "formula_bytes": ""}


def test_percentiles() -> None:
    times = Times.of([float(n) for n in range(11)])
    assert (times.p20_ms, times.median_ms, times.p80_ms, times.samples) == (2.0, 5.0, 8.0, 11)


def test_no_world_is_left_behind() -> None:
    assert not dist.is_initialized()
