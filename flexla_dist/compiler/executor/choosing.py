"""Which configuration a kernel of a call gets: measured, or the estimate.

Contract: a measured entry of exactly this kernel, sizes and buckets is used; else one of a near
bucket; else the estimate of `launch`. Every choice says where it is from. An entry that cannot run
here is not used, and the choice says why. Nothing depends on T but through a bucket.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flexla_dist.compiler.build import without_comments
from flexla_dist.compiler.emit.kernel import Emitted
from flexla_dist.compiler.executor import launch as launching
from flexla_dist.compiler.executor.launch import Launch, power_of_two
from flexla_dist.compiler.executor.problem import Outline, Problem
from flexla_dist.compiler.executor.resources import least_shared
from flexla_dist.compiler.kernels import LOOPS, Kernel, Schedule
from flexla_dist.compiler.tuned.database import (
    CHUNK_LOADS,
    LENGTHS,
    LOADS,
    LONG,
    LOOP_LOADS,
    Database,
    KernelEntry,
    Key,
    ScanEntry,
    package_file,
    read,
    user_file,
)
from flexla_dist.errors import TuningWarning
from flexla_dist.shapes import TOKEN_DIM

USUAL_ARCH = "sm_90"  # of devices that are not here
TUNED, NEAR, ESTIMATE, FORCED = "tuned", "nearest bucket", "estimate", "forced"
Buckets = tuple[str, str, str]
Name = tuple[str, str]  # direction and name of a kernel


@dataclass(frozen=True)
class Choice:
    """A configuration, where it is from, and why a measured one was not used."""

    launch: Launch
    source: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source} ({self.note})" if self.note else self.source


@dataclass(frozen=True, eq=False)
class Tuned:
    """What an executor looks into, equal only to itself.

    file: a database beside the package's, asked first; None is the user's own
    (`tuned.database.user_file`). measured: whether databases are read at all. forced: launches of
    single kernels, whatever was measured; programs: as `ScanEntry.programs`; kept: databases in
    place of the files, which another process may write.
    """

    file: Path | None = None
    measured: bool = True
    forced: Mapping[Name, Launch] = field(default_factory=dict)
    programs: int | None = None
    kept: tuple[Database, ...] | None = None

    @functools.cache  # noqa: B019
    def databases(self, arch: str) -> tuple[Database, ...]:
        """The user's, then the package's; raises TuningError for a file that is not right."""
        if not self.measured:
            return ()
        found = self._read(arch) if self.kept is None else self.kept
        return tuple(database for database in found if database.kernels or database.scans)

    def fixed(self, arch: str) -> Tuned:
        """The same, with the entries that the files have now; raises as `databases`."""
        kept = self._read(arch) if self.kept is None else self.kept
        return replace(self, kept=kept) if self.measured else self

    def with_entry(self, entry: KernelEntry | ScanEntry, arch: str) -> Tuned:
        """`fixed` with another entry among the user's own."""
        own, *others = self.fixed(arch).kept or (Database(arch),)
        own = own.copy()
        own.add(entry)
        return replace(self, kept=(own, *others))

    def _read(self, arch: str) -> tuple[Database, ...]:
        files = (self.file or user_file(arch), package_file(arch))
        return tuple(read(path, arch) for path in files)

    def find(self, key: Key, arch: str) -> tuple[KernelEntry, str] | None:
        """The entry of a key and whether it is of just that bucket."""
        databases = self.databases(arch)
        for database in databases:
            if key in database.kernels:
                return database.kernels[key], TUNED
        for database in databases:
            near = database.near(key)
            if near is not None:
                return near, NEAR
        return None


def arch_of(device: torch.device) -> str:
    """Name of a device's architecture, as in `sm_90`."""
    if device.type != "cuda":
        return USUAL_ARCH
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def shared_limit(device: torch.device) -> int | None:
    """Bytes of shared memory that a block may have; None where nobody knows."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", None)


@functools.cache
def structure_of(emitted: Emitted) -> str:
    """Hash of a kernel's text, whatever its name."""
    text = re.sub(rf"\b{re.escape(emitted.name)}\b", "kernel", without_comments(emitted.source))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def buckets_of(problem: Problem) -> Buckets:
    """Load of chunk kernels, load of loops, length of a call."""
    lanes = 1 if problem.layout.packed else problem.batch
    processors = launching.processors(problem.device)
    chunks = lanes * len(problem.layout.chunks) * problem.heads / processors
    loops = problem.num_sequences * problem.heads / processors
    length = LENGTHS[lanes * problem.tokens >= LONG]
    return _load(chunks, CHUNK_LOADS), _load(loops, LOOP_LOADS), length


def _load(programs: float, bounds: tuple[float, float]) -> str:
    return LOADS[sum(programs >= bound for bound in bounds)]


def _key(problem: Outline, emitted: Emitted, sizes: Mapping[str, int], buckets: Name) -> Key:
    text = " ".join(f"{dim}={size}" for dim, size in sorted(sizes.items()))
    dtype = str(problem.output_dtype).removeprefix("torch.")
    return Key(structure_of(emitted), dtype, text, *buckets)


def kernel_key(problem: Outline, kernel: Kernel, emitted: Emitted, buckets: Buckets) -> Key:
    """The key of a kernel."""
    load = buckets[1] if kernel.kind in LOOPS else buckets[0]
    sizes = {TOKEN_DIM: problem.longest_chunk, **problem.sizes}
    return _key(problem, emitted, sizes, (load, buckets[2]))


def scans_key(problem: Outline, emitted: Emitted) -> Key:
    """The key of the scans of a spec: forward and backward are cut alike, whatever N, T and C."""
    return _key(problem, emitted, problem.sizes, (LOADS[0], LENGTHS[1]))


def choose(
    tuned: Tuned,
    problem: Problem,
    schedule: Schedule,
    kernel: Kernel,
    emitted: Emitted,
    *,
    direction: str,
    shrink: int = 0,
    refused: str = "",
) -> Choice:
    """The configuration of a kernel; `refused` says why no measured one may be used."""
    estimate = launching.configuration(problem, schedule, kernel, shrink)
    forced = tuned.forced.get((direction, kernel.name))
    if forced is not None:
        return Choice(forced, FORCED)
    arch = arch_of(problem.device)
    if not tuned.databases(arch):
        return Choice(estimate, ESTIMATE)
    found = tuned.find(kernel_key(problem, kernel, emitted, buckets_of(problem)), arch)
    if found is None:
        return Choice(estimate, ESTIMATE)
    entry, source = found
    launch = Launch(entry.tile, entry.warps, entry.stages, entry.registers)
    reason = refused or misfit(problem, schedule, kernel, launch, estimate, entry.shared)
    if not reason:
        return Choice(launch, source)
    warn_stale(f"{emitted.name}: an entry of the tuning database is not used: {reason}")
    return Choice(estimate, ESTIMATE, f"entry not used: {reason}")


@functools.cache
def warn_stale(text: str) -> None:
    """Warn, once in a process for each text."""
    warnings.warn(f"{text}; tune anew with flexla-dist bench --tune", TuningWarning, stacklevel=2)


def misfit(
    problem: Outline,
    schedule: Schedule,
    kernel: Kernel,
    launch: Launch,
    estimate: Launch,
    shared: int | None,
) -> str:
    """Why a kernel cannot be launched so; empty if it can, as far as is known.

    shared: bytes of shared memory that it was compiled to, if known.
    """
    width = power_of_two(problem.size(schedule.column))
    if launch.column_tile > width:
        return f"its tile of {launch.column_tile} columns is wider than the {width} there are"
    if launch.column_tile != estimate.column_tile and fixed_tile(schedule, kernel):
        return (
            f"its tile of {launch.column_tile} columns must be the {estimate.column_tile} that "
            "kernels have which share sums with it"
        )
    limit = shared_limit(problem.device)
    needed = least_shared(problem, schedule, kernel, launch) if shared is None else shared
    if limit is not None and needed > limit:
        return f"it needs {needed} bytes of shared memory, the device has {limit}"
    return ""


def fixed_tile(schedule: Schedule, kernel: Kernel) -> bool:
    """Whether other kernels, or its own sums, decide the column tile of a kernel."""
    return kernel.whole or len(launching.sharing_parts(schedule, kernel)) > 1
