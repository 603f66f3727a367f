"""Hardware counters of launches by Nsight Compute, where a machine has it and lets it read them.

Contract: `counters` starts the tool on `limits_calls.py` and returns the launches of each case in
order, or the reason why there are none. It never raises for what the tool does; every process has a
time after which it is ended.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob

from scaling_runs.limits_calls import MARKER
from scaling_runs.limits_kernels import COPIES, Launch, short_name
from scaling_runs.machine import ROOT

PLACES = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)
ELAPSED, ACTIVE = "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active"
# column of a row, and the metrics that give it; the first one that the tool knows is read
METRICS: Mapping[str, tuple[str, ...]] = {
    "ncu_us": ("gpu__time_duration.sum",),
    "tensor_pct": (
        f"sm__pipe_tensor_cycles_active.{ELAPSED}",
        f"sm__pipe_tensor_op_hmma_cycles_active.{ELAPSED}",
        f"sm__inst_executed_pipe_tensor.{ELAPSED}",
    ),
    "dram_mb": ("dram__bytes.sum",),
    "dram_pct": (f"dram__throughput.{ELAPSED}",),
    "sm_pct": (f"sm__throughput.{ELAPSED}",),
    "xu_pct": (f"sm__inst_executed_pipe_xu.{ELAPSED}", f"sm__inst_executed_pipe_xu.{ACTIVE}"),
    "warps_pct": (f"sm__warps_active.{ACTIVE}",),
}
SCALES = {"ncu_us": 1e-3, "dram_mb": 1e-6}  # from nanoseconds and bytes
PROBE = "import torch; torch.zeros(1 << 20, device='cuda').add_(1); torch.cuda.synchronize()"
PROBE_SECONDS = 45.0
GRACE = 45.0  # seconds beyond those that the calls may begin in: the last case, and the output


@dataclass(frozen=True)
class Seen:
    """One launch that the tool saw: values by column."""

    kernel: str
    at: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Tool:
    """Nsight Compute and the metrics that it knows here; `why_not` says why it cannot be used."""

    path: str
    metrics: Mapping[str, str]
    why_not: str = ""


def find_tool() -> Tool:
    """The tool, after it has read all counters of one small kernel."""
    path = shutil.which("ncu") or next((p for place in PLACES for p in sorted(glob(place))), None)
    if path is None:
        return Tool("", {}, "ncu is not installed")
    status, known = _run([path, "--query-metrics", "--chips", "gh100"], 30.0)
    names = {line.split()[0] for line in known.splitlines() if "__" in line}
    metrics = choose_metrics(names if status == 0 else set())
    command = [*_command(path, metrics), sys.executable, "-c", PROBE]
    status, text = _run(command, PROBE_SECONDS)
    if status == 0 and parse(text, metrics):
        return Tool(path, metrics)
    return Tool(path, {}, _reason(status, text))


def choose_metrics(known: set[str]) -> dict[str, str]:
    """Metric by column: the first that is known, or the first where nothing is known."""
    found = {}
    for column, names in METRICS.items():
        fits = [name for name in names if name.split(".")[0] in known]
        if fits or not known:
            found[column] = fits[0] if fits else names[0]
    return found


def counters(
    tool: Tool, cases: Sequence[str], options: Sequence[str], seconds: float
) -> tuple[dict[str, list[Seen]], str]:
    """Launches of every case that was reached, and what went wrong.

    Args:
        cases: `variant:direction:implementation`.
        options: of `limits_calls.py`.
        seconds: after these no case begins.
    """
    script = str(ROOT / "scaling_runs" / "limits_calls.py")
    words = ["--cases", ",".join(cases), "--seconds", f"{seconds:.0f}", *options]
    head = [*_command(tool.path, tool.metrics), "--profile-from-start", "off"]
    status, text = _run([*head, sys.executable, script, *words], seconds + GRACE)
    found = by_case(parse(text, tool.metrics), cases)
    return found, "" if found else _reason(status, text)


def _command(path: str, metrics: Mapping[str, str]) -> list[str]:
    """Clocks stay as they are, since others share the machine."""
    words = ["--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    return [
        path,
        *words,
        "--print-kernel-base",
        "function",
        "--metrics",
        ",".join(metrics.values()),
    ]


def _run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Status (None: out of time) and output of a process; it ends with all that it started."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        status: int | None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            status = None
        output.seek(0)
        return status, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(status: int | None, text: str) -> str:
    told = [line for line in text.splitlines() if "ERROR" in line]
    said = " ".join((told or text.splitlines() or [""])[-1].split())[:160]
    if status is None:
        return f"ncu took too long and was ended; it said: {said}"
    return f"ncu gave no counters (status {status}): {said}"


# -- what the tool prints -------------------------------------------------------------------------


def parse(text: str, metrics: Mapping[str, str]) -> list[tuple[str, str, dict[str, float]]]:
    """(kernel, grid, values by column) of every launch of the tool's table, in order."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))
    found = []
    for row in csv.DictReader(table):
        if not row["ID"]:  # the units
            continue
        values = {}
        for column, metric in metrics.items():
            number = (row.get(metric) or "").replace(",", "")
            try:
                values[column] = float(number) * SCALES.get(column, 1.0)
            except ValueError:
                continue
        found.append((short_name(row["Kernel Name"]), row.get("Grid Size") or "", values))
    return found


def by_case(
    seen: Sequence[tuple[str, str, Mapping[str, float]]], cases: Sequence[str]
) -> dict[str, list[Seen]]:
    """Launches by case; markers tell where each begins."""
    found: dict[str, list[Seen]] = {}
    names: Counter[str] = Counter()
    current: list[Seen] | None = None
    for kernel, grid, values in seen:
        if kernel == MARKER:
            number = re.search(r"\d+", grid)
            place = int(number[0]) - 1 if number else len(found)
            current, names = found.setdefault(cases[place], []), Counter()
        elif current is not None:
            current.append(Seen(kernel, names[kernel], values))
            names[kernel] += 1
    return found


def aligned(launches: Sequence[Launch], seen: Sequence[Seen]) -> dict[tuple[str, int], Seen]:
    """What was seen of every launch, one after the other; nothing if another number of kernels
    was launched, or others of those names that both know."""
    kernels = [x for x in launches if not x.kernel.startswith(COPIES)]
    if len(kernels) != len(seen):
        return {}
    known = {x.kernel for x in kernels} & {x.kernel for x in seen}
    pairs = list(zip(kernels, seen, strict=True))
    if any(a.kernel != b.kernel and known & {a.kernel, b.kernel} for a, b in pairs):
        return {}
    return {(a.kernel, a.at): b for a, b in pairs}
