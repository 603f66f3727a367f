"""Which kernels hold all columns, and what passes between those that hold a tile of them."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import fx

from flexla_dist.compiler import aot
from flexla_dist.compiler.aot import CompileTask, compile_launch, describe_call, record_launches
from flexla_dist.compiler.executor import launch as launching
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.kernels import Kernel, Schedule
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.shapes import UNIT_DIM

from .column_specs import COLUMN_SPECS

LIMIT = aot.SHARED_LIMITS[90]
CALLS = [(torch.bfloat16, 64, 256), (torch.float32, 32, 256), (torch.float32, 64, 128)]
ADDITIVE = [name for name in COLUMN_SPECS if name not in ("softmax_output", "value_gate")]


def schedules(name: str) -> tuple[Schedule, Schedule]:
    executor = TritonExecutor(compile_graphs(COLUMN_SPECS[name]))
    return executor.forward_schedule, executor.backward_schedule


def task(name: str, dtype: torch.dtype, chunk: int, size: int) -> CompileTask:
    graphs = compile_graphs(COLUMN_SPECS[name])
    sizes = {"K": size, "V": size, "M": 64}
    problem = describe_call(graphs, tokens=1000, sizes=sizes, dtype=dtype, chunk_size=chunk)
    return CompileTask(graphs, problem)


def operands(kernel: Kernel, tiles: dict[str, int]) -> int:
    """Most elements of the two operands of one product: they lie in shared memory together."""

    def size(x: Any) -> int:
        return math.prod(tiles[d] for d in x.meta["dims"] if d != UNIT_DIM)

    products = [node for node in kernel.body if node.target is ops.matmul]
    return max((sum(size(x) for x in node.args) for node in products), default=0)


@pytest.mark.parametrize(("dtype", "chunk", "size"), CALLS, ids=str)
@pytest.mark.parametrize("name", COLUMN_SPECS)
def test_plans_fit_by_their_tiles(name: str, dtype: torch.dtype, chunk: int, size: int) -> None:
    """No product has operands that exceed a block; no kernel has a state of all columns."""
    problem = task(name, dtype, chunk, size).problem
    for schedule in schedules(name):
        for kernel in schedule.kernels:
            launch = launching.configuration(problem, schedule, kernel, 0)
            tiles = {d: launching.power_of_two(s) for d, s in problem.sizes.items()}
            tiles |= {"C": chunk, "V": min(tiles["V"], launch.column_tile)}
            if kernel.row_dim is not None:
                tiles[kernel.row_dim] = launching.row_tile(problem, kernel)
            assert operands(kernel, tiles) * dtype.itemsize <= LIMIT, kernel.name
            assert not (kernel.whole and kernel.products), kernel.name


@pytest.mark.parametrize("name", ADDITIVE)
def test_sums_need_no_whole_columns(name: str) -> None:
    assert not any(kernel.whole for s in schedules(name) for kernel in s.kernels)


def test_a_largest_value_needs_whole_columns_and_no_product() -> None:
    forward, _ = schedules("softmax_output")
    assert [kernel.whole for kernel in forward.kernels] == [False, False, True]


def test_parts_are_added_up_where_the_whole_sum_is_needed() -> None:
    _, backward = schedules("linear_attn_normalized")
    kernels = {kernel.name: kernel for kernel in backward.kernels}
    weight = next(x for x in kernels["reverse"].loads if x in kernels["reverse"].sums.completed)
    assert weight in kernels["before_reverse"].sums.partial
    assert kernels["gradients"].parts == (weight,)  # linear in it: every tile adds its own part
    (once,) = kernels["gradients"].sums.once  # the gradient of z is there once
    assert any(x.op == "placeholder" for x in below(once[0].args[once[1]]))


def below(node: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        x = stack.pop()
        found.add(x)
        stack.extend(y for y in x.args if isinstance(y, fx.Node))
    return found


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles; the interpreter does not"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("direction", aot.DIRECTIONS)
@pytest.mark.parametrize(
    ("dtype", "chunk", "size"),
    [CALLS[0], *(pytest.param(*call, marks=pytest.mark.long) for call in CALLS[1:])],
    ids=str,
)
def test_wide_heads_fit_hopper(dtype: torch.dtype, chunk: int, size: int, direction: str) -> None:
    call = task("linear_attn_normalized", dtype, chunk, size)
    for record in record_launches(call, direction):
        info = compile_launch(record)
        print(info)
        assert info.shared_bytes <= LIMIT
