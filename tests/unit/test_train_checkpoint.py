"""Checkpoints of one process: which are kept, what a killed save leaves, damaged files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.train import checkpoint
from flexla_dist.train.checkpoint import CheckpointNotWritten, CheckpointProblem, Progress
from flexla_dist.train.config import CheckpointConfig, TrainConfig

MODEL = ModelConfig(variant="gla", layers=1, width=8, heads=1, key_dim=4, value_dim=4, mlp_width=8)


class Killed(BaseException):
    """Stands for a process that ends where it is raised."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(out=str(tmp_path), model=MODEL)


def save(config: TrainConfig, *steps: int, keep: int = 5) -> None:
    torch.manual_seed(0)
    model = LinearAttentionModel(MODEL)
    optimizer = torch.optim.AdamW(model.parameters())
    config = replace(config, checkpoint=CheckpointConfig(keep=keep))
    for step in steps:
        checkpoint.save(config, model, optimizer, Progress(step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_last_is_kept_whatever_its_step(tmp_path: Path, config: TrainConfig) -> None:
    save(config, 4, 8)
    save(config, 6, keep=1)
    assert names(tmp_path) == ["latest", "step_00000006"]
    save(config, 12, 9, keep=2)
    save(config, 3, keep=2)
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000009"]
    assert checkpoint.find(tmp_path).name == "step_00000003"


@pytest.mark.parametrize("cut", ["set aside", "named"])
def test_a_save_of_the_same_step_that_is_killed_loses_nothing(
    tmp_path: Path, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    save(config, 4)
    rename = Path.rename

    def killed(path: Path, target: Path) -> None:
        if path.name.endswith(".draft"):
            if cut == "named":
                rename(path, target)
            raise Killed
        rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", killed)
        save(config, 4)
    found = checkpoint.find(tmp_path)
    assert found.name == (".step_00000004.old" if cut == "set aside" else "step_00000004")
    checkpoint.load_model(found)
    save(config, 4, keep=1)
    assert names(tmp_path) == ["latest", "step_00000004"]


@pytest.mark.parametrize("pointer", [None, "", "step_00000099", "\0"])
def test_without_latest_the_one_saved_last_is_found(
    tmp_path: Path, config: TrainConfig, pointer: str | None
) -> None:
    save(config, 8, 6)
    (tmp_path / "step_00000009").mkdir()
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert checkpoint.find(tmp_path).name == "step_00000006"


def cut_short(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)


def scribble(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(b"\xff" * file.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut_short, r"__0_0\.distcp has 100 bytes, expected at least \d+"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata is missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b"x"), r"\.metadata cannot be read"),
        (lambda folder: (folder / "run.json").write_text("{"), r"run\.json cannot be read"),
        (lambda folder: (folder / "run.json").write_text("[]"), r"run\.json cannot be read"),
        (scribble, r"\*\.distcp cannot be read \(.* \(rank 0\)\)"),
    ],
    ids=["cut", "no-data", "no-metadata", "metadata", "no-json", "json-list", "scribbled"],
)
def test_damage_is_told_with_the_file_and_a_way_on(
    tmp_path: Path, config: TrainConfig, damage: Callable[[Path], object], text: str
) -> None:
    save(config, 4, 8)
    damage(tmp_path / "step_00000008")
    with pytest.raises(CheckpointProblem, match=text) as problem:
        checkpoint.load_model(checkpoint.find(tmp_path))
    assert f"--checkpoint.resume {tmp_path / 'step_00000004'}," in str(problem.value)


def test_a_write_that_fails_is_told(
    tmp_path: Path, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        save(config, 4)
    assert checkpoint.newest(tmp_path) is None
