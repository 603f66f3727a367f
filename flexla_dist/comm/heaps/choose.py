"""`make_heap`: the symmetric heap of a group, chosen by device or by name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flexla_dist.comm.heaps.block import SymmetricHeap
from flexla_dist.comm.heaps.errors import HeapArgumentError
from flexla_dist.comm.heaps.meeting import Meeting
from flexla_dist.comm.heaps.posix_shm import PosixShmHeap, check_cpu
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
    place = torch.empty(0, device=device).device
    if kind == "posix_shm":
        check_cpu(place)
    meeting = Meeting(GroupRanks.of(group), timeout)
    meeting.agree("make_heap", f"kind {kind!r} on {place.type}")
    return PosixShmHeap(meeting)
