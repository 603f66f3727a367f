"""Checkpoints of a run: complete or absent, and readable by any number of ranks.

A checkpoint is the folder `step_00000100`: parameters and optimiser state as written by
torch.distributed.checkpoint, with their whole shapes and plain names, and `run.json` with the run's
place and settings. It is written beside its name and renamed when complete; the file `latest` names
the newest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.train.config import TrainConfig

LATEST = "latest"
RUN_FILE = "run.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimiser steps, sequences read, seconds of training."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0


class CheckpointProblem(ValueError):
    """A checkpoint is missing, or does not fit the run."""


def newest(out: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, or None."""
    pointer = out / LATEST
    if not pointer.is_file():
        return None
    folder = out / pointer.read_text().strip()
    return folder if (folder / RUN_FILE).is_file() else None


def find(path: Path) -> Path:
    """The checkpoint at `path`, a run folder or a checkpoint folder; CheckpointProblem if none."""
    if (path / RUN_FILE).is_file():
        return path
    folder = newest(path)
    if folder is None:
        raise CheckpointProblem(
            f"no complete checkpoint in {path}: expected a run folder with the file {LATEST}, or a "
            f"checkpoint folder with {RUN_FILE}"
        )
    return folder


def save(
    config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Write the checkpoint of this step; all ranks call it together. An error leaves the earlier
    checkpoints and `latest` as they were."""
    out = Path(config.out)
    name = f"step_{progress.step:08d}"
    draft = out / f".{name}.draft"
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    with _quiet():
        parameters, moments = get_state_dict(model, optimizer)
        dcp.save({"model": parameters, "optim": moments}, checkpoint_id=draft)
    if dist.get_rank() == 0:
        run = {"progress": dataclasses.asdict(progress), "config": dataclasses.asdict(config)}
        (draft / RUN_FILE).write_text(json.dumps(run, indent=2))
        shutil.rmtree(out / name, ignore_errors=True)
        draft.rename(out / name)
        _point_to(out, name)
        _prune(out, config.checkpoint.keep)
    dist.barrier()
    return out / name


def load(
    folder: Path, config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Read a checkpoint into model and optimiser; all ranks call it together.

    Raises CheckpointProblem where the model, the data or the seed are not those it was saved with.
    """
    run = json.loads((folder / RUN_FILE).read_text())
    _check_same(folder, run["config"], dataclasses.asdict(config))
    with _quiet():
        parameters, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": parameters, "optim": moments}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
    return Progress(**run["progress"])


def load_model(folder: Path) -> LinearAttentionModel:
    """The model of a checkpoint, whole, in this process alone."""
    run = json.loads((folder / RUN_FILE).read_text())
    model = LinearAttentionModel(ModelConfig(**run["config"]["model"]))
    with _quiet():
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    return model.eval()


def clear(out: Path) -> None:
    """Delete the checkpoints of a run folder and what belongs to them."""
    (out / LATEST).unlink(missing_ok=True)
    for folder in (*out.glob("step_*"), *out.glob(".step_*.draft"), out / "tensorboard"):
        shutil.rmtree(folder, ignore_errors=True)


def _check_same(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part in ("model", "data", "seed"):
        before, now = saved[part], wanted[part]
        if before == now:
            continue
        if isinstance(before, dict):
            key = next(name for name in before if before[name] != now.get(name))
            before, now, part = before[key], now[key], f"{part}.{key}"
        raise CheckpointProblem(
            f"{folder} was saved with {part} = {before!r}, this run has {now!r}; "
            "a run goes on with the model, the data and the seed it began with"
        )


def _point_to(out: Path, name: str) -> None:
    pointer = out / f".{LATEST}.draft"
    pointer.write_text(name + "\n")
    os.replace(pointer, out / LATEST)


def _prune(out: Path, keep: int) -> None:
    for folder in sorted(out.glob("step_*"))[: -max(1, keep)]:
        shutil.rmtree(folder, ignore_errors=True)


class _quiet(warnings.catch_warnings):
    """Without torch's deprecation notes about its own internals."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
