"""Exponents in float64: sums of log decays keep their small differences.

A running sum of gates grows to hundreds while only its differences matter; in float32 a difference
of two sums near 1000 is off by 1e-4, and so is the decay between two neighbouring tokens. The sums
have one number a token (or one a token and key dim), so float64 costs little there.

Contract: `widen_exponents` returns the same cell with two kinds of values in float64: sums that end
in an exponential or in the gate of a domain operator, and the sums over tokens that make the
gradient of a gate from terms that cancel. Everything else, and every result but the log factors of
log-scaled states, is in the compute dtype. For executors that run operators one by one.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell, Mark, Operand, is_mask
from flexla_dist.shapes import TOKEN_DIM

WIDE_RESULTS = ("log_decay", "log_weight")
_SUMS = frozenset({ops.cumsum, ops.total})
_LINEAR = frozenset(
    {ops.add, ops.sub, ops.neg, ops.unsqueeze, ops.squeeze, ops.place, ops.shift, ops.cumsum}
)
_EXPONENT = _LINEAR | frozenset(
    {
        *(ops.mul, ops.div, ops.maximum, ops.minimum, ops.amax, ops.where, ops.stop_gradient),
        *(ops.permute, ops.expand, ops.select, ops.total),
    }
)
_GATES = {
    ops.exp: (0,),
    ops.decay_matrix: (0, 1),
    ops.decay_scores: (2, 3),
    ops.decay_rows: (2, 3),
    ops.decay_cols: (2, 3),
}
_WITH_WIDE_GATES = {
    ops.decay_scores: ops.wide_decay_scores,
    ops.decay_rows: ops.wide_decay_rows,
    ops.decay_cols: ops.wide_decay_cols,
}


def widen_exponents(cell: Cell) -> Cell:
    """The cell with its exponents in float64, see the module."""
    return _Widening(cell).run()


def _wide_nodes(cell: Cell) -> set[fx.Node]:
    calls = cell.calls
    outputs = cell.outputs
    feeds = {outputs[name] for name in WIDE_RESULTS if name in outputs}
    for node in reversed(calls):
        for at in _GATES.get(node.target, ()):
            feeds.add(node.args[at])
        if node in feeds and node.target in _EXPONENT:
            feeds.update(x for x in node.args if isinstance(x, fx.Node) and not is_mask(x))
    wide: set[fx.Node] = set()
    for node in calls:
        summed = node.target in _SUMS or any(x in wide for x in node.args)
        if node in feeds and node.target in _EXPONENT and summed:
            wide.add(node)
    return wide | _gradient_sums(calls, wide)


def _gradient_sums(calls: list[fx.Node], exponents: set[fx.Node]) -> set[fx.Node]:
    """Running sums of one number a token, with the sums and differences that they add up."""
    wide: set[fx.Node] = set()
    for node in reversed(calls):
        vector = node.meta["dims"] in ((TOKEN_DIM,), ())
        if node.target is ops.cumsum and vector and node not in exponents:
            wide.add(node)
        if node in wide and node.target in _LINEAR:
            wide.update(x for x in node.args if _is_sum(x))
    return wide - exponents


def _is_sum(x: Operand) -> bool:
    return isinstance(x, fx.Node) and x.target in _LINEAR | _SUMS


class _Widening:
    def __init__(self, cell: Cell):
        self.cell = cell
        self.wide = _wide_nodes(cell)
        self.builder = Builder()
        self.env: dict[fx.Node, Operand] = {}

    def run(self) -> Cell:
        for node in self.cell.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._argument(node)
            elif node.op == "call_function":
                self.builder.mark = Mark(
                    node.meta["stage"], node.meta["origin"], node.meta.get("label", "")
                )
                self.env[node] = self._emit(node)
        return self.builder.finish(self._results(self.cell.outputs))

    def _argument(self, node: fx.Node) -> fx.Node:
        if node.meta["role"] == "sizes":
            return self.builder.sizes
        meta = node.meta
        return self.builder.placeholder(meta["key"], meta["dims"], meta["role"], meta["mask"])

    def _results(self, outputs: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
        return {
            name: self._wide(x) if name in WIDE_RESULTS else self._narrow(x)
            for name, x in outputs.items()
        }

    def _emit(self, node: fx.Node) -> fx.Node:
        fn, b = node.target, self.builder
        if node in self.wide:
            operands = [self._wide(x) for x in node.args]
            if fn is ops.total:
                return b.emit(ops.wide_total, self.env[node.args[0]], **node.kwargs)
            return b.emit(fn, *operands, **node.kwargs)
        gates = _GATES.get(fn, ()) if fn is not ops.exp else ()
        if not any(node.args[at] in self.wide for at in gates):
            return b.emit(fn, *(self._narrow(x) for x in node.args), **node.kwargs)
        operands = [
            self._wide(x) if at in gates else self._narrow(x) for at, x in enumerate(node.args)
        ]
        if fn is ops.decay_matrix:
            return b.emit(ops.wide_decay_matrix, b.sizes, *operands, **node.kwargs)
        return b.emit(_WITH_WIDE_GATES[fn], *operands, **node.kwargs)

    def _wide(self, x: Operand) -> Operand:
        if not isinstance(x, fx.Node):
            return x
        known = self.env[x]
        plain = x in self.wide or is_mask(x) or x.meta["role"] == "sizes"
        return known if plain else self.builder.emit(ops.widen, known)

    def _narrow(self, x: Operand) -> Operand:
        if not isinstance(x, fx.Node):
            return x
        known = self.env[x]
        return self.builder.emit(ops.narrow, self.builder.sizes, known) if x in self.wide else known
