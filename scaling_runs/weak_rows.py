"""Rows of `weak_scaling.py`: columns, key, what they were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from scaling_runs.baselines import Traffic
from scaling_runs.machine import Machine, describe_machine
from scaling_runs.rows import Row, RowStore
from scaling_runs.weak_grid import Point
from scaling_runs.weak_time import Times

POINT = (
    *("system", "variant", "mode", "placement", "direction", "P", "T", "total"),
    *("B", "H", "K", "V", "dtype"),
)
COLUMNS = (
    *("kind", "date", "commit", "gpu", "host", "cores", "torch", "triton", "backend"),
    *("launcher", "world", "nodes", "settings", *POINT, "state_bytes"),
    *("median_ms", "p20_ms", "p80_ms", "samples", "peak_mib", "rel_err"),
    *("sent_bytes", "received_bytes", "formula_bytes", "status", "note"),
)
KEY = ("gpu", "host", "backend", "nodes", "settings", *POINT)


@dataclass(frozen=True)
class Provenance:
    """What all rows of a run share."""

    machine: Machine
    host: str
    cores: int
    backend: str
    launcher: str
    world: int
    nodes: tuple[int, ...]
    settings: str

    def columns(self, ranks: int) -> dict[str, object]:
        """As columns of a point on the first `ranks`; `kind` tells measured from modelled rows."""
        own = {name: value for name, value in vars(self).items() if name != "machine"}
        own["nodes"] = len(set(self.nodes[:ranks]))
        return {"kind": "measured", **self.machine.columns(), **own}


def describe_run(
    launcher: str, nodes: tuple[int, ...], settings: str, commit: str | None
) -> Provenance:
    """The present run; every rank may call it. nodes: node number of every rank."""
    return Provenance(
        machine=describe_machine(commit),
        host=cpu_name(),
        cores=cpu_count(),
        backend=dist.get_backend_config().replace(",", " "),
        launcher=launcher,
        world=dist.get_world_size(),
        nodes=nodes,
        settings=settings,
    )


def cpu_name() -> str:
    """The processor's model."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Results:
    """The CSV file of a machine: which points are done, and new rows."""

    def __init__(self, folder: Path, provenance: Provenance) -> None:
        self.provenance = provenance
        name = f"weak_scaling_{provenance.machine.slug}.csv"
        self.store = RowStore(folder / name, COLUMNS, KEY)

    def pending(self, points: list[Point], again: bool, keep: bool) -> list[Point]:
        """Points without a usable row. again: all. keep: rows of other commits are usable too.

        A point that was begun and never finished counts as done, so that a run that is started
        again gets past a point that ends the program; `again` tries it once more.
        """
        if again:
            return points
        return [point for point in points if not self._usable(self._find(point), keep)]

    def _find(self, point: Point) -> Row | None:
        return self.store.get({**self.provenance.columns(point.P), **vars(point)})

    def _usable(self, row: Row | None, keep: bool) -> bool:
        return row is not None and (keep or self.provenance.machine.measured_same_code(row))

    def put(self, point: Point, status: str, values: Mapping[str, object]) -> Row:
        """Keep a row: `begun`, `ok`, `refused` or `failed`."""
        row = {**self.provenance.columns(point.P), **vars(point), "state_bytes": point.state_bytes}
        return self.store.put({**row, "status": status, **values})


def measured_times(times: Times) -> dict[str, object]:
    """Times as columns."""
    return {
        "median_ms": f"{times.median_ms:.4f}",
        "p20_ms": f"{times.p20_ms:.4f}",
        "p80_ms": f"{times.p80_ms:.4f}",
        "samples": times.samples,
    }


def byte_columns(found: Traffic, formula: Traffic | None, received: int) -> dict[str, object]:
    """Bytes as columns: sent by the first rank, and the most that a rank receives, which is the
    formula's where there is one, because a point whose bytes differ is not timed."""
    return {
        "sent_bytes": found.sent,
        "received_bytes": received,
        "formula_bytes": "" if formula is None else received,
    }


def peak_mib(device: torch.device) -> float | None:
    """Most MiB in use on the GPU since the last reset; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**20
