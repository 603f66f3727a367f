"""torchrun, mpirun and a single process start the same run; errors and rank output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
SETTINGS = [
    "--steps=2",
    "--batch=2",
    "--log_every=1",
    "--tensorboard=false",
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=1",
    "--model.key_dim=8",
    "--model.value_dim=8",
    "--data.length=64",
    "--eval.sequences=2",
    "--sample.tokens=8",
]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", "-m", "flexla_dist.train"]


def start(words: list[str], timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment)


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def text_folder(folder: Path) -> str:
    for number in range(4):
        (folder / f"{number}.py").write_text(f"value = {number}\n" * 40)
    return f"--data.paths=[{folder}]"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    """The text and the metrics of one process."""
    folder = tmp_path_factory.mktemp("launch")
    text = text_folder(folder)
    words = [sys.executable, "-m", "flexla_dist.train", "--out", str(folder / "run"), text]
    result = start([*words, *SETTINGS])
    assert result.returncode == 0, result.stderr
    return text, metrics(folder / "run")


def assert_same_losses(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [row.get("loss") for row in got] == pytest.approx(
        [row.get("loss") for row in expected], abs=1e-4
    )


def test_torchrun_shows_one_screen(
    tmp_path: Path, alone: tuple[str, list[dict[str, float]]]
) -> None:
    text, expected = alone
    words = [*TORCHRUN, "--out", str(tmp_path), text, "--mesh.cp=2", *SETTINGS]
    result = start([*words, "--tensorboard=true"])
    assert result.returncode == 0, result.stderr
    assert_same_losses(metrics(tmp_path), expected)
    for line in ("held-out text", "this model", "bigram entropy", "unigram entropy", "checkpoint:"):
        assert result.stdout.count(line) == 1, result.stdout
    assert "2 ranks on cpu: dp 1 x cp 2, each holds 32 of the 64 tokens" in result.stdout
    assert list((tmp_path / "tensorboard").iterdir())
    shown = start([str(BIN / "flexla-dist"), "generate", str(tmp_path), "--tokens", "12"])
    assert shown.returncode == 0 and shown.stdout.startswith("def ")


@pytest.mark.skipif(shutil.which("mpirun", path=str(BIN)) is None, reason="no mpirun in .venv")
def test_mpirun_starts_the_same_run(
    tmp_path: Path, alone: tuple[str, list[dict[str, float]]]
) -> None:
    text, expected = alone
    script = Path(__file__).resolve().parents[2] / "launch" / "mpirun.sh"
    words = [str(script), "--ranks", "2", "--", "--out", str(tmp_path), text, "--mesh.cp=2"]
    result = start([*words, *SETTINGS])
    assert result.returncode == 0, result.stderr
    assert_same_losses(metrics(tmp_path), expected)
    assert result.stdout.count("held-out text") == 1


def test_a_mistake_ends_every_rank_with_its_message(tmp_path: Path) -> None:
    words = [*TORCHRUN, "--out", str(tmp_path / "run"), "--mesh.cpp=2", *SETTINGS]
    result = start(words)
    assert result.returncode != 0
    assert "unknown setting 'mesh.cpp'; the nearest valid one is 'mesh.cp'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_doctor_runs_the_default_path() -> None:
    result = start([str(BIN / "flexla-dist"), "doctor"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "forward and backward: largest error" in result.stdout
    assert "Warning" not in result.stdout + result.stderr


@pytest.mark.long
@pytest.mark.timeout(420)
def test_quickstart_learns_in_four_minutes(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "launch" / "quickstart.sh"
    result = start([str(script), "--out", str(tmp_path)], timeout=400.0)
    assert result.returncode == 0, result.stderr
    rows = metrics(tmp_path)
    assert rows[-1]["held_out_bits_per_byte"] <= 2.1
    assert rows[-2]["seconds"] <= 240.0
