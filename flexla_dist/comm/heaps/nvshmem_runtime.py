"""NVSHMEM of this process: which version, started how, and its Triton kernels made ready.

NVSHMEM reads its own environment variables when it starts. On a single node without InfiniBand the
caller sets NVSHMEM_REMOTE_TRANSPORT=none before that, else it looks for network devices.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import torch

from flexla_dist.comm.heaps.errors import HeapError
from flexla_dist.comm.heaps.meeting import Meeting

_DEVICE_STATE = b"nvshmemi_"  # names that only NVSHMEM's device library has


def import_nvshmem() -> Any:
    """`nvshmem.core`, if it fits this torch; HeapError says what does not."""
    _check_version()
    try:
        return importlib.import_module("nvshmem.core")
    except (ImportError, OSError, RuntimeError) as error:
        raise HeapError(
            f"nvshmem.core cannot be imported ({type(error).__name__}: {error}); install "
            f"nvshmem4py-cu{_cuda_major() or 13} (the extra 'nvshmem')"
        ) from error


def _cuda_major() -> str:
    return (torch.version.cuda or "").partition(".")[0]


def _check_version() -> None:
    """The NVSHMEM library must be the one that this torch was built with, where it names one."""
    major = _cuda_major()
    if not major:
        raise HeapError(
            f"this torch ({torch.__version__}) was built without CUDA, which NVSHMEM needs; "
            "install a torch built for CUDA"
        )
    package = f"nvidia-nvshmem-cu{major}"
    wanted = wanted_version(importlib.metadata.requires("torch") or [], package)
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return  # a library of the system; nvshmem.core says so if there is none
    if wanted and found != wanted:
        raise HeapError(
            f"{package} is {found}, expected {wanted}, with which torch {torch.__version__} was "
            f"built: pip install {package}=={wanted}"
        )


def wanted_version(requirements: list[str], package: str) -> str:
    """The version of `package` that a list of requirements pins, "" if none."""
    for line in requirements:
        match = re.match(rf"{re.escape(package)}\s*==\s*([\w.]+)", line)
        if match:
            return match[1]
    return ""


def start_by_uid(core: Any, meeting: Meeting, device: torch.device) -> None:
    """Start NVSHMEM; rank 0's unique id goes around through the group's store."""

    def own_id() -> str:
        return bytes(_bytes_of(core.get_unique_id())).hex() if meeting.ranks.rank == 0 else ""

    [text, *_] = meeting.attempt("unique id of NVSHMEM", told(own_id))

    def start() -> None:
        uid = core.get_unique_id(empty=True)
        raw = bytes.fromhex(text)
        target = _bytes_of(uid)
        if len(raw) != len(target):
            raise HeapError(
                f"rank 0's unique id has {len(raw)} bytes, expected {len(target)}: the ranks run "
                "different versions of NVSHMEM; install the same one everywhere"
            )
        target[:] = raw
        core.init(
            device=_cuda_device(device),
            uid=uid,
            rank=meeting.ranks.rank,
            nranks=meeting.ranks.size,
            initializer_method="uid",
        )

    meeting.attempt("start of NVSHMEM", told(start))


def start_by_mpi(core: Any, meeting: Meeting, device: torch.device, communicator: Any) -> None:
    """Start NVSHMEM; the unique id goes around in an mpi4py communicator of the same ranks."""

    def check() -> None:
        rank, size = communicator.Get_rank(), communicator.Get_size()
        expected = meeting.ranks.rank, meeting.ranks.size
        if (rank, size) != expected:
            raise HeapError(
                f"the MPI communicator says rank {rank} of {size}, the group rank {expected[0]} of "
                f"{expected[1]}; give a communicator of the group's ranks in the same order"
            )

    meeting.attempt("comparison of the group with the MPI communicator", check)

    def start() -> None:
        core.init(
            device=_cuda_device(device),
            mpi_comm=communicator,
            initializer_method="emulated_mpi",
        )

    meeting.attempt("start of NVSHMEM", told(start))


def told(action: Any) -> Any:
    """The action, with NVSHMEM's own exceptions turned into HeapError."""

    def wrapped() -> Any:
        try:
            return action()
        except (HeapError, OSError):
            raise
        except Exception as error:
            raise HeapError(
                f"NVSHMEM said {type(error).__name__}: {error}; NVSHMEM_DEBUG=INFO tells more, and "
                "a node without InfiniBand wants NVSHMEM_REMOTE_TRANSPORT=none"
            ) from error

    return wrapped


def is_started(core: Any) -> bool:
    """Whether NVSHMEM runs in this process already."""
    states = core.InitStatus
    running = (states.STATUS_IS_INITIALIZED, states.STATUS_LIMITED_MPG, states.STATUS_FULL_MPG)
    return int(core.init_status()) in map(int, running)


def device_library() -> str:
    """Path of NVSHMEM's device code; kernels link it: extern_libs={"libnvshmem_device": path}."""
    core = import_nvshmem()
    return str(told(core.find_device_bitcode_library)())


def prepare_kernels() -> None:
    """From now on, give every Triton kernel that calls NVSHMEM its state when it is loaded.

    Without it such a kernel reads a null pointer. Hooks of others stay, and run as well.
    """
    import triton

    runtime = triton.knobs.runtime
    before: Any = runtime.kernel_load_end_hook
    if hasattr(before, "add"):
        before.add(_on_load)  # a second time does nothing
    elif before is None:
        runtime.kernel_load_end_hook = _on_load
    elif before is not _on_load and not isinstance(before, _Both):
        runtime.kernel_load_end_hook = _Both(before)


class _Both:
    """A hook that somebody set in the place of Triton's chain, and ours behind it."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self._before(*arguments, **named)
        _on_load(*arguments, **named)


def _on_load(
    module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str
) -> None:
    """Triton has loaded a kernel: `metadata_group` names its files."""
    if not calls_nvshmem(metadata_group):
        return
    bindings = importlib.import_module("nvshmem.bindings.nvshmem")
    status = bindings.cumodule_init(int(module))
    if status:
        raise HeapError(
            f"NVSHMEM could not take in the kernel {name} (status {status}); make the heap before "
            "the kernel is first launched, and link it with the device library of the same version"
        )


def calls_nvshmem(metadata_group: dict[str, str]) -> bool:
    """Whether the code among a kernel's files has NVSHMEM's device code in it.

    Triton may keep the machine code alone; its symbols have the same names.
    """
    return any(
        file.endswith((".ptx", ".cubin")) and _DEVICE_STATE in Path(path).read_bytes()
        for file, path in metadata_group.items()
    )


def _bytes_of(uid: Any) -> Any:
    """The bytes of a unique id, writable in place."""
    return memoryview(uid._data.view("int8")).cast("B")


def _cuda_device(device: torch.device) -> Any:
    from cuda.core import Device

    found = Device(device.index)
    found.set_current()
    return found
