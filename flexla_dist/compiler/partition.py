"""Cuts a cell into programs by when their arguments become known.

Contract: arguments have levels: 0 what the call gives, 1 the states entering each chunk (known
after the forward scan), 2 the gradients of the states leaving it (known after the reversed scan).
A node belongs to the first level at which it can be computed. `partition` returns one program a
level; values that a later level needs travel as named arguments. Views and constants are made
again instead of travelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell, add_argument
from flexla_dist.compiler.ir.operators import OPERATORS

_REMADE = frozenset({ops.unsqueeze, ops.squeeze, ops.permute, ops.expand})
LEVELS = {
    "sizes": 0,
    "input": 0,
    "log_decay": 0,
    "param": 0,
    "scalar": 0,
    "valid": 0,
    "grad_output": 0,
    "state": 1,
    "grad_next": 2,
}


@dataclass(frozen=True)
class Program:
    """Straight-line code of one level: `results = module(*arguments)`, both by name."""

    module: fx.GraphModule
    arguments: tuple[str, ...]
    results: tuple[str, ...]

    def run(self, values: dict[str, torch.Tensor]) -> None:
        """Compute the results from `values` into `values`."""
        out = self.module(*(values[name] for name in self.arguments))
        values.update(zip(self.results, out, strict=True))


def _is_remade(node: fx.Node) -> bool:
    return node.target in _REMADE or OPERATORS[node.target].kind == "source"  # type: ignore[index]


class _Partitioner:
    def __init__(self, cell: Cell):
        self.cell = cell
        self.level: dict[fx.Node, int] = {}
        for node in cell.graph.nodes:
            if node.op == "placeholder":
                self.level[node] = LEVELS[node.meta["role"]]
            elif node.op == "call_function":
                self.level[node] = max(
                    (self.level[x] for x in node.args if isinstance(x, fx.Node)), default=0
                )

    def run(self, wanted: Mapping[str, fx.Node]) -> dict[int, Program]:
        top = max((self.level[n] for n in wanted.values()), default=0)
        results: dict[int, dict[str, fx.Node]] = {k: {} for k in range(top + 1)}
        for name, node in wanted.items():
            results[self.level[node]][name] = node
        programs: dict[int, Program] = {}
        for level in range(top, -1, -1):
            program, missing = self._program(level, results[level])
            programs[level] = program
            for node in missing:
                results[self.level[node]].setdefault(f"value_{node.name}", node)
        return programs

    def _program(self, level: int, results: Mapping[str, fx.Node]) -> tuple[Program, list[fx.Node]]:
        body, arguments = self._collect(level, list(results.values()))
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        names = []
        for node in arguments:
            names.append(_argument_name(node))
            env[node] = add_argument(graph, names[-1])
        for node in self.cell.graph.nodes:
            if node in body:
                env[node] = graph.node_copy(node, lambda x: env[x])
        graph.output(tuple(env[node] for node in results.values()))
        module = fx.GraphModule({}, graph)
        missing = [node for node in arguments if node.op == "call_function"]
        return Program(module, tuple(names), tuple(results)), missing

    def _collect(self, level: int, roots: list[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
        body: set[fx.Node] = set()
        arguments: dict[fx.Node, None] = {}
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in body or node in arguments:
                continue
            outside = node.op == "call_function" and self.level[node] < level
            if node.op == "placeholder" or (outside and not _is_remade(node)):
                arguments[node] = None
                continue
            body.add(node)
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        order = {node: at for at, node in enumerate(self.cell.graph.nodes)}
        return body, sorted(arguments, key=order.__getitem__)


def _argument_name(node: fx.Node) -> str:
    return node.meta["key"] if node.op == "placeholder" else f"value_{node.name}"


def partition(cell: Cell, names: list[str] | None = None) -> dict[int, Program]:
    """Programs by level that compute the named results of a cell (default all)."""
    outputs = cell.outputs
    wanted = outputs if names is None else {name: outputs[name] for name in names}
    return _Partitioner(cell).run(wanted)
