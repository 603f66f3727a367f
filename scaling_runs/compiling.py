"""Kernels compiled before they are needed, and how many were found ready."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from flexla_dist.compiler.aot import CompileTask, LaunchRecord, Target, compile_launch
from flexla_dist.compiler.aot_pool import CompilePool

_FORK = multiprocessing.get_context("fork")
_LAUNCHES: list[LaunchRecord] = []  # of this process; forked ones find them by number


def compile_only(tasks: list[CompileTask], target: Target, jobs: int, seconds: float | None) -> int:
    """Compile everything; returns the number of kernels that failed."""
    begin, shown = time.perf_counter(), dict[str, bool]()
    with CompilePool(tasks, target, jobs) as pool:
        for at in range(len(tasks)):
            if seconds is not None and time.perf_counter() - begin > seconds:
                print(f"time is up: {len(tasks) - at} of {len(tasks)} calls left")
                break
            for result in pool.wait(at):
                if str(result) not in shown:
                    shown[str(result)] = isinstance(result, str)
                    print(f"{at + 1}/{len(tasks)} {result}", flush=True)
    failed = sum(shown.values())
    print(f"{len(shown)} kernels, {failed} failed, {time.perf_counter() - begin:.0f} s")
    return failed


def compile_launches(
    launches: Sequence[LaunchRecord], target: Target, jobs: int, seconds: float | None = None
) -> int:
    """Compile launches of exchanges side by side; how many failed or were left. `seconds`: begin
    none after that time."""
    _LAUNCHES[:] = launches
    failed, done, begin = 0, 0, time.perf_counter()
    with _FORK.Pool(max(1, min(jobs, len(launches)))) as pool:
        works = [(number, target) for number in range(len(launches))]
        for text in pool.imap_unordered(_compile, works):
            failed, done = failed + bool(text), done + 1
            if text:
                print(text[:500], flush=True)
            if seconds is not None and time.perf_counter() - begin > seconds:
                break
    spent, left = time.perf_counter() - begin, len(launches) - done
    print(f"{done} launches of exchanges, {failed} failed, {left} left, {spent:.0f} s", flush=True)
    return failed + left


def _compile(work: tuple[int, Target]) -> str:
    number, target = work
    try:
        compile_launch(_LAUNCHES[number], target)
    except Exception as error:
        return f"{_LAUNCHES[number].kernel}: {type(error).__name__}: {error}"
    return ""


class CompileCount:
    """Counts what Triton finds in its cache and what it compiles in this process, these by name;
    folders: of the cache, in which all of them are."""

    def __init__(self) -> None:
        self.found = 0
        self.names: list[str] = []
        self.folders: set[Path] = set()
        triton.knobs.compilation.listener = self

    @property
    def compiled(self) -> int:
        """How many were not found."""
        return len(self.names)

    def __call__(
        self, *, cache_hit: bool, src: Any = None, metadata_group: Any = None, **_: object
    ) -> None:
        self.found += cache_hit
        self.folders.update(Path(path).parent for path in (metadata_group or {}).values())
        if not cache_hit:
            self.names.append(str(getattr(src, "name", "")))


def gpu_target() -> Target:
    """The present GPU as Triton names it."""
    if not torch.cuda.is_available():
        return ("cuda", 90)
    target = triton.runtime.driver.active.get_current_target()
    return (target.backend, target.arch, target.warp_size)
