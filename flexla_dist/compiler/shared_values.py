"""Values that forward and backward both need: kept by forward where making them again is dear.

Contract: a pair is a domain operator of the forward graph that reads no state (scores with vector
decays, triangular inverses: one [C, C] tile a chunk and head) and the node of the backward graph
that computes the same from the same arguments. Two nodes are the same if operators, attributes and
operands are, down to the arguments; that is decided by structure, never by name or order.
"""

from __future__ import annotations

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell

KEPT = frozenset({ops.decay_scores, ops.unit_tril_inverse})
_FIXED = frozenset({"input", "param", "scalar", "log_decay", "valid", "sizes"})
Form = tuple[object, ...]


def shared_values(forward: Cell, backward: Cell) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """(forward node, backward node) of every value that forward keeps, in forward's order."""
    numbers: dict[Form, int] = {}
    mine = _numbered(forward, numbers)
    theirs = {number: node for node, number in _numbered(backward, numbers).items()}
    return tuple(
        (node, theirs[number])
        for node, number in mine.items()
        if node.target in KEPT and number in theirs
    )


def _numbered(cell: Cell, numbers: dict[Form, int]) -> dict[fx.Node, int]:
    """A number for each node made from arguments alone; equal ones have equal numbers."""
    found: dict[fx.Node, int] = {}
    for node in cell.graph.nodes:
        form = _form(node, found)
        if form is not None:
            found[node] = numbers.setdefault(form, len(numbers))
    return found


def _form(node: fx.Node, found: dict[fx.Node, int]) -> Form | None:
    if node.op == "placeholder":
        role = node.meta["role"]
        return ("argument", role, node.meta["key"]) if role in _FIXED else None
    if node.op != "call_function":
        return None
    operands: list[object] = []
    for x in node.args:
        if not isinstance(x, fx.Node):
            operands.append(("number", x))
        elif x in found:
            operands.append(found[x])
        else:
            return None
    return (node.target, tuple(sorted(node.kwargs.items())), node.meta["dims"], *operands)
