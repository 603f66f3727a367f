"""Symmetric heaps: memory of which every rank of a group has a part that its peers can write."""

from __future__ import annotations

from flexla_dist.comm.heaps.block import Block, Dialect, SymmetricHeap
from flexla_dist.comm.heaps.choose import KINDS, make_heap
from flexla_dist.comm.heaps.errors import HeapArgumentError, HeapError, HeapMismatch
from flexla_dist.comm.heaps.local import LocalBlock, LocalHeap
from flexla_dist.comm.heaps.meeting import Meeting
from flexla_dist.comm.heaps.nvshmem import NvshmemHeap
from flexla_dist.comm.heaps.posix_shm import PosixShmHeap
from flexla_dist.comm.heaps.torch_symm import TorchSymmHeap

__all__ = [
    "KINDS",
    "Block",
    "Dialect",
    "HeapArgumentError",
    "HeapError",
    "HeapMismatch",
    "LocalBlock",
    "LocalHeap",
    "Meeting",
    "NvshmemHeap",
    "PosixShmHeap",
    "SymmetricHeap",
    "TorchSymmHeap",
    "make_heap",
]
