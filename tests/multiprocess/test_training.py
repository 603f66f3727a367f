"""The training program on several ranks: the same run however it is cut, and from checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.testing.ranks import run_ranks
from flexla_dist.train import checkpoint
from flexla_dist.train.arguments import parse
from flexla_dist.train.launch import Ranks
from flexla_dist.train.program import train

PRELOAD = ("flexla_dist.train.program",)
STEPS = 20
SMALL = """
seed: 3
steps: 20
batch: 4
log_every: 1
tensorboard: false
model: {layers: 2, width: 32, heads: 2, key_dim: 8, value_dim: 8, mlp_width: 48}
data: {length: 90, suffixes: [.txt], held_out: 0.2}
optim: {lr: 0.01, warmup: 4, clip: 1.0}
eval: {sequences: 4}
sample: {tokens: 0}
"""


def train_on_ranks(rank: int, world: int, words: list[str]) -> float:
    result = train(parse(words), Ranks(rank, world, rank, torch.device("cpu")))
    return result.bits_per_byte


def run(folder: Path, out: str, world: int, **settings: Any) -> list[dict[str, float]]:
    """Train on `world` ranks; the metrics of every step, and the held-out loss at the end."""
    words = ["--config", str(folder / "small.yaml"), "--out", str(folder / out)]
    words += [f"--data.paths=[{folder / 'text'}]"]
    words += [f"--{key.replace('__', '.')}={value}" for key, value in settings.items()]
    bits = run_ranks(train_on_ranks, world, words, preload=PRELOAD)
    assert len(set(bits)) == 1, f"ranks evaluated differently: {bits}"
    lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_same(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    steps = [row["step"] for row in got]
    assert steps == [row["step"] for row in expected][-len(steps) :]
    for mine, theirs in zip(got, expected[-len(got) :], strict=True):
        for name in ("loss", "grad_norm", "held_out_bits_per_byte"):
            if name in theirs:
                error = abs(mine[name] - theirs[name])
                assert error < 1e-4, f"step {mine['step']}, {name}: {mine[name]} and {theirs[name]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with settings and text: lines of words, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "small.yaml").write_text(SMALL)
    (folder / "text").mkdir()
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    source = random.Random(0)
    for number in range(12):
        text = " ".join(source.choice(words) for _ in range(source.randrange(20, 260)))
        (folder / "text" / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, float]]:
    return run(folder, "alone", 1)


def test_it_learns(alone: list[dict[str, float]]) -> None:
    losses = [row["loss"] for row in alone if "loss" in row]
    assert len(losses) == STEPS and losses[0] > 5.0 and losses[-1] < 4.0
    assert [row["step"] for row in alone if "held_out_bits_per_byte" in row] == [STEPS]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"mesh__cp": 2}),
        (4, {"mesh__cp": 4}),
        (4, {"mesh__cp": 2, "mesh__dp": 2}),
        (2, {"mesh__cp": 2, "mesh__wrapper": "fsdp", "checkpoint_activations": "true"}),
        (2, {"mesh__cp": 2, "accumulation": 4, "mesh__strategy": "all_gather"}),
        (4, {"mesh__cp": 2, "mesh__wrapper": "fsdp", "accumulation": 2}),
        (3, {"mesh__cp": 3, "mesh__strategy": "log_scan", "checkpoint_activations": "true"}),
    ],
    ids=["cp2", "cp4", "dp2xcp2", "cp2-fsdp-ac", "cp2-accumulated", "dp2xcp2-fsdp", "cp3-ac"],
)
def test_same_curve_on_any_mesh(
    folder: Path, alone: list[dict[str, float]], world: int, settings: dict[str, Any]
) -> None:
    name = "-".join(map(str, settings.values())) + f"-{world}"
    assert_same(run(folder, name, world, **settings), alone)


@pytest.mark.parametrize("variant", ["gla", "mamba2", "kda"])
def test_same_curve_with_packed_documents(folder: Path, variant: str) -> None:
    settings = {"data__packed": "true", "accumulation": 4, "model__variant": variant, "steps": 6}
    whole = run(folder, f"packed-{variant}", 1, **settings)
    assert_same(run(folder, f"packed-{variant}-2", 2, mesh__cp=2, **settings), whole)


def test_resumes_at_another_cp(folder: Path, alone: list[dict[str, float]]) -> None:
    run(folder, "first", 2, mesh__cp=2, checkpoint__every=10, checkpoint__keep=5)
    start = folder / "first" / "step_00000010"
    for world, settings in ((4, {"mesh__cp": 4}), (1, {}), (2, {"mesh__wrapper": "fsdp"})):
        out = f"resumed-{world}"
        got = run(folder, out, world, checkpoint__resume=start, **settings)
        assert [row["step"] for row in got] == [*range(11, STEPS + 1), STEPS]
        assert_same(got, alone)


def test_latest_goes_on_in_the_same_folder(folder: Path, alone: list[dict[str, float]]) -> None:
    run(folder, "going", 2, mesh__cp=2, steps=12, checkpoint__every=5, checkpoint__keep=1)
    kept = sorted(path.name for path in (folder / "going").glob("step_*"))
    assert kept == ["step_00000012"]
    with pytest.raises(AssertionError, match="holds the checkpoint step_00000012"):
        run(folder, "going", 2, mesh__cp=2)
    rows = run(folder, "going", 1, checkpoint__resume="latest", steps=12)
    assert [row["step"] for row in rows] == [*range(1, 13), 12, 12]


def test_checkpoint_is_a_plain_model(folder: Path) -> None:
    run(folder, "plain", 2, mesh__cp=2, mesh__wrapper="fsdp", steps=3)
    found = checkpoint.find(folder / "plain")
    model = checkpoint.load_model(found)
    assert model.config == ModelConfig(
        layers=2, width=32, heads=2, key_dim=8, value_dim=8, mlp_width=48
    )
    names = set(LinearAttentionModel(model.config).state_dict())
    assert set(model.state_dict()) == names


@pytest.mark.parametrize(
    ("world", "settings", "text"),
    [
        (3, {"mesh__cp": 2}, "mesh.cp = 2 does not divide the 3 ranks"),
        (2, {"mesh__cp": 2, "mesh__dp": 2}, r"2 \* 2 = 4, but 2 ranks"),
        (2, {"batch": 3}, "batch = 3 is not a multiple of mesh.dp"),
        (2, {"mesh__cp": 2, "checkpoint__resume": "{folder}/none"}, "no complete checkpoint in"),
        (2, {"mesh__cp": 2, "model__variant": "gatd"}, "unknown variant 'gatd'"),
    ],
)
def test_settings_that_do_not_fit(
    folder: Path, world: int, settings: dict[str, Any], text: str
) -> None:
    settings = {key: str(value).format(folder=folder) for key, value in settings.items()}
    with pytest.raises(AssertionError, match=text):
        run(folder, "misfit", world, **settings)
    assert not list((folder / "misfit").glob("step_*"))


def test_another_model_is_refused_and_the_checkpoint_is_untouched(folder: Path) -> None:
    run(folder, "owner", 1, steps=2)
    before = {p: p.read_bytes() for p in (folder / "owner").rglob("*") if p.is_file()}
    with pytest.raises(AssertionError, match="width = 32, this run has 16"):
        run(folder, "owner", 2, mesh__cp=2, checkpoint__resume="latest", model__width=16)
    after = {p: p.read_bytes() for p in (folder / "owner").rglob("*") if p.is_file()}
    assert before == after


def train_with_a_full_disk(rank: int, world: int, words: list[str]) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left on device")

    if rank == 1:
        dcp.FileSystemWriter.write_data = fail
    train_on_ranks(rank, world, words)


def test_a_save_that_fails_leaves_the_earlier_checkpoint(folder: Path) -> None:
    run(folder, "disk", 2, mesh__cp=2, steps=2)
    words = ["--config", str(folder / "small.yaml"), "--out", str(folder / "disk")]
    words += [f"--data.paths=[{folder / 'text'}]", "--mesh.cp=2", "--steps=4"]
    words += ["--checkpoint.resume=latest"]
    errors = run_ranks(train_with_a_full_disk, 2, words, preload=PRELOAD, expect_errors=True)
    assert all("no space left" in error.message for error in errors)
    assert checkpoint.find(folder / "disk").name == "step_00000002"
    assert checkpoint.load_model(folder / "disk" / "step_00000002") is not None
