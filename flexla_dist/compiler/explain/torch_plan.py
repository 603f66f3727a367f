"""The programs that the torch executor runs, by when their arguments are known.

Contract: reading only; works wherever the package does.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexla_dist.compiler.explain.statements import Names, is_product, result_name
from flexla_dist.compiler.partition import Program
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.compiler.precision import widen_exponents

WHEN = {
    0: "of a chunk alone",
    1: "with the state entering each chunk",
    2: "with the gradient of the state leaving it",
}


@dataclass(frozen=True)
class Level:
    """One program: batched over documents, heads and the chunks of a slab.

    `results` are what later levels and the scan read, `after` what runs when it is done.
    """

    direction: str
    level: int
    when: str
    operators: int
    products: int
    results: tuple[str, ...]
    after: str


def torch_plan(graphs: Graphs) -> tuple[Level, ...]:
    """Programs of both directions in the order in which they run."""
    dense = any(t.has_matrix for t in graphs.transitions.values())
    step = "one product a chunk" if dense else "one multiply-add a chunk"
    out = []
    for direction in ("forward", "backward"):
        narrow = graphs.forward(False) if direction == "forward" else graphs.backward(False)
        cell = widen_exponents(narrow)  # the graph that programs are cut from
        names = Names(cell)
        shown = {f"value_{node.name}": names.shown(node) for node in cell.calls}
        programs = graphs.programs(direction, False)
        last = max(programs)
        for level in sorted(programs):
            program = programs[level]
            after = _after(direction, level, last, step)
            out.append(_level(direction, level, program, shown, after))
    return tuple(out)


def _level(
    direction: str, level: int, program: Program, shown: dict[str, str], after: str
) -> Level:
    calls = [node for node in program.module.graph.nodes if node.op == "call_function"]
    results = tuple(
        shown.get(name) or result_name(name.removeprefix("value_")) for name in program.results
    )
    products = sum(is_product(node) for node in calls)
    return Level(direction, level, WHEN[level], len(calls), products, results, after)


def _after(direction: str, level: int, last: int, step: str) -> str:
    if level == 0:
        return f"scan over chunks, {step}"
    if level == 1 and direction == "backward" and last > 1:
        return f"reversed scan, {step}"
    return ""
