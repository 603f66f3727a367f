"""`python -m tests.shmem.parallel_program KIND few|all FILE`, started by oshrun or mpirun.

Sharded operators whose states travel by kernels in the launcher's symmetric memory, compared with
the whole sequence in float64. FILE: where the ranks find each other.
"""

from __future__ import annotations

import os
import sys
import traceback

import torch
import torch.distributed as dist

from flexla_dist.parallel import use_heap

from ..interpret import device_parallel_cases as cases
from ..interpret.device_parallel_cases import Case
from .program import make

LENGTHS = {2: (21, 16), 4: (9, 0, 20, 8)}
PACKED = {2: (0, 5, 21, 22, 37), 4: (0, 9, 10, 34, 37)}


def chosen(size: int, which: str) -> list[Case]:
    """One scalar, one diagonal and one dense M; `all`: each packed and not, and every strategy."""
    lengths, packed = LENGTHS[size], PACKED[size]
    few = [
        Case("simple_gla", "all_gather", lengths, packed),
        Case("gla", "log_scan", lengths, batch=2),
        Case("gated_delta_rule", "chain", lengths, packed),
    ]
    more = [
        Case("simple_gla", "chain", lengths),
        Case("gla", "hierarchical", lengths, packed),
        Case("gated_delta_rule", "hierarchical", lengths, batch=2),
    ]
    return few + more if which == "all" else few


def main() -> None:
    """Run the cases; the first rank compares."""
    torch.set_num_threads(1)
    kind, which, path = sys.argv[1:4]
    heap = make(kind)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=heap.rank, world_size=heap.size
    )
    use_heap(dist.group.WORLD, heap)
    picked = chosen(heap.size, which)
    own = cases.run_shards(heap.rank, heap.size, picked)
    ranks: list = [None] * heap.size
    dist.all_gather_object(ranks, own)
    for number, case in enumerate(picked):
        found = cases.errors(case, [values[number] for values in ranks])
        assert max(found.values()) < cases.BOUND, (case, found)
    heap.close()
    dist.destroy_process_group()
    print(f"{kind} heap: states of rank {heap.rank} of {heap.size} are right", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        # Without the clean-up that waits for all ranks: the launcher then ends the others.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
