"""What numbers the settings may be, and whether the folder of a run can be written."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from flexla_dist.train.config import TrainConfig

_FROM_ONE = (
    *("steps", "batch", "accumulation", "log_every", "data.length", "eval.sequences"),
    *("checkpoint.keep", "mesh.node_size", "model.layers", "model.width", "model.heads"),
    *("model.value_heads", "model.key_dim", "model.value_dim", "model.mlp_width"),
)
_FROM_ZERO = (
    *("threads", "time_limit", "eval.every", "checkpoint.every", "sample.tokens"),
    *("sample.temperature", "model.conv_width", "optim.lr", "optim.final_lr", "optim.warmup"),
    *("optim.weight_decay",),
)
_ABOVE_ZERO = ("mesh.timeout", "optim.clip", "model.norm_eps")
_BELOW_ONE = ("optim.beta1", "optim.beta2")
_BYTES = 256
_LARGEST_SEED = 2**40


def problem_of_numbers(config: TrainConfig) -> str | None:
    """The first setting that is out of its range, as `name: what is wrong`, or None. Settings that
    are null are in range."""
    ranges = (
        *((name, value >= 1, "at least 1") for name, value in _values(config, _FROM_ONE)),
        *((name, value >= 0, "at least 0") for name, value in _values(config, _FROM_ZERO)),
        *((name, value > 0, "more than 0") for name, value in _values(config, _ABOVE_ZERO)),
        *(
            (name, 0 <= value < 1, "from 0 to below 1")
            for name, value in _values(config, _BELOW_ONE)
        ),
    )
    special = (
        ("data.held_out", 0 < config.data.held_out < 1, "a fraction above 0 and below 1"),
        ("model.vocab", config.model.vocab >= _BYTES, f"at least {_BYTES}, as text is bytes"),
        (
            "seed",
            abs(config.seed) <= _LARGEST_SEED,
            f"-{_LARGEST_SEED} to {_LARGEST_SEED}",
        ),
        (
            "sample.prompt",
            bool(config.sample.prompt) or config.sample.tokens == 0,
            "at least one character to continue, or sample.tokens of 0",
        ),
    )
    for name, fits, expected in (*ranges, *special):
        value = _value(config, name)
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            return f"{name}: got {value!r}, expected {expected}"
    return None


def problem_of_folder(out: Path) -> str | None:
    """Why `out` cannot be a folder that is written to, or None. Leaves nothing behind."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"out: {out} cannot be a folder, as {there} is a file; give --out another folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".writable.", dir=there):
            return None
    except OSError as error:
        return (
            f"out: {out} cannot be written: {error.strerror} in {there}; give --out a folder that "
            "you may write to"
        )


def _values(config: TrainConfig, names: tuple[str, ...]) -> list[tuple[str, float]]:
    values = ((name, _value(config, name)) for name in names)
    return [(name, value) for name, value in values if value is not None]


def _value(config: TrainConfig, name: str) -> float | None:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
