"""The assembler of NVIDIA kernels: one that is right on Hopper.

Triton 3.6 assembles for Hopper with ptxas of CUDA 12.8, which loses half of a 64-bit operand
address in some matrix products (seen where a product has 16 or 32 columns and its left operand lies
in registers): the kernel runs and its numbers are wrong. Later versions assemble the same kernels
rightly; Triton brings one of those too, for Blackwell.

Contract: kernels of this package are compiled for Hopper inside of `assembling`, with the options
that it gives. They ask for a PTX version that an assembler older than `SOUND` refuses, so none is
ever assembled by one, and none that was is found in Triton's cache. Other devices, other people's
kernels and the interpreter are left as they are.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flexla_dist.errors import ExecutorError

SOUND = (12, 9)
PTX_VERSION = 88  # what CUDA 12.9 brought
HOPPER = range(90, 100)
HOPPER_OPTIONS: Mapping[str, int] = {"ptx_version": PTX_VERSION}
NO_OPTIONS: Mapping[str, int] = {}
_turn = threading.RLock()  # Triton's setting is one for the process


@dataclass(frozen=True)
class Assembler:
    """A ptxas: where it is, its version, and whether its products on Hopper are right."""

    path: str
    version: tuple[int, ...]

    @property
    def sound(self) -> bool:
        """New enough for Hopper."""
        return self.version >= SOUND

    def __str__(self) -> str:
        return f"{self.path} {'.'.join(map(str, self.version))}"


@contextmanager
def assembling(device: torch.device | int) -> Iterator[Mapping[str, int]]:
    """Compile in here; gives the options that a launch (or Triton's `compile`) is to be given.

    device: where the kernel will run, or the compute capability times ten.
    Raises ExecutorError on Hopper where no assembler is right.
    """
    options = sound_options(device)
    if not options:
        yield options
        return
    from triton import knobs

    chosen = assembler()
    with _turn, knobs.nvidia.scope():
        knobs.nvidia.ptxas = chosen.path
        _forget_version()
        try:
            yield options
        finally:
            _forget_version()


def _forget_version() -> None:
    """Triton remembers the version of its ptxas, a part of the names in its cache."""
    from triton.backends.nvidia import compiler

    forget = getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", None)
    if forget is not None:
        forget()


def sound_options(device: torch.device | int) -> Mapping[str, int]:
    """What `assembling` gives, for launches of kernels that were compiled in it before."""
    return HOPPER_OPTIONS if _capability(device) in HOPPER else NO_OPTIONS


def _capability(device: torch.device | int) -> int:
    if isinstance(device, int):
        return device
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def assembler() -> Assembler:
    """The ptxas for Hopper: Triton's own, or else the first of `candidates` that is right."""
    found = candidates()
    for one in found:
        if one.sound:
            return one
    names = "; ".join(map(str, found)) or "none"
    raise ExecutorError(
        f"kernels for Hopper need ptxas {'.'.join(map(str, SOUND))} or later: CUDA 12.8's makes "
        f"some products wrong. Found: {names}. Install a newer CUDA toolkit (or Triton) and name "
        "its ptxas in TRITON_PTXAS_PATH before Python starts"
    )


@functools.cache
def candidates() -> tuple[Assembler, ...]:
    """Every ptxas that is known here: what Triton uses, what it brings, the CUDA toolkit's."""
    from triton import knobs
    from triton.knobs import NvidiaTool

    paths = []
    for name in ("ptxas", "ptxas_blackwell"):
        try:
            paths.append(getattr(knobs.nvidia, name).path)
        except (AttributeError, RuntimeError):  # an older Triton, or a package without its tools
            continue
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    paths += [os.path.join(home, "bin", "ptxas"), shutil.which("ptxas") or ""]
    tools = [NvidiaTool.from_path(path) for path in dict.fromkeys(paths) if path]
    return tuple(
        Assembler(tool.path, tuple(int(part) for part in tool.version.split(".")))
        for tool in tools
        if tool is not None
    )
