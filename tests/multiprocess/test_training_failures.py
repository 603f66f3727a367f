"""The training program as processes of their own: a mistake or failure ends every rank at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = (
    *("--model.variant=gla", "--model.layers=1", "--model.width=16", "--model.heads=1"),
    *("--model.key_dim=4", "--model.value_dim=4", "--model.mlp_width=16", "--data.length=64"),
    *("--steps=2", "--batch=2", "--log_every=1", "--eval.sequences=2", "--tensorboard=false"),
    *("--sample.tokens=0", "--threads=1", "--device=cpu", "--mesh.cp=2", "--mesh.timeout=30"),
)


def train(folder: Path, *words: str, code: str = "") -> list[tuple[int, str]]:
    """Exit status and error output of both ranks; `code` runs in them first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program = f"{code}\nimport sys\nfrom flexla_dist.train.program import main\nsys.exit(main())"
    settings = [f"--data.paths=[{folder / 'a.py'}]", f"--out={folder / 'run'}", *SMALL, *words]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *settings],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(process.returncode, errors) for process, errors in map(_finish, ranks)]
    finally:
        for process in ranks:
            process.kill()


def _finish(process: subprocess.Popen[str]) -> tuple[subprocess.Popen[str], str]:
    _, errors = process.communicate(timeout=60)
    return process, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text and a finished run of two ranks."""
    folder = tmp_path_factory.mktemp("failures")
    (folder / "a.py").write_text("x = 1\n" * 1000)
    for status, errors in train(folder):
        assert status == 0, errors
    return folder


def test_another_model_ends_both_ranks_in_order(folder: Path) -> None:
    for status, errors in train(folder, "--checkpoint.resume=latest", "--model.width=8"):
        assert status == 2 and "saved with model.width = 16, this run has 8" in errors
        assert "terminate called" not in errors


def test_a_file_that_is_gone_is_named_by_both_ranks(folder: Path) -> None:
    damaged = folder / "run" / "step_00000002" / "__1_0.distcp"
    kept = damaged.rename(folder / "kept")
    try:
        for status, errors in train(folder, "--checkpoint.resume=latest", "--steps=4"):
            assert status == 2 and f"{damaged} is missing" in errors
            assert "Traceback" not in errors
    finally:
        kept.rename(damaged)


@pytest.mark.parametrize(
    "code",
    [
        "import flexla_dist.train.loop as loop\n"
        "def fail(*words): raise RuntimeError('a broken step')\n"
        "loop.clip_gradients = fail",
        "import torch.distributed.checkpoint as dcp\n"
        "def fail(*words): raise OSError(28, 'a broken step')\n"
        "dcp.FileSystemWriter.write_data = fail",
    ],
    ids=["in-a-step", "in-a-save"],
)
def test_a_failure_ends_both_ranks_with_status_one(folder: Path, code: str) -> None:
    for status, errors in train(folder, "--checkpoint.resume=latest", "--steps=4", code=code):
        assert status == 1 and "a broken step" in errors
        assert "terminate called" not in errors


def test_a_backend_that_cannot_be_had_is_refused_with_its_reason(folder: Path) -> None:
    words = ("--mesh.backend=device", f"--out={folder / 'other'}")
    for status, errors in train(folder, *words):
        assert status != 0 and "backend" in errors and "TRITON_INTERPRET" in errors
        assert "terminate called" not in errors
