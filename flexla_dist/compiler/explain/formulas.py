"""The expression of one operator, as a person would write it.

Contract: `formula(node, operands)` joins the operands' texts; parentheses only where they are
needed. Broadcasting is not shown: dims stand beside every statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import dims_of
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM

COMPARE, SUM, PRODUCT, SIGN, ATOM = range(5)  # how tightly a text binds


@dataclass(frozen=True)
class Formula:
    """A text, how tightly its outermost operator binds, and which one that is if infix."""

    text: str
    binds: int
    symbol: str = ""

    def within(self, level: int) -> str:
        """The text as an operand of an operator that binds with `level`."""
        return self.text if self.binds >= level else f"({self.text})"


_INFIX: dict[Callable[..., Any], tuple[str, int, int]] = {
    # symbol, level of the result, level that the right operand needs
    ops.add: ("+", SUM, SUM),
    ops.sub: ("-", SUM, PRODUCT),
    ops.mul: ("*", PRODUCT, PRODUCT),
    ops.div: ("/", PRODUCT, SIGN),
    ops.matmul: ("@", PRODUCT, SIGN),
    ops.greater: (">", COMPARE, SUM),
    ops.greater_equal: (">=", COMPARE, SUM),
    ops.equal: ("==", COMPARE, SUM),
    ops.logical_and: ("and", COMPARE, SUM),
    ops.logical_or: ("or", COMPARE, SUM),
}
_SILENT = frozenset({ops.unsqueeze, ops.squeeze, ops.expand, ops.widen, ops.narrow})
_RENAMED = {ops.total: "sum", ops.amax: "max", ops.where: "select", ops.absolute: "abs"}


def as_number(value: float) -> str:
    """A number without needless digits."""
    return f"{value:.6g}"


def formula(node: fx.Node, operands: list[Formula | float]) -> Formula:
    """The expression of a node from those of its operands (without the sizes argument)."""
    xs = [
        x if isinstance(x, Formula) else Formula(as_number(x), ATOM if x >= 0 else SIGN)
        for x in operands
    ]
    fn: Any = node.target
    if fn in _INFIX:
        return _infix(node, xs)
    if fn in _SILENT:
        return xs[0]
    if fn is ops.neg:
        return Formula(f"-{xs[0].within(SIGN)}", SIGN)
    if fn is ops.logical_not:
        return Formula(f"not {xs[0].within(SIGN)}", SIGN)
    if fn is ops.power:
        exponent = as_number(float(node.kwargs["exponent"]))  # type: ignore[arg-type]
        return Formula(f"{xs[0].within(ATOM)}**{exponent}", SIGN)
    if fn is ops.permute:
        return Formula(f"{xs[0].within(ATOM)}.T", ATOM)
    if fn is ops.select:
        return Formula(f"{xs[0].within(ATOM)}[{_selected(node)}]", ATOM)
    source = _source(node)
    if source is not None:
        return source
    name = _RENAMED.get(fn, OPERATORS[fn].name)
    return Formula(f"{name}({', '.join([x.text for x in xs] + _attributes(node))})", ATOM)


def _infix(node: fx.Node, xs: list[Formula]) -> Formula:
    symbol, level, right = _INFIX[node.target]  # type: ignore[index]
    a, b = _outer(node, xs)
    left = SUM if level == COMPARE else level
    if symbol == "+" and b.binds == SIGN and b.text.startswith("-"):
        return Formula(f"{a.within(left)} - {b.text[1:]}", level, "-")
    if level == PRODUCT:
        left, right = max(left, _needs(symbol, a)), max(right, _needs(symbol, b))
    return Formula(f"{a.within(left)} {symbol} {b.within(right)}", level, symbol)


def _outer(node: fx.Node, xs: list[Formula]) -> list[Formula]:
    """A column and a row spread over a matrix show their axes: `b[:, None] - b[None, :]`."""
    marks = {(False, True): "[:, None]", (True, False): "[None, :]"}
    shapes = [tuple(dim == UNIT_DIM for dim in dims_of(x)) for x in node.args]  # type: ignore[arg-type]
    if set(shapes) != set(marks):
        return xs
    return [
        Formula(x.within(ATOM) + marks[shape], ATOM)  # type: ignore[index]
        for x, shape in zip(xs, shapes, strict=True)
    ]


def _needs(symbol: str, x: Formula) -> int:
    """`q * scale @ k` reads as one thing and is another: two kinds of products are kept apart."""
    mixed = x.binds == PRODUCT and (x.symbol == "@") != (symbol == "@")
    return SIGN if mixed else PRODUCT


def _selected(node: fx.Node) -> str:
    index = str(node.kwargs["index"])
    return index if int(node.kwargs["dim"]) + len(dims_of(node.args[0])) == 0 else f":, {index}"  # type: ignore[arg-type]


def _source(node: fx.Node) -> Formula | None:
    if node.target is ops.full:
        return Formula(as_number(float(node.kwargs["value"])), ATOM)  # type: ignore[arg-type]
    if node.target is ops.eye:
        return Formula(f"eye({node.kwargs['dim']})", ATOM)
    if node.target is ops.iota:
        return Formula(f"arange({node.kwargs['dim']})", ATOM)
    if node.target is ops.size:
        return Formula(f"size({node.kwargs['dim']})", ATOM)
    if node.target is ops.tri_mask:
        diagonal = node.kwargs["diagonal"]
        return Formula(f"lower_triangle({diagonal})" if diagonal else "lower_triangle()", ATOM)
    return None


def _attributes(node: fx.Node) -> list[str]:
    """Attributes that say more than the usual."""
    fn, out = node.target, []
    if fn in (ops.total, ops.amax, ops.cumsum, ops.shift):
        dims = dims_of(node.args[0])  # type: ignore[arg-type]
        dim = dims[int(node.kwargs["dim"])]  # type: ignore[arg-type]
        running = fn in (ops.cumsum, ops.shift)
        if len(dims) > 1 and not (running and dim == TOKEN_DIM):
            out.append(f"over {dim}")
    if node.kwargs.get("reverse"):
        out.append("reverse")
    if node.kwargs.get("strict"):
        out.append("strict")
    if fn in (ops.tril, ops.triu) and node.kwargs["diagonal"]:
        out.append(str(node.kwargs["diagonal"]))
    if fn is ops.shift:
        out.append(f"by {node.kwargs['by']}")
    if fn is ops.place:
        out.append(f"at {node.kwargs['index']}")
    return out
