"""`make_heap`: the symmetric heap of a group, chosen by device or by name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flexla_dist.comm.heaps import nvshmem, torch_symm
from flexla_dist.comm.heaps.block import SymmetricHeap, as_device
from flexla_dist.comm.heaps.errors import HeapArgumentError, HeapError
from flexla_dist.comm.heaps.meeting import Meeting
from flexla_dist.comm.heaps.nvshmem import NvshmemHeap
from flexla_dist.comm.heaps.posix_shm import PosixShmHeap, check_cpu
from flexla_dist.comm.heaps.torch_symm import TorchSymmHeap
from flexla_dist.comm.links import GroupRanks

KINDS = ("auto", "posix_shm", "torch_symm", "nvshmem")


def make_heap(
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    kind: str = "auto",
    *,
    timeout: float = 60.0,
) -> SymmetricHeap:
    """The symmetric heap of `group` on `device`; every rank of the group calls it.

    kind: "posix_shm" (CPU), "torch_symm" or "nvshmem" (GPU), or "auto".
    timeout: seconds that a rank waits for the others at most.

    Raises HeapError with the reason if such a heap cannot be had, HeapMismatch if ranks ask for
    different ones, ExchangeTimeout and RemoteRankError if a rank does not come.
    """
    if kind not in KINDS:
        hint = (
            "; a LocalHeap is made by LocalHeap(size, device), it has no group"
            if kind == "local"
            else ""
        )
        raise HeapArgumentError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}{hint}")
    place = as_device(device)
    if kind == "posix_shm":
        check_cpu(place)
    meeting = Meeting(GroupRanks.of(group), timeout)
    meeting.agree("make_heap", f"kind {kind!r} on {place.type}")
    if kind == "posix_shm" or (kind == "auto" and place.type == "cpu"):
        return PosixShmHeap(meeting)
    if kind == "torch_symm":
        return TorchSymmHeap(meeting, place)
    if kind == "nvshmem":
        return NvshmemHeap(meeting, place)
    return _of_gpus(meeting, place)


def _of_gpus(meeting: Meeting, device: torch.device) -> SymmetricHeap:
    """TorchSymmHeap where the GPUs reach each other, else NvshmemHeap."""
    no_torch_symm = torch_symm.refusals(meeting, device)
    if not no_torch_symm:
        return TorchSymmHeap(meeting, device)
    no_nvshmem = nvshmem.refusals(meeting, device)
    if not no_nvshmem:
        return NvshmemHeap(meeting, device)
    raise HeapError(
        f"no symmetric heap for {meeting.ranks.size} ranks on {device.type}:\n"
        f"  torch_symm: {no_torch_symm}\n  nvshmem: {no_nvshmem}\n"
        "remove one of these reasons, or exchange without symmetric memory"
    )
