"""Walks over a graph that decide what a kernel computes, loads, and should not compute.

Contract: `stored` grows as kernels are added: values that wait in memory from then on; `sliced`
those of which memory has one part a column tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from flexla_dist.compiler.column_sums import ColumnSums, column_sums
from flexla_dist.compiler.free_dims import rank_of, viewed
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.kernels import Kernel, buffer_name
from flexla_dist.compiler.kinds import HEAVY, SLOW, VIEWS
from flexla_dist.compiler.partition import LEVELS
from flexla_dist.shapes import TOKEN_DIM
from flexla_dist.spec.spec import LinearAttentionSpec


class Walks:
    """A graph and what is known of its nodes."""

    def __init__(
        self,
        spec: LinearAttentionSpec,
        cell: Cell,
        kept: Iterable[fx.Node] = (),
        mixed: bool = False,
    ):
        self.spec, self.cell = spec, cell
        self.mixed = mixed  # the forward graph mixes columns
        self.kept = frozenset(kept)  # values to store wherever they are computed
        self.order = {node: at for at, node in enumerate(cell.graph.nodes)}
        self.level: dict[fx.Node, int] = {}
        self.costly: dict[fx.Node, bool] = {}  # a product or domain operator below it
        self.gated: dict[fx.Node, bool] = {}  # an exponential or a sum over tokens below it
        for node in cell.graph.nodes:
            if node.op == "placeholder":
                self.level[node], self.costly[node] = LEVELS[node.meta["role"]], False
                self.gated[node] = False
            elif node.op == "call_function":
                operands = [x for x in node.args if isinstance(x, fx.Node)]
                self.level[node] = max((self.level[x] for x in operands), default=0)
                self.costly[node] = (
                    node.target is ops.matmul
                    or node.target in HEAVY
                    or any(self.costly[x] for x in operands)
                )
                self.gated[node] = node.target in SLOW or any(self.gated[x] for x in operands)
        self.stored: dict[fx.Node, None] = {}
        self.sliced: set[fx.Node] = set()
        self.kernels: list[Kernel] = []
        self.column = spec.output_dims[-1]

    def add_kernel(self, kernel: Kernel) -> None:
        """The next kernel."""
        self.kernels.append(kernel)
        self.sliced.update(x for x in kernel.stores.values() if x in kernel.sums.partial)

    def body_of(self, roots: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes to compute for `roots`, and what they load; stored values are not computed."""
        body: set[fx.Node] = set()
        loads: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in body or node in loads:
                continue
            if node.op == "placeholder" or node in self.stored:
                loads.add(node)
                continue
            body.add(node)
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return sorted(body, key=self.order.__getitem__), sorted(loads, key=self.order.__getitem__)

    def wanted_before_loop(self, roots: Iterable[fx.Node], level: int) -> list[fx.Node]:
        """Values below `level` with token rows that contain a product: computed before a loop."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            if self.level[node] < level and self._worth_storing(node):
                found[node] = None
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return sorted(found, key=self.order.__getitem__)

    def _worth_storing(self, node: fx.Node) -> bool:
        """A product with token rows, a vector of gates, or a tile scaled by a tile of gates."""
        if node.target in VIEWS or not (self.costly[node] or self.gated[node]):
            return False
        if self.costly[node]:
            return self._has_token_rows(node)
        if rank_of(node) <= 1 or node.target in SLOW:
            return True
        bases = [viewed(x) for x in node.args if isinstance(x, fx.Node)]
        return any(self.gated[x] and rank_of(x) > 1 for x in bases)

    def loop_sums(
        self, loads: Sequence[fx.Node], body: Sequence[fx.Node], results: Iterable[fx.Node]
    ) -> ColumnSums:
        """Sums over columns in a loop, of which no result may be a part; loads are added up."""
        exact = [x for x in results if self.column not in x.meta["dims"]]
        found = column_sums(loads, body, self.column, (), exact)
        return replace(found, completed=frozenset(self.sliced.intersection(loads)))

    def sums_before_loop(
        self, results: Sequence[fx.Node], planned: Iterable[fx.Node], level: int
    ) -> list[fx.Node]:
        """Values below `level`, beside those `planned`, that a loop cannot compute from a tile of
        the columns."""
        stored = self.stored
        self.stored = stored | dict.fromkeys(planned)
        body, loads = self.body_of(results)
        self.stored = stored
        found = self.loop_sums(loads, body, results)
        return [x for x in (*found.early, *found.wide) if self.level[x] < level]

    def shared_with(self, loop: Kernel, roots: Iterable[fx.Node]) -> dict[str, fx.Node]:
        """Products with token rows that the loop computes and kernels for `roots` need."""
        inside = set(loop.body)
        found: dict[str, fx.Node] = {}
        seen: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            useful = node in inside and self.costly[node] and self._has_token_rows(node)
            useful = useful and node not in loop.sums.partial
            if useful and node.target not in VIEWS:
                found[buffer_name(node)] = node
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return found

    def heavy_below(self, roots: Iterable[fx.Node]) -> list[fx.Node]:
        """Domain operators that a kernel for `roots` would contain."""
        body, _ = self.body_of(roots)
        return [node for node in body if node.target in HEAVY]

    @staticmethod
    def _has_token_rows(node: fx.Node) -> bool:
        return TOKEN_DIM in node.meta["dims"]

    def slow_below(self, roots: Iterable[fx.Node], level: int) -> list[fx.Node]:
        """Domain operators and vectors of gates below `level` that results need."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            slow = node.target in HEAVY or (not self.costly[node] and self._worth_storing(node))
            if self.level[node] < level and slow and not self._is_square(node):
                found[node] = None
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return list(found)

    @staticmethod
    def _is_square(node: fx.Node) -> bool:
        """A plain [C, C] tile of gates: cheaper to make than to read."""
        return node.target not in HEAVY and node.meta["dims"] == (TOKEN_DIM, TOKEN_DIM)
