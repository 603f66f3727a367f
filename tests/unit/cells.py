"""Traces one expression over a chunk and runs it, for tests of the compiler's passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.passes import domain, simplify, transpose
from flexla_dist.compiler.passes.engine import rewrite
from flexla_dist.compiler.trace.stages import trace_spec
from flexla_dist.compiler.verify import verify_cell
from flexla_dist.spec.spec import LinearAttentionSpec

SIZES = {"C": 13, "K": 5, "V": 7, "D": 6}
INPUTS = {
    "q": "C K",
    "k": "C K",
    "v": "C V",
    "x": "C D",
    "g": "C <=0",
    "gk": "C K <=0",
    "gd": "C D <=0",
    "beta": "C",
    "w": "C",
}
Expression = Callable[[Any, Any], Any]


def spec_of(expression: Expression, **changes: Any) -> LinearAttentionSpec:
    """A spec whose chunk_mode computes `expression(x, p)` and whose output sums it all."""

    def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
        return {"value": expression(x, p), "v": x.v}

    settings: dict[str, Any] = {
        "name": "example",
        "inputs": INPUTS,
        "params": {"a": ""},
        "scalars": {"scale": 1.0},
        "chunk_mode": chunk_mode,
        "decay_mode": lambda S, c: S,
        "merge_mode": lambda S, c: c.v + c.value.sum(),
        **changes,
    }
    return LinearAttentionSpec(**settings)


def cell_of(expression: Expression, **changes: Any) -> Cell:
    """The expression alone as a cell with the result `value`, every token valid."""
    traced = trace_spec(spec_of(expression, **changes))
    builder = Builder()

    def emit(fn: Any, *operands: Any, **attrs: Any) -> Any:
        if fn is ops.where and operands[0].target is not ops.tri_mask:
            mask = operands[0]
            while mask.target is ops.unsqueeze:
                mask = mask.args[0]
            if mask.meta["role"] == "valid":
                return operands[1]
        return builder.emit(fn, *operands, **attrs)

    traced.copy_into(builder, emit=emit)
    total = [n for n in builder.graph.nodes if n.meta.get("stage") == "merge_mode"]
    first = next(n for n in total if n.op == "call_function")
    value = first.args[0] if first.args and isinstance(first.args[0], fx.Node) else first
    return builder.finish({"value": value})


def rewritten(cell: Cell) -> Cell:
    """The cell after the passes that run before differentiation."""
    results = {name: node.meta["dims"] for name, node in cell.outputs.items()}
    for rules in (simplify.RULES, transpose.RULES, domain.RULES, simplify.RULES):
        cell, _ = rewrite(cell, rules)
        verify_cell(cell, "test", results)
    return cell


def names(cell: Cell) -> list[str]:
    """Operators of a cell in order."""
    return [node.target.__name__ for node in cell.calls]


def data(seed: int = 0, gate: float = 0.3) -> dict[str, Tensor]:
    """Random float64 inputs; gates between -gate and 0."""
    torch.manual_seed(seed)
    out = {}
    for name, text in INPUTS.items():
        dims = [SIZES[d] for d in text.replace("<=0", "").split()]
        out[name] = -gate * torch.rand(dims) if "<=0" in text else torch.randn(dims)
        out[name] = out[name].double()
    return {**out, "a": torch.tensor(0.7).double(), "scale": torch.tensor(1.3).double()}


def run(cell: Cell, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of a cell on tensors."""
    sizes = ops.Sizes(SIZES, torch.device("cpu"), torch.float64)
    module = fx.GraphModule({}, cell.graph)
    valid = torch.ones(SIZES["C"], dtype=torch.bool)
    known = {**values, "sizes": sizes, "valid": valid}
    return module(*(known.get(name) for name in cell.placeholders))
