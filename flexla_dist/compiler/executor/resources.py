"""What a kernel needs at least, before it is compiled: shared memory of a block, registers.

Contract: lower bounds from tile sizes alone. They prune what certainly does not fit; what passes
may still not fit.
"""

from __future__ import annotations

import math

from torch import fx

from flexla_dist.compiler.executor import launch as launching
from flexla_dist.compiler.executor.launch import Launch, power_of_two
from flexla_dist.compiler.executor.problem import Outline
from flexla_dist.compiler.kernels import LOOPS, Kernel, Schedule
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM

MOST_REGISTERS = 255
THREADS = 32  # of a warp
LEAST_ITEM = 2  # bytes of a number that waits in shared memory


def tile_count(
    node: fx.Node, problem: Outline, schedule: Schedule, kernel: Kernel, launch: Launch
) -> int:
    """Numbers in the tile of a value."""
    count = 1
    for dim in node.meta["dims"]:
        if dim == UNIT_DIM:
            continue
        if dim == TOKEN_DIM:
            count *= max(launching.MIN_TILE, problem.longest_chunk)
        elif dim == kernel.row_dim:
            count *= launching.row_tile(problem, kernel)
        elif dim == schedule.column:
            count *= min(power_of_two(problem.size(dim)), launch.column_tile)
        else:
            count *= power_of_two(problem.size(dim))
    return count


def least_shared(problem: Outline, schedule: Schedule, kernel: Kernel, launch: Launch) -> int:
    """Bytes of shared memory that a loop's loads wait in, all but one of its stages ahead."""
    if kernel.kind not in LOOPS or launch.num_stages < 2:
        return 0
    tiles = [
        tile_count(node, problem, schedule, kernel, launch)
        for node in kernel.loads
        if TOKEN_DIM in node.meta["dims"] and len(node.meta["dims"]) > 1
    ]
    return sum(tiles) * LEAST_ITEM * (launch.num_stages - 1)


def least_registers(problem: Outline, schedule: Schedule, kernel: Kernel, launch: Launch) -> int:
    """Registers of a thread for what a loop carries and the largest value beside it."""
    nodes = [node for node in (*kernel.loads, *kernel.body) if "dims" in node.meta]
    largest = max(
        (tile_count(node, problem, schedule, kernel, launch) for node in nodes), default=0
    )
    carried = sum(tile_count(node, problem, schedule, kernel, launch) for node in kernel.carried)
    return math.ceil((carried + largest) / (THREADS * launch.num_warps))
