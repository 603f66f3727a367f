"""Graphs as inline SVG: statements of a graph, and kernels with the memory between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from flexla_dist.compiler.explain.costs import H200, Move
from flexla_dist.compiler.explain.layers import Box, Picture, place_boxes
from flexla_dist.compiler.explain.numbers import as_bytes, as_ms
from flexla_dist.compiler.explain.plans import DirectionPlan, entering_from
from flexla_dist.compiler.explain.statements import Argument, Listing, Statement
from flexla_dist.compiler.explain.text import dims_text, place

CHARACTER = 6.65  # width of a character at 11 pixels
LINE = 15.0
LONGEST = 46
STATES = ("state", "grad_next", "grad_output")
INPUTS = ("input", "log_decay", "param")
CROWDED = 32  # statements; inputs of a larger graph are read in the text of its boxes


@dataclass(frozen=True)
class _Node:
    """A box with lines of text, a class for its colour and a tooltip."""

    key: str
    lines: tuple[str, ...]
    style: str
    tip: str
    late: bool = False

    @property
    def box(self) -> Box:
        width = max(len(line) for line in self.lines) * CHARACTER + 20
        return Box(self.key, width, len(self.lines) * LINE + 12, self.late)


def stage_class(stage: str) -> str:
    """`chunk` of `chunk_mode` and of `d chunk_mode`."""
    word = stage.removeprefix("d ").removesuffix("_mode")
    return word if word in ("token", "chunk", "decay", "merge") else "padding"


def graph_svg(listing: Listing, label: str) -> str:
    """Statements and arguments of a graph; an edge from what is read to what reads it."""
    drawn = STATES if len(listing.statements) > CROWDED else (*STATES, *INPUTS)
    names = {statement.name for statement in listing.statements}
    used = {name for statement in listing.statements for name in statement.reads}
    arguments = [a for a in listing.arguments if a.role in drawn and a.name in used - names]
    nodes = [_argument(a) for a in arguments] + [_statement(s) for s in listing.statements]
    known = {node.key for node in nodes}
    edges = [(r, s.name) for s in listing.statements for r in s.reads if r in known]
    return _svg(nodes, edges, label)


def _argument(argument: Argument) -> _Node:
    text = f"{argument.name} {dims_text(argument.dims)}"
    return _Node(argument.name, (text,), f"argument {argument.role}", argument.role, late=True)


def _statement(statement: Statement) -> _Node:
    head = f"{statement.name} {dims_text(statement.dims)}"
    tip = f"{head} = {statement.text}\n{statement.stage}"
    if statement.origin is not None:
        tip += f"  {place(statement.origin)}\n{statement.origin.text.strip()}"
    style = f"{stage_class(statement.stage)} {statement.kind}"
    return _Node(statement.name, (head, _shortened(statement.text)), style, tip)


def _shortened(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def plan_svg(plan: DirectionPlan) -> str:
    """Kernels in order of launch; an edge for memory that one writes and another reads."""
    nodes: list[_Node] = []
    edges: list[tuple[str, str]] = []
    written: dict[str, str] = {}
    for number, step in enumerate(plan.kernels, start=1):
        key = str(number)
        sources: dict[str, list[Move]] = {}
        for move in step.reads:
            names = (move.name,) if move.name in written else entering_from(move.name)
            found = [written[name] for name in names if name in written]
            edges += [(source, key) for source in found]
            sources.setdefault(found[0] if found else "", []).append(move)
        written.update(dict.fromkeys((move.name for move in step.writes), key))
        lines = (
            f"{number} {step.name}",
            _shortened(step.purpose),
            *(_source_line(source, sources[source]) for source in sorted(sources)),
            f"{as_ms(step.seconds(H200))} at least, {step.bound(H200)}",
        )
        tip = "\n".join(p.text for p in step.products) or "no products"
        nodes.append(_Node(key, lines, f"kernel {step.kind}", tip))
    return _svg(nodes, edges, f"kernels, {plan.direction}")


def _source_line(source: str, moves: Sequence[Move]) -> str:
    names = ", ".join(move.name for move in moves)
    size = as_bytes(sum(move.bytes for move in moves))
    start, end = ("", f" of {source}, {size}") if source else ("reads ", f", {size}")
    return start + _shortened(names, LONGEST - len(start + end)) + end


def _svg(nodes: Sequence[_Node], edges: Sequence[tuple[str, str]], title: str) -> str:
    boxes = [node.box for node in nodes]
    picture = place_boxes(boxes, edges)
    width, height = picture.width, picture.height
    out = [
        f'<svg class="graph" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'style="min-width:{0.75 * width:.0f}px" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title>",
    ]
    for edge, points in picture.paths.items():
        a, b = map(escape, edge)
        out.append(f'<path class="edge" data-from="{a}" data-to="{b}" d="{_curve(points)}"/>')
    for node, box in zip(nodes, boxes, strict=True):
        out.append(_box(node, box, picture))
    out.append("</svg>")
    return "\n".join(out)


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Straight down out of a box, smooth through the bends, straight down into the next."""
    text = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        text += f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"
    return text


def _box(node: _Node, box: Box, picture: Picture) -> str:
    x, y = picture.centres[node.key]
    left, top = x - box.width / 2, y - box.height / 2
    round_ = box.height / 2 if node.late else 5
    out = [
        f'<g class="node {node.style}" data-key="{escape(node.key)}">'
        f"<title>{escape(node.tip)}</title>",
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{round_:.0f}"/>',
    ]
    for at, line in enumerate(node.lines):
        bold = ' class="head"' if at == 0 else ""
        out.append(
            f'<text{bold} x="{x:.1f}" y="{top + 6 + LINE * (at + 0.75):.1f}">{escape(line)}</text>'
        )
    return "".join(out) + "</g>"
