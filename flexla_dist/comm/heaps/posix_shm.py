"""`PosixShmHeap`: symmetric memory of processes on one host, in files of /dev/shm.

Kernels in Triton's interpreter, numpy and ctypes reach a peer's part by its plain address.
"""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path

import torch

from flexla_dist.comm.heaps.block import Block
from flexla_dist.comm.heaps.errors import HeapArgumentError, HeapError
from flexla_dist.comm.heaps.group_heap import GroupHeap
from flexla_dist.comm.heaps.leftovers import is_name, new_name, remove_leftovers
from flexla_dist.comm.heaps.meeting import Meeting

SHARED_MEMORY = Path("/dev/shm")
_MODE = 0o600


class PosixShmHeap(GroupHeap):
    """Memory that the processes of one host map from files of `folder`.

    A file is open to its user alone, has a name that cannot be guessed, and is removed as soon as
    all ranks have mapped it: a process that is killed later leaves nothing behind. One killed
    before leaves its file to the next heap that is made in the folder.
    """

    name = "posix_shm"

    def __init__(self, meeting: Meeting, folder: Path = SHARED_MEMORY) -> None:
        super().__init__(meeting, torch.device("cpu"))
        self._folder = folder
        meeting.attempt("open shared memory", self._open)

    def _open(self) -> None:
        if not self._folder.is_dir() or not os.access(self._folder, os.W_OK | os.X_OK):
            raise HeapError(
                f"there is no folder {self._folder} that this process can write to; a heap of kind "
                "'posix_shm' wants Linux's shared memory: mount a tmpfs there"
            )
        remove_leftovers(self._folder)

    def _allocate(self, label: str, nbytes: int) -> Block:
        request = f"allocate({label!r}, {nbytes} bytes)"
        name = new_name()
        path = self._folder / name
        try:
            own: list[mmap.mmap] = []

            def create() -> list[str]:
                own.append(_create(path, nbytes))
                return [request, name]

            said = self.meeting.attempt("allocation of shared memory", create)
            self.meeting.compare("allocate", [entry[0] for entry in said])
            names = [entry[1] for entry in said]
            parts: list[mmap.mmap] = []

            def map_all() -> None:
                for rank, peer in enumerate(names):
                    mapped = own[0] if rank == self.rank else self._map(rank, peer, nbytes)
                    parts.append(mapped)

            self.meeting.attempt(f"mapping of the shared memory of {label!r}", map_all)
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
        tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        bases = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
        return Block(nbytes, tensors[self.rank], bases, owner=tuple(tensors))

    def _map(self, rank: int, name: str, nbytes: int) -> mmap.mmap:
        """Map the part of another rank, if it is what that rank said."""
        peer = self.meeting.ranks.name(rank)
        if not is_name(name):
            raise HeapError(f"{peer} named its shared memory {name!r}, which no heap would do")
        try:
            file = os.open(self._folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise HeapError(
                f"{self._folder} here does not show the memory of {peer} on host "
                f"{self.meeting.places[rank].host}; all ranks must run on one host and share "
                f"{self._folder} (containers: give them one IPC namespace)"
            ) from None
        try:
            status = os.fstat(file)
            private = stat.S_IMODE(status.st_mode) == _MODE and status.st_uid == os.geteuid()
            if not stat.S_ISREG(status.st_mode) or not private or status.st_size != nbytes:
                raise HeapError(
                    f"the shared memory of {peer} has mode {stat.S_IMODE(status.st_mode):o}, user "
                    f"{status.st_uid} and {status.st_size} bytes; expected mode {_MODE:o}, user "
                    f"{os.geteuid()} and {nbytes} bytes: start all ranks as the same user"
                )
            return mmap.mmap(file, nbytes)
        finally:
            os.close(file)


def _create(path: Path, nbytes: int) -> mmap.mmap:
    """A new zeroed file for this user alone, mapped; its memory is had, not only promised."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, _MODE)
    try:
        os.fchmod(file, _MODE)  # whatever the umask
        os.posix_fallocate(file, 0, nbytes)
        return mmap.mmap(file, nbytes)
    except OSError as error:
        free = os.statvfs(path.parent)
        raise HeapError(
            f"{path.parent} cannot hold {nbytes} bytes more ({error.strerror}); it has "
            f"{free.f_bavail * free.f_frsize} free: make it larger (containers: --shm-size)"
        ) from error
    finally:
        os.close(file)


def check_cpu(device: torch.device) -> None:
    """Refuse another device than the CPU."""
    if device.type != "cpu":
        raise HeapArgumentError(
            f"a heap of kind 'posix_shm' lives on the CPU, got device {device}; for a GPU take "
            "'torch_symm' or 'nvshmem'"
        )
