"""`python -m tests.gpu.nvshmem_program FOLDER`, started by mpirun: NVSHMEM started over MPI."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from mpi4py import MPI

from flexla_dist.comm.heaps import Meeting, NvshmemHeap
from flexla_dist.comm.links import GroupRanks

from .test_heaps_gpu import check_nvshmem


def main() -> None:
    """Each rank takes the GPU of its number."""
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    store = dist.FileStore(f"{sys.argv[1]}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    heap = NvshmemHeap(
        Meeting(GroupRanks.of(None)),
        torch.device("cuda", rank),
        bootstrap="emulated_mpi",
        communicator=world,
    )
    check_nvshmem(heap)
    heap.close()
    print(f"rank {rank} of {size} is right", flush=True)


if __name__ == "__main__":
    main()
