"""What a schedule is made of: kernels, and the memory between them.

Contract: plain data over the nodes of one graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from flexla_dist.compiler.column_sums import ColumnSums
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.kinds import HEAVY

LOOPS = ("scan", "reverse", "map", "summary")


@dataclass(frozen=True)
class Kernel:
    """One kernel: `kind` is chunk, scan or reverse; decays (a chunk kernel), map (a scan of M
    alone) and summary (a scan that keeps nothing) run only when documents are cut into segments.

    `loads` are arguments and values of earlier kernels, `body` the nodes to compute in order,
    `stores` the results by name. A scan carries `carried`: argument of the state (or of its
    gradient) to the node that follows it; with `history` the states entering the chunks are stored.
    `sums` tells what it does with sums over columns.
    """

    name: str
    kind: str
    loads: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    stores: dict[str, fx.Node]
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)
    row_dim: str | None = None  # a dim that may be tiled too
    summed: bool = False  # one program adds up the tiles of row_dim
    history: bool = True
    sums: ColumnSums = field(default_factory=ColumnSums)
    whole: bool = False  # one program holds all columns

    @property
    def parts(self) -> tuple[fx.Node, ...]:
        """Loads of which a program reads the part of its own tile."""
        return tuple(node for node in self.loads if node in self.sums.partial)

    @property
    def products(self) -> int:
        """Number of matrix products and domain operators."""
        return sum(node.target is ops.matmul or node.target in HEAVY for node in self.body)


@dataclass(frozen=True)
class Schedule:
    """Kernels in order, and the dim that they may cut into column tiles; `mixed` tells that the
    forward graph mixes columns."""

    kernels: tuple[Kernel, ...]
    column: str
    mixed: bool = False


def buffer_name(node: fx.Node) -> str:
    """Name of the memory that holds a value between kernels."""
    return f"value_{node.name}"
