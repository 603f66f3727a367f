"""Which dims a kernel may cut into tiles: those that it never sums over, or sums over in one place.

Contract: pure functions of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.kinds import HEAVY, VIEWS
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims
from flexla_dist.spec.spec import LinearAttentionSpec


def rank_of(node: fx.Node) -> int:
    return sum(dim != UNIT_DIM for dim in node.meta["dims"])


def viewed(node: fx.Node) -> fx.Node:
    """What a view looks at."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[-1]
    return node


def free_row_dim(
    body: Iterable[fx.Node], carried: dict[fx.Node, fx.Node], column: str
) -> str | None:
    """First dim of all carried states if the loop never sums over it."""
    firsts = {node.meta["dims"][0] for node in carried}
    if len(firsts) != 1 or all(len(node.meta["dims"]) != 2 for node in carried):
        return None
    row = firsts.pop()
    summed = any(row in contracted(node) for node in body)
    return None if summed or row == column else row


def summed_dim(cone: list[fx.Node], roots: list[fx.Node], column: str) -> str | None:
    """The dim that scores with vector decays sum over, if nothing below them sums over it and they
    are the only products."""
    if not roots or any(node.target is not ops.decay_scores for node in roots):
        return None
    dims = {contracted(node)[0] for node in roots}
    if len(dims) != 1 or column in dims:
        return None
    dim = dims.pop()
    plain = all(node.target is not ops.matmul and node.target not in HEAVY for node in cone)
    return dim if plain and not any(dim in contracted(node) for node in cone) else None


def free_chunk_dim(
    loads: Iterable[fx.Node], body: list[fx.Node], stores: Iterable[fx.Node], column: str
) -> str | None:
    """A dim of every product and of some result, over which a chunk kernel never sums."""
    costly = [node for node in body if node.target is ops.matmul or node.target in HEAVY]
    dims = {d for node in stores for d in node.meta["dims"]} - {TOKEN_DIM, UNIT_DIM, column}
    for dim in sorted(dims):
        in_all = costly and all(dim in node.meta["dims"] for node in costly)
        summed = any(dim in contracted(node) for node in body)
        if in_all and not summed and not any(node.meta["dims"].count(dim) > 1 for node in loads):
            return dim
    return None


def mixes_columns(spec: LinearAttentionSpec, forward: Cell, column: str) -> bool:
    """Does the call mix columns? It does where the forward graph sums over them, and where a state
    has none: its gradient is a sum over all columns."""
    lacking = any(column not in dims for dims in spec.state_dims.values())
    return lacking or contracts(forward, column)


def contracts(cell: Cell, column: str) -> bool:
    """Does the forward graph sum over the output's columns anywhere?"""
    return any(column in contracted(node) for node in cell.calls)


def contracted(node: fx.Node) -> tuple[str, ...]:
    """Dims that an operator sums over or picks from."""
    first: Dims = ()
    if node.args and isinstance(node.args[0], fx.Node):
        first = node.args[0].meta["dims"]
    if node.target in (ops.matmul, ops.decay_scores):
        return (first[1],)
    if node.target in (ops.total, ops.amax, ops.cumsum, ops.select):
        return (first[node.kwargs["dim"]],)
    return ()
