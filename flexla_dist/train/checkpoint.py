"""Checkpoints of a run: complete or absent, and readable by any number of ranks.

A checkpoint is the folder `step_00000100`: parameters and optimiser state as written by
torch.distributed.checkpoint, with their whole shapes and plain names, and `run.json` with the run's
place and settings. It is written beside its name and renamed when complete; the file `latest` names
the newest. One of the same step is set aside, `.step_00000100.old`, until the new one has its name.
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.train.config import TrainConfig

LATEST = "latest"
RUN_FILE = "run.json"
_METADATA = ".metadata"
_SAME = ("model", "data", "seed")


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimiser steps, sequences read, seconds of training."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0


class CheckpointProblem(ValueError):
    """A checkpoint is missing or damaged, or does not fit the run."""


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written; the earlier ones are as they were."""


def newest(out: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, or None: the one that `latest` names, or
    where it names none, the one saved last."""
    pointer = out / LATEST
    if pointer.is_file():
        name = pointer.read_text(errors="replace").strip()
        if name and (out / name / RUN_FILE).is_file():
            return out / name
    complete = [
        folder for folder in (*_named(out), *_set_aside(out)) if (folder / RUN_FILE).is_file()
    ]
    return max(complete, key=_saved_order, default=None)


def find(path: Path) -> Path:
    """The checkpoint at `path`, a run folder or a checkpoint folder; CheckpointProblem where there
    is none, or its files are damaged."""
    folder = path if (path / RUN_FILE).is_file() else newest(path)
    if folder is None:
        raise CheckpointProblem(
            f"no complete checkpoint in {path}: expected a run folder with the file {LATEST}, or a "
            f"checkpoint folder with {RUN_FILE}"
        )
    _check_intact(folder)
    return folder


def save(
    config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Write the checkpoint of this step; all ranks call it together. An error, or a process killed
    at any moment, leaves a complete checkpoint where there was one."""
    out = Path(config.out)
    name = f"step_{progress.step:08d}"
    draft = out / f".{name}.draft"
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    with _quiet():
        parameters, moments = get_state_dict(model, optimizer)
        try:
            dcp.save({"model": parameters, "optim": moments}, checkpoint_id=draft)
        except CheckpointException as error:
            raise CheckpointNotWritten(
                f"{out / name} was not written: {_causes(error)}; the earlier checkpoints are "
                "intact: make room or mend the folder, and go on with --checkpoint.resume latest"
            ) from None
    if dist.get_rank() == 0:
        orders = [_saved_order(folder)[0] for folder in (*_named(out), *_set_aside(out))]
        run = {
            "order": 1 + max(orders, default=0),
            "progress": dataclasses.asdict(progress),
            "config": dataclasses.asdict(config),
        }
        (draft / RUN_FILE).write_text(json.dumps(run, indent=2))
        _swap_in(draft, out / name)
        _point_to(out, name)
        _prune(out, config.checkpoint.keep, out / name)
    dist.barrier()
    return out / name


def load(
    folder: Path, config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Read a checkpoint into model and optimiser; all ranks call it together.

    Raises CheckpointProblem where files are damaged, or the model, the data or the seed are not
    those it was saved with.
    """
    run = _check_intact(folder)
    _check_same(folder, run["config"], dataclasses.asdict(config))
    with _quiet():
        parameters, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": parameters, "optim": moments}
        _read(state, folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
    return Progress(**run["progress"])


def load_model(folder: Path) -> LinearAttentionModel:
    """The model of a checkpoint, whole, in this process alone."""
    run = _check_intact(folder)
    model = LinearAttentionModel(ModelConfig(**run["config"]["model"]))
    with _quiet():
        state = {"model": get_model_state_dict(model)}
        _read(state, folder, no_dist=True)
    model.load_state_dict(state["model"])
    return model.eval()


def clear(out: Path) -> None:
    """Delete the checkpoints of a run folder and what belongs to them."""
    (out / LATEST).unlink(missing_ok=True)
    for folder in (*_named(out), *_set_aside(out), *_drafts(out), out / "tensorboard"):
        shutil.rmtree(folder, ignore_errors=True)


def _check_same(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for part in _SAME:
        before, now = saved[part], wanted[part]
        if before == now:
            continue
        if isinstance(before, dict):
            keys = {**now, **before}
            key = next(name for name in keys if before.get(name) != now.get(name))
            before, now, part = before.get(key), now.get(key), f"{part}.{key}"
        raise CheckpointProblem(
            f"{folder} was saved with {part} = {before!r}, this run has {now!r}; "
            "a run goes on with the model, the data and the seed it began with"
        )


def _point_to(out: Path, name: str) -> None:
    pointer = out / f".{LATEST}.draft"
    pointer.write_text(name + "\n")
    os.replace(pointer, out / LATEST)


def _swap_in(draft: Path, folder: Path) -> None:
    """Give the draft its name; at every moment a complete checkpoint has a name that is read."""
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    draft.rename(folder)
    _delete(old)


def _prune(out: Path, keep: int, saved: Path) -> None:
    """Delete what `saved`, written last, leaves to delete: all but the `keep` saved last."""
    others = sorted((path for path in _named(out) if path != saved), key=_saved_order)
    spare = others[: max(0, len(others) + 1 - max(1, keep))]
    for folder in (*spare, *_set_aside(out), *_drafts(out)):
        _delete(folder)


def _delete(folder: Path) -> None:
    """Delete a checkpoint; cut short, it leaves none that looks complete."""
    (folder / RUN_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _named(out: Path) -> list[Path]:
    return sorted(out.glob("step_*"))


def _set_aside(out: Path) -> list[Path]:
    return sorted(out.glob(".step_*.old"))


def _drafts(out: Path) -> list[Path]:
    return sorted(out.glob(".step_*.draft"))


def _saved_order(folder: Path) -> tuple[int, str]:
    """Sorts the checkpoints of a run by when they were saved, unreadable ones first."""
    try:
        order = int(json.loads((folder / RUN_FILE).read_text()).get("order", 0))
    except (OSError, ValueError, TypeError, AttributeError):
        order = -1
    return order, folder.name.removeprefix(".")


def _check_intact(folder: Path) -> dict[str, Any]:
    """run.json of a checkpoint; CheckpointProblem where a file of it is missing, cut or no such
    file."""
    run = _read_run(folder)
    try:
        stored = dcp.FileSystemReader(folder).read_metadata().storage_data or {}
        ends: dict[str, int] = {}
        for place in stored.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    except FileNotFoundError:
        raise _damaged(folder, _METADATA, "is missing") from None
    except Exception as error:
        raise _damaged(folder, _METADATA, f"cannot be read ({_told(error)})") from None
    for name, end in sorted(ends.items()):
        if not (folder / name).is_file():
            raise _damaged(folder, name, "is missing")
        size = (folder / name).stat().st_size
        if size < end:
            raise _damaged(folder, name, f"has {size} bytes, expected at least {end}")
    return run


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        run = json.loads((folder / RUN_FILE).read_text())
        Progress(**run["progress"])
        ModelConfig(**run["config"]["model"])
        missing = [part for part in _SAME if part not in run["config"]]
    except FileNotFoundError:
        raise _damaged(folder, RUN_FILE, "is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(folder, RUN_FILE, f"cannot be read ({_told(error)})") from None
    if missing:
        raise _damaged(folder, RUN_FILE, f"does not tell {', '.join(missing)}")
    return run


def _read(state: dict[str, Any], folder: Path, no_dist: bool = False) -> None:
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    except CheckpointException as error:
        raise _damaged(folder, "*.distcp", f"cannot be read ({_causes(error)})") from None


def _damaged(folder: Path, file: str, what: str) -> CheckpointProblem:
    others = [path for path in _named(folder.parent) if path != folder]
    others = [path for path in others if (path / RUN_FILE).is_file()]
    other = str(max(others, key=_saved_order)) if others else "FOLDER"
    return CheckpointProblem(
        f"the checkpoint is damaged: {folder / file} {what}; copy it again from where it is whole, "
        f"go on from another one with --checkpoint.resume {other}, or start anew with "
        "--checkpoint.overwrite true"
    )


def _causes(error: CheckpointException) -> str:
    """What went wrong on which rank, each cause once."""
    causes: dict[str, list[str]] = {}
    for rank, (cause, _) in error.failures.items():
        causes.setdefault(_told(cause), []).append(str(rank))
    return "; ".join(f"{what} (rank {', '.join(ranks)})" for what, ranks in causes.items())


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


class _quiet(warnings.catch_warnings):
    """Without torch's deprecation notes about its own internals."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
