"""Checks of log-scaled states, whose transition is built in.

Contract: `unscaled` proves that every state is scaled by `c.carry` alone and that what is added
is homogeneous of degree one in `c.fresh`; it returns the cell with the bare contributions
`local_<s>` (fresh taken out), or raises NotAffineError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.trace.stages import FRESH, SHIFT
from flexla_dist.compiler.transition import Transition
from flexla_dist.errors import NotAffineError
from flexla_dist.spec.spec import LinearAttentionSpec


def unscaled(spec: LinearAttentionSpec, cell: Cell, transitions: Mapping[str, Transition]) -> Cell:
    """The cell with contributions of degree zero, see the module."""
    return _LogScaledCheck(spec, cell, transitions).run()


class _LogScaledCheck:
    """M must be exactly `carry`, the contribution homogeneous of degree one in `fresh`."""

    def __init__(
        self, spec: LinearAttentionSpec, cell: Cell, transitions: Mapping[str, Transition]
    ):
        self.spec, self.cell, self.transitions = spec, cell, transitions

    def run(self) -> Cell:
        outputs = self.cell.outputs
        for name, transition in self.transitions.items():
            decay = outputs.get(f"decay_{name}")
            if transition.kind != "scalar" or decay is None or not self._is_carry(decay):
                raise self._error(
                    f"state {name!r} of a log-scaled spec must be scaled by c.carry alone: "
                    "return S * c.carry + c.fresh * X",
                    self._next_state(name),
                )
            if self._degree(outputs[f"local_{name}"], {}) != 1:
                raise self._error(
                    f"what is added to state {name!r} must be c.fresh times a value: "
                    "return S * c.carry + c.fresh * X",
                    self._next_state(name),
                )
        builder = Builder()
        whole = self.cell.copy_into(builder)
        bare = self.cell.copy_into(builder, substitute={FRESH: 1.0})
        for name in self.transitions:
            whole[f"local_{name}"] = builder.expand(
                bare[f"local_{name}"], self.spec.state_dims[name]
            )
        return builder.finish(whole)

    def _next_state(self, name: str) -> fx.Node:
        """What decay_mode returned, whose line an error shows."""
        return self.cell.outputs[f"next_{name}"]

    def _is_carry(self, node: fx.Node) -> bool:
        while node.target in (ops.unsqueeze, ops.expand):
            node = node.args[-1]
        if node.target is not ops.exp or node.args[0].target is not ops.add:
            return False
        keys = {x.meta.get("key") for x in node.args[0].args if isinstance(x, fx.Node)}
        return SHIFT in keys

    def _degree(self, x: Any, seen: dict[fx.Node, int]) -> int:
        if not isinstance(x, fx.Node):
            return 0
        if x not in seen:
            seen[x] = self._node_degree(x, seen)
        return seen[x]

    def _node_degree(self, node: fx.Node, seen: dict[fx.Node, int]) -> int:
        if node.op == "placeholder":
            return int(node.meta["key"] == FRESH)
        degrees = [self._degree(x, seen) for x in node.args]
        if not any(degrees):
            return 0
        if node.target in (ops.mul, ops.matmul):
            return sum(degrees)
        if node.target is ops.div and degrees[1] == 0:
            return degrees[0]
        if node.target in (ops.add, ops.sub) and len(set(degrees)) == 1:
            return degrees[0]
        if OPERATORS[node.target].kind in ("shape", "reduce") or node.target is ops.neg:
            return max(degrees)
        raise self._error("c.fresh may only be multiplied with what is added to the state", node)

    def _error(self, message: str, node: fx.Node | None = None) -> NotAffineError:
        origin = None if node is None else node.meta["origin"]
        return NotAffineError(message, spec=self.spec.name, stage="decay_mode", origin=origin)
