"""What a result was measured on: date, commit, GPU and versions."""

from __future__ import annotations

import datetime
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scaling_runs" / "results"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Machine:
    """The columns date, commit, gpu, torch and triton of a row."""

    date: str
    commit: str
    gpu: str
    torch: str
    triton: str

    @property
    def slug(self) -> str:
        """The GPU's name for use in file names: `nvidia_h200`."""
        return re.sub(r"\W+", "_", self.gpu.lower()).strip("_")

    def measured_same_code(self, row: Mapping[str, str]) -> bool:
        """Was this row made at the present commit? Never where that is unknown."""
        return self.commit != UNKNOWN and row["commit"] == self.commit

    def columns(self) -> dict[str, str]:
        """The fields as columns of a row."""
        return dict(vars(self))


def describe_machine(commit: str | None = None) -> Machine:
    """The present machine; `commit` where the checkout has no history."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Machine(
        date=datetime.date.today().isoformat(),
        commit=commit or current_commit(),
        gpu=gpu,
        torch=torch.__version__,
        triton=triton.__version__,
    )


def current_commit() -> str:
    """Short hash of the checkout, with `+` for changes that are not committed; else `unknown`."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "flexla_dist")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    result = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    return result.stdout.strip()
