"""Sums over columns in kernels that are cut into column tiles.

Contract: a program of such a kernel holds the columns of one tile. A value without columns that
sums over them is *partial* there: what one tile adds. Partial values may pass through whatever is
linear in them; they are stored tile by tile and added up later, by the kernel that loads them or
behind the last kernel. A value that does not depend on columns is added to a partial one by the
first tile alone. Everything else needs the whole sum first: a partial value that was loaded is then
added up over all tiles as it is loaded; one that is made in the same kernel must be made by an
earlier one (`early`). What no tile can compute, because it does not add up or has columns twice,
needs a kernel that holds all columns (`wide`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from flexla_dist.compiler.free_dims import contracted, viewed
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.operators import OPERATORS

_ADDED = {ops.add: (0, 1), ops.sub: (0, 1), ops.where: (1, 2)}  # operands that add up
Place = tuple[fx.Node, int]


@dataclass(frozen=True)
class ColumnSums:
    """What a kernel does with sums over columns.

    `partial` are loads and values of one tile; `completed` the loads added up over all tiles;
    `once` the operands (node, position) that only the first tile adds. `early` and `wide` are in
    the order of the body; a kernel that has them cannot be cut into column tiles.
    """

    partial: frozenset[fx.Node] = frozenset()
    completed: frozenset[fx.Node] = frozenset()
    once: frozenset[Place] = frozenset()
    early: tuple[fx.Node, ...] = ()
    wide: tuple[fx.Node, ...] = ()

    @property
    def whole(self) -> bool:
        """Must one program hold all columns?"""
        return bool(self.early or self.wide)


def column_sums(
    loads: Iterable[fx.Node],
    body: Sequence[fx.Node],
    column: str,
    sliced: Iterable[fx.Node],
    exact: Iterable[fx.Node] = (),
) -> ColumnSums:
    """Sums over columns in a kernel.

    `sliced` are the stored values of which memory has one part a tile; `exact` the values that no
    kernel may store as parts.
    """
    walk = _Walk(list(loads), body, column, frozenset(sliced), frozenset(exact))
    while walk.again():
        pass
    return walk.found()


def whole_sums(loads: Iterable[fx.Node], sliced: Iterable[fx.Node]) -> ColumnSums:
    """A kernel that holds all columns or none: it adds up every load that has parts."""
    return ColumnSums(completed=frozenset(loads) & frozenset(sliced))


class _Walk:
    """Goes through a body until nothing more is found to be needed as a whole."""

    def __init__(
        self,
        loads: list[fx.Node],
        body: Sequence[fx.Node],
        column: str,
        sliced: frozenset[fx.Node],
        exact: frozenset[fx.Node],
    ):
        self.loads, self.body, self.column, self.exact = loads, body, column, exact
        self.sliced = frozenset(loads) & sliced
        self.completed: set[fx.Node] = set()
        self.early: set[fx.Node] = set()
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}  # of a partial value: where it began
        self.once: set[Place] = set()
        self.wide: list[fx.Node] = []

    def found(self) -> ColumnSums:
        early = tuple(node for node in self.body if node in self.early)
        completed, once = frozenset(self.completed), frozenset(self.once)
        partial = frozenset(self.sources)
        return ColumnSums(partial, completed, once, early, tuple(self.wide))

    def again(self) -> bool:
        """One walk; is it known now of more values that they are needed as a whole?"""
        known = len(self.completed) + len(self.early)
        self.sources = {node: frozenset({node}) for node in self.sliced - self.completed}
        self.once, self.wide = set(), []
        for node in self.body:
            self._visit(node)
            if node in self.exact and node in self.sources:
                self._need_whole(node)
        return len(self.completed) + len(self.early) > known

    def _visit(self, node: fx.Node) -> None:
        operands = [(at, x) for at, x in enumerate(node.args) if isinstance(x, fx.Node)]
        wide = self._is_wide(node, [x for _, x in operands])
        if wide:
            self.wide.append(node)
        partial = [(at, x) for at, x in operands if x in self.sources]
        for x in self._misused(node, partial):
            self._need_whole(x)
        if wide or self.column in node.meta["dims"] or node in self.early:
            return
        sources = frozenset().union(*(self.sources.get(x, frozenset()) for _, x in partial))
        if self.column in contracted(node):
            sources |= {node}
        if not sources:
            return
        self.sources[node] = sources
        if partial and node.target in _ADDED:
            for at in _ADDED[node.target]:  # type: ignore[index]
                x = node.args[at]
                if x != 0.0 and not (isinstance(x, fx.Node) and x in self.sources):
                    self.once.add((node, at))

    def _is_wide(self, node: fx.Node, operands: list[fx.Node]) -> bool:
        if any(x.meta["dims"].count(self.column) > 1 for x in (node, *operands)):
            return True
        adds_up = node.target not in (ops.amax, ops.cumsum)
        return self.column in contracted(node) and not adds_up

    def _misused(self, node: fx.Node, partial: list[tuple[int, fx.Node]]) -> list[fx.Node]:
        """Partial operands that must be whole."""
        mixed = self.column in node.meta["dims"] or self.column in contracted(node)
        squared = len(partial) > 1 and node.target not in _ADDED
        linear = OPERATORS[node.target].linear  # type: ignore[index]
        return [x for at, x in partial if mixed or squared or at not in linear]

    def _need_whole(self, node: fx.Node) -> None:
        """A load is added up where it is loaded; a value is made before."""
        node = viewed(node)
        sources = self.sources.get(node, frozenset())
        if sources and sources <= self.sliced:
            self.completed |= sources
        elif node in self.body:
            self.early.add(node)
