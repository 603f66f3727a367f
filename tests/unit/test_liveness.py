"""The order of steps in chunk kernels, and where kernels are cut."""

from __future__ import annotations

import pytest
from torch import fx

from flexla_dist.compiler.chunk_kernels import MAX_ALIVE, MAX_ALIVE_LAST, SMALL_PRODUCTS
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.kernels import Kernel
from flexla_dist.compiler.kinds import HEAVY, SUMS, VECTOR_SUMS
from flexla_dist.compiler.liveness import emission_order, held_values, most_alive
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.spec.variants import get_variant

NAMES = ("linear_attn", "simple_gla", "mamba2", "gla", "gated_delta_rule", "kda", "hgrn")


def chunk_kernels(name: str) -> list[Kernel]:
    executor = TritonExecutor(compile_graphs(get_variant(name)))
    schedules = (executor.forward_schedule, executor.backward_schedule)
    return [k for schedule in schedules for k in schedule.kernels if k.kind == "chunk"]


def below(kernel: Kernel, node: fx.Node) -> set[fx.Node]:
    inside, found = set(kernel.body), set()
    stack = [x for x in node.args if isinstance(x, fx.Node)]
    while stack:
        x = stack.pop()
        if x in inside and x not in found:
            found.add(x)
            stack.extend(y for y in x.args if isinstance(y, fx.Node))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_orders_hold_every_step_after_what_it_needs(name: str) -> None:
    for kernel in chunk_kernels(name):
        results = set(kernel.stores.values()) & set(kernel.body)
        order = emission_order(kernel.loads, kernel.body, results)
        assert len(set(order)) == len(order)
        costly = {n for n in kernel.body if n.target in HEAVY | SUMS | {ops.matmul}}
        assert costly | results <= set(order)
        seen: set[fx.Node] = set()
        for node in order:
            needed = below(kernel, node) & set(order)
            assert needed <= seen, f"{kernel.name}: {node} comes before {needed - seen}"
            seen.add(node)


@pytest.mark.parametrize("name", NAMES)
def test_large_kernels_are_cut(name: str) -> None:
    kernels = chunk_kernels(name)
    for at, kernel in enumerate(kernels):
        products = sum(node.target is ops.matmul for node in kernel.body)
        tiled = any(node.target in VECTOR_SUMS for node in kernel.body)
        if products > SMALL_PRODUCTS and not tiled:
            alive = most_alive(kernel.loads, kernel.body, kernel.stores.values())
            last = kernels[at + 1 :] and not any(later.products for later in kernels[at + 1 :])
            most = MAX_ALIVE_LAST if last else MAX_ALIVE
            assert alive <= most, f"{kernel.name}: {alive}"


def test_one_kernel_may_hold_more_than_two_that_split_its_products() -> None:
    first, second = chunk_kernels("simple_gla")[-2:]
    alive = most_alive(first.loads, first.body, first.stores.values())
    assert MAX_ALIVE < alive <= MAX_ALIVE_LAST and not second.products


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_vector_decays_are_tiled_in_their_dim(name: str) -> None:
    kernels = chunk_kernels(name)
    scores = [k for k in kernels if any(n.target is ops.decay_scores for n in k.body)]
    assert scores and all(k.summed and k.row_dim == "K" for k in scores)
    sums = [k for k in kernels if any(n.target in VECTOR_SUMS for n in k.body)]
    assert sums and all(k.row_dim == "K" and not k.summed for k in sums)


def test_a_sum_ends_its_operand_before_the_next_product() -> None:
    builder = Builder()
    a, b, c = (builder.placeholder(n, ("C", "K"), "input") for n in "abc")
    square = builder.placeholder("s", ("C", "C"), "input")
    first, second = builder.matmul(square, a), builder.matmul(square, b)
    total = builder.emit(ops.total, builder.emit(ops.mul, first, c), dim=-1)
    cell = builder.finish({"o": second, "sum": total})
    loads, body = split(cell)
    order = emission_order(loads, body, cell.outputs.values())
    kinds = [node.target for node in order if node.target in (ops.matmul, ops.total)]
    assert kinds != [ops.matmul, ops.matmul, ops.total]
    assert (
        most_alive(loads, body, cell.outputs.values()) == 64 * 128 + 64
    )  # one product and its sum


def split(cell: Cell) -> tuple[list[fx.Node], list[fx.Node]]:
    nodes = list(cell.graph.nodes)
    return (
        [n for n in nodes if n.op == "placeholder"],
        [n for n in nodes if n.op == "call_function"],
    )


def test_tiles_that_only_products_read_are_not_held() -> None:
    builder = Builder()
    x, y = (builder.placeholder(n, ("C", "K"), "input") for n in "xy")
    plain = builder.finish({"o": builder.matmul(x, builder.transpose(y))})
    assert held_values(*split(plain)) == frozenset()
    builder = Builder()
    x = builder.placeholder("x", ("C", "K"), "input")
    scaled = builder.emit(ops.mul, x, 2.0)
    scaling = builder.finish({"o": builder.matmul(scaled, builder.transpose(x))})
    assert {n.target for n in held_values(*split(scaling)) if n.op != "placeholder"} == {ops.mul}
