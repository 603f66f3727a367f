"""In which order a kernel computes, so that few registers are alive at a time.

Contract: `emission_order` lists the nodes of a chunk kernel that cost something (products, domain
operators, sums, results), each after those it needs; what lies between them is emitted with the
first that uses it. Values made from loads by arithmetic alone are *cheap*; those that would hold
registers (`held_values`) are dropped where the next step does not use them and made again, from a
second load that the cache serves.

The order is found by a beam search over the steps. Its cost is the most that is alive at a time,
then the sum over all steps; sizes are those of a chunk of 64 tokens and dims of 128. Equal costs
keep the order of the graph, so the same graph gives the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.kinds import HEAVY, SLOW, SUMS, VIEWS
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM

BEAM = 16
_CHUNK, _DIM = 64, 128


def cheap_values(loads: Iterable[fx.Node], body: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """Tiles that are loaded, or made from loads by views and plain arithmetic."""
    cheap = {node for node in loads if _size(node) > _DIM}
    small = {node for node in loads if _size(node) <= _DIM}
    for node in body:
        if node.target in SLOW or node.target in HEAVY or node.target in SUMS:
            continue
        operands = [x for x in node.args if isinstance(x, fx.Node)]
        plain = node.target is not ops.matmul and all(x in cheap or x in small for x in operands)
        if plain:
            (cheap if _size(node) > _DIM else small).add(node)
    return frozenset(cheap)


def held_values(loads: Iterable[fx.Node], body: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """Cheap values that arithmetic holds in registers; what only products read lies in shared
    memory."""
    cheap = cheap_values(loads, body)
    held: set[fx.Node] = set()
    for node in reversed(body):
        if node.target is ops.matmul or (node.target in VIEWS and node not in held):
            continue
        held.update(x for x in (node, *node.args) if isinstance(x, fx.Node) and x in cheap)
    return frozenset(held)


def emission_order(
    loads: Iterable[fx.Node], body: Sequence[fx.Node], results: Iterable[fx.Node]
) -> list[fx.Node]:
    """Products, domain operators, sums and results of a chunk kernel in the order to compute, and
    arithmetic that is done as soon as it can replace its operands."""
    search = _Search(loads, body, set(results))
    return [search.values[at] for at in search.run().order]


def most_alive(
    loads: Iterable[fx.Node], body: Sequence[fx.Node], results: Iterable[fx.Node]
) -> int:
    """Elements alive at a time in the best order."""
    return _Search(loads, body, set(results)).run().peak


@dataclass(frozen=True)
class _Partial:
    """An order so far: what is computed, and what it cost."""

    peak: int
    total: int
    order: tuple[int, ...]
    done: int  # bit set of computed values


class _Search:
    def __init__(self, loads: Iterable[fx.Node], body: Sequence[fx.Node], results: set[fx.Node]):
        cheap = cheap_values(loads, body)
        self.values = [n for n in body if n not in cheap or n in results]
        self.bit = {node: 1 << at for at, node in enumerate(self.values)}
        self.sizes = [_size(n) if n.target not in VIEWS else 0 for n in self.values]
        self.needs = [self._below(node) for node in self.values]
        self.users = [0] * len(self.values)
        for at, below in enumerate(self.needs):
            for other in range(len(self.values)):
                if below >> other & 1:
                    self.users[other] |= 1 << at
        self._look_through_views()
        self.steps = [
            at
            for at, node in enumerate(self.values)
            if node.target is ops.matmul
            or node.target in HEAVY
            or node.target in SUMS
            or node in results
        ]
        taken = {*self.steps}
        self.plain = [
            at
            for at, node in enumerate(self.values)
            if at not in taken and node.target not in VIEWS and self.sizes[at] > _DIM
        ]
        self.cones = {at: self._cone(at) for at in self.steps}
        marks = sum(1 << at for at in self.steps)
        self.before = {at: self.cones[at] & marks & ~(1 << at) for at in self.steps}

    def _below(self, node: fx.Node) -> int:
        """Values that a value is made from; nothing lies below a cheap one."""
        return sum(self.bit[x] for x in set(node.args) if isinstance(x, fx.Node) and x in self.bit)

    def _look_through_views(self) -> None:
        """Users of a view use what it looks at."""
        for at in range(len(self.values) - 1, -1, -1):
            if self.values[at].target in VIEWS:
                for other in range(at):
                    if self.needs[at] >> other & 1:
                        self.users[other] |= self.users[at]

    def _cone(self, at: int) -> int:
        found, stack = 0, [at]
        while stack:
            here = stack.pop()
            if found >> here & 1:
                continue
            found |= 1 << here
            stack.extend(i for i in range(here) if self.needs[here] >> i & 1)
        return found

    def run(self) -> _Partial:
        beam = [_Partial(0, 0, (), 0)]
        for _ in self.steps:
            reached: dict[int, _Partial] = {}
            for partial in beam:
                for step in self._ready(partial):
                    longer = self._extend(partial, step)
                    known = reached.get(longer.done)
                    if known is None or _cost(longer) < _cost(known):
                        reached[longer.done] = longer
            beam = sorted(reached.values(), key=_cost)[:BEAM]
        return beam[0]

    def _ready(self, partial: _Partial) -> Iterable[int]:
        taken = partial.done
        return (at for at in self.steps if not taken >> at & 1 and not self.before[at] & ~taken)

    def _extend(self, partial: _Partial, step: int) -> _Partial:
        fresh = self.cones[step] & ~partial.done
        done = partial.done | self.cones[step]
        made = self.sizes[step] + self._alive(done, fresh & ~(1 << step))
        peak = max(partial.peak, self._alive(partial.done) + made)
        done, eager = self._settle(done)
        total = partial.total + self._alive(done)
        return _Partial(peak, total, (*partial.order, step, *eager), done)

    def _settle(self, done: int) -> tuple[int, list[int]]:
        """Arithmetic that replaces what it is made from, done at once."""
        eager: list[int] = []
        alive = self._alive(done)
        for at in self.plain:
            if done >> at & 1 or self.needs[at] & ~done:
                continue
            then = self._alive(done | 1 << at)
            if then < alive or (then == alive and self._alive(done | 1 << at, ~(1 << at)) < alive):
                done, alive = done | 1 << at, then
                eager.append(at)
        return done, eager

    def _alive(self, done: int, among: int = -1) -> int:
        """Size of the values, of those `among`, that something not yet done uses."""
        return sum(
            self.sizes[at]
            for at in range(len(self.values))
            if done & among & 1 << at and self.users[at] & ~done
        )


def _cost(partial: _Partial) -> tuple[int, int, tuple[int, ...]]:
    return partial.peak, partial.total, partial.order


def _size(node: fx.Node) -> int:
    """Elements of a value at the usual sizes."""
    numel = 1
    for dim in node.meta["dims"]:
        if dim != UNIT_DIM:
            numel *= _CHUNK if dim == TOKEN_DIM else _DIM
    return numel
