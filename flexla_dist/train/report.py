"""What a run shows and writes: a progress bar, metrics.jsonl, TensorBoard. Rank 0 only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Protocol

Metrics = dict[str, float | int]


class Reporter(Protocol):
    """Where a run's numbers go."""

    def step(self, metrics: Metrics, fraction: float) -> None:
        """Numbers of an optimiser step, and how much of the run is done, in [0, 1]."""

    def advance(self, fraction: float) -> None:
        """How much of the run is done, between the steps with numbers."""

    def note(self, text: str) -> None:
        """A line for the person watching."""

    def evaluation(self, metrics: Metrics) -> None:
        """Numbers of an evaluation."""

    def close(self) -> None:
        """The run is over."""


class SilentReporter:
    """The reporter of every rank but the first."""

    def step(self, metrics: Metrics, fraction: float) -> None: ...

    def advance(self, fraction: float) -> None: ...

    def note(self, text: str) -> None: ...

    def evaluation(self, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class RunReporter:
    """Shows the run on the terminal and keeps its numbers in `out`.

    A run that goes on after a checkpoint drops the lines of metrics.jsonl past its step.
    """

    def __init__(self, out: Path, first_step: int, tensorboard: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = _open_metrics(out / "metrics.jsonl", first_step)
        self._board = _open_tensorboard(out / "tensorboard", first_step) if tensorboard else None
        self._bar = _Bar() if sys.stdout.isatty() else None

    def step(self, metrics: Metrics, fraction: float) -> None:
        self._keep(metrics)
        if self._bar is not None:
            self._bar.update(fraction, _summary(metrics))
        else:
            print(f"step {metrics['step']:>6}  {_summary(metrics)}", flush=True)

    def advance(self, fraction: float) -> None:
        if self._bar is not None:
            self._bar.update(fraction)

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
        else:
            print(text, flush=True)

    def evaluation(self, metrics: Metrics) -> None:
        self._keep(metrics)
        bits = metrics["held_out_bits_per_byte"]
        self.note(f"step {metrics['step']:>6}  held-out {bits:.3f} bits/byte")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()
        self._file.close()

    def _keep(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        if self._board is not None:
            step = int(metrics["step"])
            for name, value in metrics.items():
                if name != "step":
                    self._board.add_scalar(name, value, step)


class _Bar:
    """A progress bar with the newest numbers beside it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(compact=True),
        )
        self._task = self._progress.add_task("training", total=1.0, summary="")
        self._progress.start()

    def update(self, fraction: float, summary: str | None = None) -> None:
        changes: dict[str, Any] = {} if summary is None else {"summary": summary}
        self._progress.update(self._task, completed=fraction, **changes)

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self._progress.stop()


def _summary(metrics: Metrics) -> str:
    return (
        f"loss {metrics['loss']:.3f}  {metrics['bits_per_byte']:.3f} bits/byte  "
        f"{metrics['tokens_per_second']:,.0f} tokens/s"
    )


def _open_metrics(path: Path, first_step: int) -> Any:
    kept = []
    if first_step > 0 and path.is_file():
        lines = path.read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= first_step]
    file = path.open("w")
    file.writelines(line + "\n" for line in kept)
    return file


def _open_tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"TensorBoard files need {error.name}: pip install 'flexla_dist[train]', or set "
            "tensorboard to false"
        ) from None
    return SummaryWriter(str(folder), purge_step=first_step + 1)
