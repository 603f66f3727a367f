"""Step 0: all kernels of the other steps, compiled side by side into Triton's cache.

    python -m scaling_runs.multi_gpu_compile --sizes full --ranks 2 --jobs 32
    python -m scaling_runs.multi_gpu_compile --sizes full --ranks 2 --prove --into some/cache

It needs no GPU: with the Triton, PyTorch and TRITON_CACHE_DIR of the run, the run finds them all.
A note in that folder says that nothing is left to do for these sources, so that the step costs no
time then. `--prove` launches every call by Triton's own code, stopped before the device, and counts
what it does not find; `--into` copies what it found, to be carried to another machine. What fails
here is only told: the step that needs it says more.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from flexla_dist.assembler import assembler, assembling
from flexla_dist.comm.device.source import Dialect
from flexla_dist.compiler.aot import LaunchRecord, Target, record_launches
from flexla_dist.errors import FlexlaError
from scaling_runs.compiling import CompileCount, compile_launches, compile_only, gpu_target
from scaling_runs.machine import ROOT
from scaling_runs.multi_gpu_calls import calls, exchange_launches
from scaling_runs.multi_gpu_sizes import SIZES, Sizes

DIALECTS: tuple[Dialect, ...] = ("p2p", "nvshmem")


def dialects_of(sizes: Sizes) -> tuple[Dialect, ...]:
    """The dialects of a run's exchanges."""
    return DIALECTS if sizes.device == "cuda" else DIALECTS[:1]


def exchanges_of(sizes: Sizes, ranks: int, dialect: Dialect) -> list[LaunchRecord]:
    """Launches of a dialect's kernels; none where it cannot be had, which is told."""
    try:
        return exchange_launches(sizes, ranks, dialect)
    except FlexlaError as why:
        print(f"no kernels of the dialect {dialect}: {why}", flush=True)
        return []


def fingerprint(sizes: Sizes, ranks: int, target: Target) -> str:
    """Changes with all that the kernels depend on."""
    said = [repr(sizes), str(ranks), triton.__version__, torch.__version__]
    said.append(f"{target[0]} {target[1]}")
    if target[0] == "cuda":
        said.append(".".join(map(str, assembler().version)))
    files = [*(ROOT / "flexla_dist").rglob("*.py")]
    files += [ROOT / "scaling_runs" / f"{name}.py" for name in ("multi_gpu_calls", "weak_cases")]
    for path in sorted(files):
        said.append(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def note_of(sizes: Sizes, ranks: int) -> Path:
    """The file in Triton's cache that says for which fingerprint all is compiled."""
    return Path(triton.knobs.cache.dir) / f"multi_gpu_{sizes.name}_{ranks}.txt"


# -- proof ----------------------------------------------------------------------------------------


def launches(sizes: Sizes, ranks: int) -> Iterator[LaunchRecord]:
    """Every launch of the run, as it is made there."""
    for dialect in dialects_of(sizes):
        yield from exchanges_of(sizes, ranks, dialect)
    for call in calls(sizes, ranks):
        task = call.task()
        for direction in task.directions:
            yield from record_launches(task, direction)


def prove(sizes: Sizes, ranks: int, target: Target, into: Path | None) -> int:
    """Launch all by Triton's own code, up to the device; how many were not in the cache.

    into: a folder for copies of what was found and of the note.
    """
    place = GPUTarget(*target[:2], target[2] if len(target) == 3 else 32)  # type: ignore[misc]
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: place,
        )
    )
    count, seen = CompileCount(), 0
    for launch in launches(sizes, ranks):
        before, seen = count.compiled, seen + 1
        with assembling(int(target[1])) as sound:
            launch.function.run(
                *launch.arguments, grid=(1,), warmup=True, **{**launch.keywords, **sound}
            )
        if count.compiled > before:
            print(f"not in the cache: {launch.kernel} {dict(launch.keywords)}"[:300], flush=True)
    print(f"{seen} launches, {count.found} kernels found, {count.compiled} not found", flush=True)
    if into is not None:
        for folder in count.folders:
            shutil.copytree(folder, into / folder.name, dirs_exist_ok=True)
        note = note_of(sizes, ranks)
        if note.exists():
            shutil.copy(note, into)
    return count.compiled


def _jobs() -> int:
    """As many as cores, at least 16 and not more than memory is likely to hold."""
    return min(64, max(16, len(os.sched_getaffinity(0))))


def main(words: Sequence[str] | None = None) -> int:
    """Compile everything that the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", choices=tuple(SIZES), default="full")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=_jobs(), help="processes that compile")
    parser.add_argument("--until", type=float, help="time (of time.time) to stop at")
    parser.add_argument("--prove", action="store_true", help="only look whether all is there")
    parser.add_argument(
        "--into", type=Path, help="with --prove: folder for copies of what is there"
    )
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    sizes, target = SIZES[options.sizes], gpu_target()
    if options.prove:
        return int(prove(sizes, options.ranks, target, options.into) > 0)
    note, known = note_of(sizes, options.ranks), fingerprint(sizes, options.ranks, target)
    if note.exists() and note.read_text() == known:
        print(f"all kernels are there, says {note}")
        return 0
    first, *rest = dialects_of(sizes)
    until, jobs = options.until, options.jobs

    def left() -> float | None:
        return None if until is None else until - time.time()

    failed = compile_launches(exchanges_of(sizes, options.ranks, first), target, jobs, left())
    tasks = [call.task() for call in calls(sizes, options.ranks)]
    if tasks:
        seconds = left()
        failed += compile_only(tasks, target, jobs, seconds)
    for dialect in rest:  # links a large library: slow, and needed last
        if until is None or time.time() < until:
            found = exchanges_of(sizes, options.ranks, dialect)
            failed += compile_launches(found, target, jobs, left())
    late = until is not None and time.time() > until
    if not failed and not late:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(known)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
