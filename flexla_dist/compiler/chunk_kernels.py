"""Cuts chunk stages into kernels that fit a program's registers.

Contract: a value crosses a cut through memory. Scores with vector decays are computed apart, their
gradients after everything else, both a tile of their dim at a time; what is left is cut where the
fewest bytes cross, so that no kernel has too many products or too many values alive. Sums over
columns that the rest needs as a whole are cut off first (see `column_sums`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from torch import fx

from flexla_dist.compiler.column_sums import ColumnSums, column_sums, whole_sums
from flexla_dist.compiler.free_dims import free_chunk_dim, rank_of, summed_dim
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.kernels import Kernel, buffer_name
from flexla_dist.compiler.kinds import HEAVY, SLOW, VECTOR_SUMS, VIEWS, pair_of_sums
from flexla_dist.compiler.liveness import most_alive
from flexla_dist.compiler.walks import Walks
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM

MAX_PRODUCTS = 10
MAX_HEAVY = 2
SMALL_PRODUCTS = 5  # as many never need a cut
AGAIN = 0.8  # what making a product twice costs, in [C, C] tiles read or written
MAX_ALIVE = 25 * 2**10  # elements at the usual sizes; with more, four warps spill registers
MAX_ALIVE_LAST = 32 * 2**10  # where that leaves no product for a second kernel


@dataclass(frozen=True)
class _Cut:
    """A cut after `end` nodes: values that cross it, products before it that are not made again,
    and the [C, C] tiles read and written because of it."""

    end: int
    crossing: list[fx.Node]
    work: int
    tiles: float


class ChunkKernels(Walks):
    """Adds chunk kernels to a schedule."""

    def add_chunks(
        self, name: str, values: list[fx.Node], results: dict[str, fx.Node] | None = None
    ) -> None:
        """Chunk kernels that compute values for later kernels, and results of the call."""
        results = results or {}
        pending = [v for v in values if v not in self.stored]
        remaining = dict(results)
        while pending or remaining:
            roots = [*pending, *remaining.values()]
            body, loads = self.body_of(roots)
            scores = self._scores_apart(body)
            if scores and scores != roots:
                self._emit_chunk("scores", scores, {})
                pending = [v for v in pending if v not in self.stored]
                continue
            before, whole = self._before_column_sums(loads, body)
            before = before or self._before_vector_sums(body)
            if before:
                finished = {n: x for n, x in remaining.items() if x in before}
                crossing = self._crossing(before, [x for x in body if x not in before], set(roots))
                crossing = sorted({*crossing, *whole}, key=self.order.__getitem__)
                for result in finished:
                    remaining.pop(result)
                kept = self._still_read(crossing, [*pending, *remaining.values()])
                self.add_chunks(name, kept, finished)
                pending = [v for v in pending if v not in self.stored]
                continue
            if self._fits(roots):
                self._emit_chunk(name, pending, remaining)
                return
            kept, finished = self._cheapest_cut(body, pending, remaining)
            for result in finished:
                remaining.pop(result)
            self._emit_chunk(name, kept, finished)
            pending = [v for v in pending if v not in self.stored]

    def _scores_apart(self, body: list[fx.Node]) -> list[fx.Node]:
        """Scores with vector decays made of arguments by arithmetic alone, where they are not all
        that is computed: sums over their dim, of which a kernel of its own holds a tile at a time.
        """
        found = []
        for node in body:
            if node.target is ops.decay_scores:
                cone, _ = self.body_of(x for x in node.args if isinstance(x, fx.Node))
                if summed_dim(cone, [node], self.column):
                    found.append(node)
        return found

    def _before_column_sums(
        self, loads: list[fx.Node], body: list[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """What to compute before the rest, where the rest needs sums over columns or holds them
        all, and which sums (or values of all columns) it yields.

        Products go apart from what holds all columns: no program has a state and all columns.
        """
        sums = self._sums_of(loads, body)
        if not sums.whole or not any(_costly(node) for node in body):
            return [], []
        stops = {*sums.early, *sums.wide}
        below = {node: self._below(node, body) for node in stops}
        ready = [x for x in body if x in stops and stops.isdisjoint(below[x] - {x})]
        found = [node for node in ready if node in sums.early] or ready
        inside = set().union(*(below[node] for node in found))
        if found[0] not in sums.early and any(_costly(x) for x in inside.difference(found)):
            inside, found = inside.difference(found), []
        before = [node for node in body if node in inside]
        return (before, found) if len(before) < len(body) else ([], [])

    def _sums_of(self, loads: list[fx.Node], body: list[fx.Node]) -> ColumnSums:
        exact = self.kept.intersection(body)
        return column_sums(loads, body, self.column, self.sliced, exact)

    @staticmethod
    def _below(node: fx.Node, body: list[fx.Node]) -> set[fx.Node]:
        """A value and what of the body it is made from."""
        inside, found, stack = set(body), set[fx.Node](), [node]
        while stack:
            x = stack.pop()
            if x in inside and x not in found:
                found.add(x)
                stack.extend(y for y in x.args if isinstance(y, fx.Node))
        return found

    @staticmethod
    def _before_vector_sums(body: list[fx.Node]) -> list[fx.Node]:
        """What does not depend on sums over pairs of tokens with vector decays, where that holds
        products: those sums are elementwise in their dim, so by themselves they may be tiled."""
        after: set[fx.Node] = set()
        for node in body:
            if node.target in VECTOR_SUMS or any(x in after for x in node.args):
                after.add(node)
        before = [node for node in body if node not in after]
        costly = any(node.target is ops.matmul or node.target in HEAVY for node in before)
        return before if after and costly else []

    def _finished(self, crossing: list[fx.Node], results: dict[str, fx.Node]) -> dict[str, fx.Node]:
        """Results that are plain arithmetic on values of a cut: they end in the kernel before it.
        What they load beside must not grow: arguments stay where they are read anyway."""
        before, _ = self.body_of(crossing)
        known = {*before, *crossing}
        found = {}
        for name, root in results.items():
            stack, plain = [root], True
            while stack and plain:
                node = stack.pop()
                if node in known or node.op == "placeholder" or node in self.stored:
                    continue
                plain = node.target is not ops.matmul and node.target not in HEAVY | SLOW
                stack.extend(x for x in node.args if isinstance(x, fx.Node))
            if plain and any(x in known for x in self.body_of([root])[0]):
                found[name] = root
        return found

    def _still_read(self, crossing: list[fx.Node], roots: list[fx.Node]) -> list[fx.Node]:
        """The values of a cut that the rest needs."""
        needed: set[fx.Node] = set()
        stack, seen = list(roots), set()
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            if node in crossing:
                needed.add(node)
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return [node for node in crossing if node in needed]

    def _emit_chunk(self, name: str, values: list[fx.Node], results: dict[str, fx.Node]) -> None:
        body, loads = self.body_of([*values, *results.values()])
        values = [*values, *(n for n in body if n in self.kept and n not in values)]
        stores = {buffer_name(node): node for node in values} | results
        count = sum(k.name.startswith(name) for k in self.kernels)
        unique = f"{name}_{count}" if count else name
        row_dim = free_chunk_dim(loads, body, stores.values(), self.column)
        kernel = Kernel(unique, "chunk", tuple(loads), tuple(body), stores, row_dim=row_dim)
        cone = [node for node in body if node not in stores.values()]
        summed = summed_dim(cone, list(stores.values()), self.column)
        if summed:
            kernel = replace(kernel, row_dim=summed, summed=True)
        sums = self._sums_of(loads, body)
        whole = sums.whole
        alone = self.mixed and not any(self.column in x.meta["dims"] for x in (*loads, *body))
        if whole or alone:
            sums = whole_sums(loads, self.sliced)
        self.add_kernel(replace(kernel, sums=sums, whole=whole))
        for node in values:
            self.stored[node] = None

    def _fits(
        self, results: list[fx.Node], kept: Iterable[fx.Node] = (), limit: int | None = None
    ) -> bool:
        """Can one kernel compute results, the values `kept` waiting in memory? With few enough
        products, and few enough registers unless it is small or tiled."""
        body, loads = self._body_after(results, kept)
        products = sum(node.target is ops.matmul for node in body)
        if not self._few_products(body):
            return False
        tiled = any(node.target in VECTOR_SUMS for node in body)
        if products <= SMALL_PRODUCTS or tiled:
            return True
        return most_alive(loads, body, results) <= (limit or MAX_ALIVE)

    def _body_after(
        self, results: list[fx.Node], kept: Iterable[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """`body_of` results once the values `kept` wait in memory."""
        stored = self.stored
        self.stored = stored | dict.fromkeys(kept)
        found = self.body_of(results)
        self.stored = stored
        return found

    @staticmethod
    def _few_products(body: list[fx.Node]) -> bool:
        products = sum(node.target is ops.matmul for node in body)
        heavy = [node for node in body if node.target in HEAVY and node.target not in VECTOR_SUMS]
        pairs = {pair_of_sums(node) for node in body if node.target in VECTOR_SUMS}
        return products <= MAX_PRODUCTS and len(heavy) + len(pairs) <= MAX_HEAVY

    def _cheapest_cut(
        self, body: list[fx.Node], pending: list[fx.Node], results: dict[str, fx.Node]
    ) -> tuple[list[fx.Node], dict[str, fx.Node]]:
        """The cut whose kernels move the fewest bytes: values that cross it, and results that end
        before it. Two kernels if they fit; else the fewest bytes a product, and on from there."""
        cuts = self._cuts(body, {*pending, *results.values()})
        by_bytes = sorted(cuts, key=lambda cut: (cut.tiles, -cut.end))
        by_work = sorted(cuts, key=lambda cut: (cut.tiles / cut.work, -cut.end))
        for order, at_last in ((by_bytes, True), (by_work, False)):
            tried: set[tuple[fx.Node, ...]] = set()  # cuts at several places may be the same
            for cut in order:
                finished = self._finished(cut.crossing, results)
                rest = [x for name, x in results.items() if name not in finished]
                kept = self._still_read(cut.crossing, [*pending, *rest])
                if (*kept, *finished.values()) in tried:
                    continue
                tried.add((*kept, *finished.values()))
                after = [x for x in (*pending, *rest) if x not in kept]
                little = not any(map(_costly, self._body_after(after, kept)[0]))
                before = [*kept, *finished.values()]
                if not self._fits(before, limit=MAX_ALIVE_LAST if little else MAX_ALIVE):
                    continue
                if not at_last or self._fits(after, kept):
                    return kept, finished
        raise AssertionError("no cut fits a kernel")

    def _cuts(self, body: list[fx.Node], roots: set[fx.Node]) -> list[_Cut]:
        """Every cut behind some work, in the order of the graph."""
        cuts = []
        for end in range(1, len(body)):
            prefix, suffix = body[:end], body[end:]
            if not self._few_products(prefix):
                break
            there = self._read_by(suffix)
            again = sum(self._made_of(node, there) for node in prefix)
            work = sum(map(_costly, prefix)) - again
            crossing = self._crossing(prefix, suffix, roots, there) if work else []
            if crossing:
                tiles = 2 * sum(map(self._weight, crossing)) + AGAIN * again
                tiles += sum(map(self._weight, there & self._read_by(prefix)))
                cuts.append(_Cut(end, crossing, work, tiles))
        return cuts

    def _crossing(
        self,
        prefix: list[fx.Node],
        suffix: list[fx.Node],
        roots: set[fx.Node],
        there: Set[fx.Node] = frozenset(),
    ) -> list[fx.Node]:
        """Values of the prefix that the suffix and the roots need. there: what the suffix reads
        anyway, if products of that alone may be made again."""
        inside = set(prefix)
        out: dict[fx.Node, None] = {}
        stack = [x for node in suffix for x in node.args if isinstance(x, fx.Node)]
        stack.extend(root for root in roots if root in inside)
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node not in inside:
                continue
            seen.add(node)
            if node not in roots and self._made_of(node, there):
                continue
            if self.costly[node] and node.target not in VIEWS:
                below = self._only_product_below(node)
                if below is None or below not in inside:
                    out[node] = None
                else:
                    stack.append(below)
            else:
                stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return sorted(out, key=self.order.__getitem__)

    def _read_by(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """What waits in memory and nodes read, by themselves or through plain arithmetic."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = [x for node in nodes for x in node.args if isinstance(x, fx.Node)]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder" or node in self.stored:
                found.add(node)
            elif not self.costly[node]:
                stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return found

    def _made_of(self, node: fx.Node, there: Set[fx.Node]) -> bool:
        """One product of tiles that both sides of a cut read: making it again takes less time than
        its way through memory."""
        if node.target is not ops.matmul:
            return False
        operands = [x for x in node.args if isinstance(x, fx.Node)]
        if any(self.costly[x] or self.gated[x] for x in operands if x not in self.stored):
            return False
        return there >= set(self.body_of(operands)[1])

    def _only_product_below(self, node: fx.Node) -> fx.Node | None:
        """The one operand with a product below it, if the node is arithmetic on it alone: several
        values that are made from it then cross as one."""
        if node.target in HEAVY | SLOW or node.target in (ops.matmul, ops.total, ops.amax):
            return None
        operands = [x for x in node.args if isinstance(x, fx.Node)]
        products = {x for x in operands if self.costly[x]}
        if len(products) != 1:
            return None
        below = products.pop()
        return below if rank_of(below) <= rank_of(node) else None

    @staticmethod
    def _weight(node: fx.Node) -> float:
        """Elements of a value relative to a [C, C] tile, other dims being as wide as two chunks."""
        dims = [dim for dim in node.meta["dims"] if dim != UNIT_DIM]
        if len(dims) < 2:
            return 0.05 if dims else 0.02
        return math.prod(1.0 if dim == TOKEN_DIM else 2.0 for dim in dims)


def _costly(node: fx.Node) -> bool:
    """A product or a domain operator."""
    return node.target is ops.matmul or node.target in HEAVY
