"""`python -m tests.shmem.program KIND`, started by oshrun or mpirun: checks a heap everywhere."""

from __future__ import annotations

import os
import sys
import traceback

import torch

from flexla_dist.comm.heaps import SymmetricHeap

from .exercise import check_heap
from .ring_kernel import RING_BYTES, check_ring


def make(kind: str) -> SymmetricHeap:
    """The heap of this process's launcher."""
    if kind == "oshmem":
        from .heaps_oshmem import OshmemHeap

        return OshmemHeap()
    from .heaps_mpi import MpiShmHeap

    return MpiShmHeap()


def main() -> None:
    """Two heaps in one process: one for the kernel's ring, one for everything else."""
    torch.set_num_threads(1)
    ring, other = make(sys.argv[1]), make(sys.argv[1])
    check_ring(ring, ring.allocate("ring", RING_BYTES), epochs=10)
    check_heap(other)
    ring.close()
    print(f"{sys.argv[1]} heap: rank {ring.rank} of {ring.size} is right", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        # Without the clean-up that waits for all ranks: the launcher then ends the others.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
