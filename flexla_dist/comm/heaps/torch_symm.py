"""`TorchSymmHeap`: symmetric memory of GPUs that reach each other, by torch's symmetric memory.

NVLink or PCIe inside one host, and several processes on one GPU if the environment has
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 (the group then needs gloo: NCCL refuses to share a GPU).
Multicast is never used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flexla_dist.comm.heaps.block import Block
from flexla_dist.comm.heaps.errors import HeapError
from flexla_dist.comm.heaps.group_heap import GroupHeap
from flexla_dist.comm.heaps.meeting import Meeting

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_BACKEND = "CUDA"
_OVERLAP_ON = ("1", "true", "TRUE", "yes", "on", "y", "YES", "ON", "Y")


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU: its number in that process and what tells it from all others."""

    index: int
    uuid: str
    name: str

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """That of a CUDA device of this process."""
        found = torch.cuda.get_device_properties(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        return cls(index, str(getattr(found, "uuid", "")), found.name)


class TorchSymmHeap(GroupHeap):
    """Memory of the GPUs of one host; kernels write to peers by address."""

    name = "torch_symm"

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        super().__init__(meeting, device)
        refused = refusals(meeting, device)
        if refused:
            raise HeapError(f"a heap of kind 'torch_symm' cannot be had: {refused}")
        meeting.attempt("start of torch symmetric memory", self._start)

    def _start(self) -> None:
        # Memory of the ordinary kind first: it makes the context that the driver calls need.
        torch.zeros(1, device=self.device)
        torch.cuda.synchronize(self.device)

    def _allocate(self, label: str, nbytes: int) -> Block:
        request = f"allocate({label!r}, {nbytes} bytes)"
        symmetric = _module()
        found: list[torch.Tensor] = []

        def make() -> str:
            with torch.cuda.device(self.device):
                memory = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
            found.append(memory.zero_())
            torch.cuda.synchronize(self.device)
            return request

        said = self.meeting.attempt("allocation of symmetric memory", make)
        self.meeting.compare("allocate", said)
        [local] = found
        handles: list[Any] = []

        def meet() -> None:
            # All ranks are known to come: torch's own meeting cannot be ended from outside.
            with torch.cuda.device(self.device):
                handles.append(symmetric.rendezvous(local, self.meeting.ranks.group))

        self.meeting.attempt(f"rendezvous of the symmetric memory of {label!r}", meet)
        [handle] = handles
        # The tensor may lie anywhere in torch's allocation, at the same place on every rank.
        shift = local.data_ptr() - handle.buffer_ptrs[self.rank]
        addresses = [pointer + shift for pointer in handle.buffer_ptrs]
        bases = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return Block(nbytes, local, bases, owner=(handle, local))


def refusals(meeting: Meeting, device: torch.device) -> str:
    """Why the ranks cannot have such a heap, "" if they can; the same text on every rank."""
    own = _local_refusal(device)
    gpu = None if own else Gpu.of(device)
    said = meeting.gather(
        "look at the GPUs",
        {
            "refusal": own,
            "gpu": None if gpu is None else [gpu.index, gpu.uuid, gpu.name],
            "overlap": os.environ.get(OVERLAP, "") in _OVERLAP_ON,
        },
    )
    name = meeting.ranks.name
    for rank, entry in enumerate(said):
        if entry["refusal"]:
            return f"{name(rank)}: {entry['refusal']}"
    hosts = {(place.host, place.boot) for place in meeting.places}
    if len(hosts) > 1:
        names = ", ".join(sorted(host for host, _ in hosts))
        return (
            f"the ranks are on {len(hosts)} hosts ({names}), and it reaches GPUs of one host only"
        )
    gpus = [Gpu(*entry["gpu"]) for entry in said]
    shared = _shared_gpu(gpus)
    if shared is not None and not all(entry["overlap"] for entry in said):
        return _told_shared(name(shared[0]), name(shared[1]), *(gpus[rank] for rank in shared))
    assert gpu is not None
    blocked = meeting.gather("look for peer access", _without_access(device, gpu, gpus))
    for rank, peers in enumerate(blocked):
        if peers:
            names = ", ".join(name(peer) for peer in peers)
            return f"the GPU of {name(rank)} has no peer access to that of {names}"
    return ""


def _local_refusal(device: torch.device) -> str:
    """What is missing on this rank alone."""
    if device.type != "cuda":
        return f"it lives on a GPU, got device {device}"
    try:
        symmetric = _module()
    except ImportError as error:
        return f"this torch ({torch.__version__}) has no symmetric memory: {error}"
    backend = symmetric.get_backend(device)
    if backend not in (None, _BACKEND):
        return (
            f"torch's symmetric memory is set to {backend}, expected {_BACKEND}: call "
            f"torch.distributed._symmetric_memory.set_backend({_BACKEND!r}) before anything is "
            "allocated there, and leave TORCH_SYMMMEM unset"
        )
    return ""


def _told_shared(first: str, second: str, gpu: Gpu, other: Gpu) -> str:
    if gpu.uuid == other.uuid:
        return (
            f"{first} and {second} are on one GPU ({gpu.name}, number {gpu.index}); give each rank "
            f"a GPU of its own, or set {OVERLAP}=1 before the start to let ranks share one"
        )
    return (
        f"{first} and {second} both call their GPU number {gpu.index}, which torch takes for one; "
        "make all GPUs of the host visible to every rank (CUDA_VISIBLE_DEVICES) and give each rank "
        f"its own number, or set {OVERLAP}=1 before the start"
    )


def _shared_gpu(gpus: list[Gpu]) -> tuple[int, int] | None:
    """Two ranks that torch takes to be on one GPU, if there are any; it compares numbers."""
    for second, gpu in enumerate(gpus):
        for first in range(second):
            same = gpu.uuid == gpus[first].uuid and gpu.uuid != ""
            if same or gpu.index == gpus[first].index:
                return first, second
    return None


def _without_access(device: torch.device, own: Gpu, gpus: list[Gpu]) -> list[int]:
    """Ranks whose GPU is visible here and cannot be reached from this one."""
    visible = {Gpu.of(torch.device("cuda", i)).uuid: i for i in range(torch.cuda.device_count())}
    return [
        rank
        for rank, gpu in enumerate(gpus)
        if gpu.uuid != own.uuid
        and gpu.uuid in visible
        and not torch.cuda.can_device_access_peer(own.index, visible[gpu.uuid])
    ]


def _module() -> Any:
    import torch.distributed._symmetric_memory as symmetric

    if not hasattr(symmetric, "rendezvous") or not dist.is_available():
        raise ImportError("torch.distributed._symmetric_memory.rendezvous is missing")
    return symmetric
