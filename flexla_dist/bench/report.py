"""What a timed call took: the whole, and every kernel with its bytes and configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton

from flexla_dist.bench.calls import BenchCall
from flexla_dist.bench.timing import StepTime, time_plan
from flexla_dist.compiler.explain.numbers import shape_line
from flexla_dist.compiler.explain.text import columns
from flexla_dist.compiler.explain.triton_plan import triton_plan

COPY_BYTES = 1 << 30
HEAD = ("direction", "kernel", "us", "share", "MB", "TB/s", "tiles", "warps", "stages", "regs")


@dataclass(frozen=True)
class KernelRow:
    """A kernel of a call, or a PyTorch operation between kernels (without bytes)."""

    direction: str
    kernel: str
    us: float
    bytes: int | None = None
    tiles: str = ""
    warps: int | None = None
    stages: int | None = None
    registers: int | None = None
    configuration: str = ""

    @property
    def bandwidth(self) -> float | None:
        """TB/s of the counted bytes."""
        return None if self.bytes is None or not self.us else self.bytes / self.us / 1e6


@dataclass(frozen=True)
class Report:
    """Milliseconds of the whole call with caches overwritten before each, and its kernels."""

    shape: str
    gpu: str
    plans: dict[str, str]
    median_ms: float
    p20_ms: float
    p80_ms: float
    copy_tbs: float
    kernels: tuple[KernelRow, ...]

    def data(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        rows = [{**asdict(row), "tbs": row.bandwidth} for row in self.kernels]
        return {**asdict(self), "kernels": rows}

    def __str__(self) -> str:
        whole = sum(row.us for row in self.kernels)
        moved = sum(row.bytes or 0 for row in self.kernels)
        lines = [
            self.shape,
            f"{self.gpu}, a copy moves {self.copy_tbs:.2f} TB/s; plans: "
            + ", ".join(f"{direction} {plan}" for direction, plan in self.plans.items()),
            f"whole call: median {self.median_ms:.4f} ms, p20 {self.p20_ms:.4f}, "
            f"p80 {self.p80_ms:.4f}",
            f"kernels: {whole:.1f} us, {moved / 1e6:.1f} MB at {moved / whole / 1e6:.2f} TB/s, "
            f"{moved / whole / 1e6 / self.copy_tbs:.0%} of a copy",
            "",
        ]
        rows = [(*HEAD, "from"), *(_cells(row, whole) for row in self.kernels)]
        return "\n".join([*lines, *columns(rows, "llrrrrlrrrl")])


def _cells(row: KernelRow, whole: float) -> tuple[str, ...]:
    bandwidth = row.bandwidth
    return (
        row.direction,
        row.kernel,
        f"{row.us:.1f}",
        f"{row.us / whole:.1%}",
        "" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
        "" if bandwidth is None else f"{bandwidth:.2f}",
        row.tiles,
        str(row.warps or ""),
        str(row.stages or ""),
        str(row.registers or ""),
        row.configuration,
    )


def report(call: BenchCall, runs: int = 20) -> Report:
    """Time a call on its GPU."""
    median, low, high = _quantiles(call)
    return Report(
        shape=f"{call.problem.spec.name}  {shape_line(call.problem)}",
        gpu=torch.cuda.get_device_name(call.problem.device),
        plans={d: getattr(call.executor, _PLANS[d]) for d in call.directions},
        median_ms=median,
        p20_ms=low,
        p80_ms=high,
        copy_tbs=copy_bandwidth(call.problem.device),
        kernels=tuple(kernel_rows(call, runs)),
    )


_PLANS = {"forward": "plan", "backward": "backward_plan"}


def _quantiles(function: Any) -> tuple[float, float, float]:
    for _ in range(3):
        function()
    found = triton.testing.do_bench(function, warmup=50, rep=200, quantiles=[0.5, 0.2, 0.8])
    median, low, high = found
    return median, low, high


def copy_bandwidth(device: torch.device) -> float:
    """TB/s that a large copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _quantiles(lambda: target.copy_(source))[0] / 1e9


def kernel_rows(call: BenchCall, runs: int) -> list[KernelRow]:
    """Every step that does work, in order."""
    described = {
        plan.direction: [step for step in plan.steps if step.kind != "torch"]
        for plan in triton_plan(call.executor.graphs, call.problem, call.executor.tuned).directions
    }
    rows = []
    for direction in call.directions:
        plan, tensors = call.prepared(direction)
        times, _ = time_plan(plan, tensors, call, runs)
        rows += joined(direction, times, described[direction])
    return rows


def joined(direction: str, times: Sequence[StepTime], described: Sequence[Any]) -> list[KernelRow]:
    """Times with what `explain` knows of the launches, which are in the same order."""
    steps = iter(described)
    rows = []
    for time in times:
        if time.name.startswith("torch "):
            rows.append(KernelRow(direction, time.name, time.us))
            continue
        step = next(steps)
        tiles = " ".join(f"{dim}{size}" for dim, size in (step.tiles or {}).items())
        moved = step.bytes_read + step.bytes_written
        chosen = step.configuration or "fixed"
        rows.append(
            KernelRow(
                direction, step.name, time.us, moved, tiles,
                step.warps, step.stages, step.registers, chosen,
            )
        )  # fmt: skip
    return rows
