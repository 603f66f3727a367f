"""The Triton text of every operator.

Contract: `Expressions.emit(node)` appends source lines for one node and remembers its tile.
Operands that were loaded stay in their storage type until elementwise arithmetic needs float32, so
that matrix products take them as they are. What Triton tiles cannot hold (three dims) is refused
with the user's line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from flexla_dist.compiler.emit.tiles import Tile, along, index_name, shape_text
from flexla_dist.compiler.emit.writer import Writer
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.errors import TraceError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims, format_dims

Handler = Callable[["Expressions", fx.Node], Tile]
HANDLERS: dict[Callable[..., Any], Handler] = {}

_UNARY: dict[Callable[..., Any], str] = {
    ops.neg: "-{0}",
    ops.exp: "tl.exp({0})",
    ops.expm1: "expm1({0})",
    ops.log: "tl.log({0})",
    ops.log1p: "log1p({0})",
    ops.sigmoid: "tl.sigmoid({0})",
    ops.logsigmoid: "logsigmoid({0})",
    ops.softplus: "softplus({0})",
    ops.tanh: "tanh({0})",
    ops.sqrt: "tl.sqrt({0})",
    ops.rsqrt: "tl.rsqrt({0})",
    ops.absolute: "tl.abs({0})",
    ops.sign: "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    ops.sin: "tl.sin({0})",
    ops.cos: "tl.cos({0})",
    ops.stop_gradient: "{0}",
    ops.logical_not: "{0} == 0",
}
_BINARY: dict[Callable[..., Any], str] = {
    ops.add: "{0} + {1}",
    ops.sub: "{0} - {1}",
    ops.mul: "{0} * {1}",
    ops.div: "{0} / {1}",
    ops.maximum: "tl.maximum({0}, {1})",
    ops.minimum: "tl.minimum({0}, {1})",
    ops.greater_equal: "{0} >= {1}",
    ops.greater: "{0} > {1}",
    ops.equal: "{0} == {1}",
    ops.logical_and: "{0} & {1}",
    ops.logical_or: "{0} | {1}",
}
_ODD = frozenset(  # f(0) = 0: zeros beyond the size stay zeros
    {ops.neg, ops.expm1, ops.log1p, ops.tanh, ops.sqrt, ops.absolute, ops.sign, ops.sin}
)
_WILD = frozenset({ops.log, ops.rsqrt})  # not finite at zero
_GROWING = frozenset({ops.exp, ops.expm1, ops.log1p, ops.sqrt})  # maybe not finite but at zero


def number(value: float) -> str:
    """A float as source text."""
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    return repr(float(value))


def handler(*fns: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Register the text of operators."""

    def register(fn: Handler) -> Handler:
        for op in fns:
            HANDLERS[op] = fn
        return fn

    return register


class Expressions:
    """Appends the text of nodes; knows the tile of every value so far."""

    def __init__(
        self,
        writer: Writer,
        uneven: frozenset[str],
        spec_name: str,
        once: frozenset[tuple[fx.Node, int]] = frozenset(),
    ):
        self.writer = writer
        self.uneven = uneven
        self.once = once  # operands that only the first column tile adds
        self.spec_name = spec_name
        self.tiles: dict[fx.Node, Tile] = {}
        self.used_helpers: set[str] = set()

    # -- operands -----------------------------------------------------------------------------

    def tile(self, node: fx.Node) -> Tile:
        """The tile of a node that was emitted or loaded."""
        return self.tiles[node]

    def wide(self, x: Any) -> str:
        """An operand as float32 source text."""
        if not isinstance(x, fx.Node):
            return number(x)
        tile = self.tiles[x]
        if tile.wide:
            return tile.name
        name = self.writer.assign(f"{tile.name}_f32", f"{tile.name}.to(tl.float32)")
        self.tiles[x] = replace(tile, name=name, wide=True)
        self.narrow[x] = tile
        return name

    @property
    def narrow(self) -> dict[fx.Node, Tile]:
        """Storage-type names of values that also have a float32 name."""
        return self.__dict__.setdefault("_narrow", {})

    def forget(self, node: fx.Node) -> None:
        """Let a value be emitted again where it is needed next."""
        self.tiles.pop(node, None)
        self.narrow.pop(node, None)

    def addend(self, node: fx.Node, at: int) -> str:
        """An operand as float32, zero in all column tiles but the first if it counts once."""
        text = self.wide(node.args[at])
        return f"tl.where(tile == 0, {text}, 0.0)" if (node, at) in self.once else text

    def stored(self, x: fx.Node) -> Tile:
        """An operand of a matrix product, in storage type where it still exists."""
        return self.narrow.get(x, self.tiles[x])

    def define(self, node: fx.Node, text: str, zero: frozenset[str] = frozenset()) -> Tile:
        """Assign the text to a fresh name for the node."""
        origin = node.meta.get("origin")
        note = node.meta.get("stage", "")
        if origin is not None:
            note += f", {origin.file.rsplit('/', 1)[-1]}:{origin.line}: {origin.text}"
        name = self.writer.assign(value_name(node), text, note.strip(", "))
        wild = self._wild(node)
        return Tile(name, node.meta["dims"], True, (zero & self.uneven) - wild, wild)

    def _wild(self, node: fx.Node) -> frozenset[str]:
        """Dims in which entries beyond the size may be infinite or NaN."""
        operands = [self.tiles.get(x) if isinstance(x, fx.Node) else None for x in node.args]
        known = [tile for tile in operands if tile is not None]
        found = set().union(*(tile.wild for tile in known))
        fn, last = node.target, operands[-1] if operands else None
        if last is not None:
            exponent = node.kwargs.get("exponent", 1.0)
            whole = fn is not ops.power or float(exponent).is_integer()  # type: ignore[arg-type]
            if fn is ops.div or fn in _WILD or (fn is ops.power and exponent < 0):  # type: ignore[operator]
                found.update(last.dims)
            elif fn in _GROWING or not whole:
                found.update(set(last.dims) - last.zero)
        return frozenset(found) & self.uneven & frozenset(node.meta["dims"])

    def helper(self, name: str) -> str:
        """Name of a device function; the kernel's file imports it."""
        self.used_helpers.add(name)
        return name

    def masked(self, x: fx.Node, axis: int, stored: bool = False, fill: str = "0.0") -> str:
        """Operand text with entries beyond the size of a dim replaced by `fill`."""
        tile = self.stored(x) if stored else self.tiles[x]
        dim = tile.dims[axis]
        text = tile.name if stored else self.wide(x)
        if dim not in self.uneven or (dim in tile.zero and fill == "0.0"):
            return text
        inside = along(f"({index_name(dim)} < size_{dim})", axis, len(tile.dims))
        return self.writer.assign(f"{tile.name}_in", f"tl.where({inside}, {text}, {fill})")

    # -- nodes --------------------------------------------------------------------------------

    def emit(self, node: fx.Node) -> None:
        """Append one node."""
        dims = node.meta["dims"]
        if len(dims) > 2:
            raise self.error(
                node, f"a value with dims {format_dims(dims)}; tiles have at most two dims"
            )
        fn: Any = node.target
        if fn in _UNARY:
            tile = self._unary(node)
        elif fn in _BINARY:
            tile = self._binary(node)
        elif fn in HANDLERS:
            tile = HANDLERS[fn](self, node)
        else:
            raise self.error(node, f"operator {OPERATORS[fn].name} has no Triton form")
        self.tiles[node] = tile

    def error(self, node: fx.Node, message: str) -> TraceError:
        """What the triton executor cannot run, at the user's line."""
        return TraceError(
            f"the triton executor does not support {message}; use executor='torch' or another "
            "spelling",
            spec=self.spec_name,
            stage=node.meta.get("stage", ""),
            origin=node.meta.get("origin"),
        )

    def _unary(self, node: fx.Node) -> Tile:
        x = node.args[0]
        zero = self.tiles[x].zero if node.target in _ODD else frozenset()  # type: ignore[index]
        return self.define(node, self._call(_UNARY[node.target], self.wide(x)), zero)  # type: ignore[index]

    def _call(self, pattern: str, *operands: str) -> str:
        head = pattern.split("(")[0]
        if head in ("expm1", "log1p", "logsigmoid", "softplus", "tanh"):
            self.helper(head)
        return pattern.format(*operands)

    def _binary(self, node: fx.Node) -> Tile:
        a, b = node.args
        text = _BINARY[node.target].format(self.addend(node, 0), self.addend(node, 1))  # type: ignore[index]
        za, zb = self._zero(a), self._zero(b)
        zero = za | zb if node.target is ops.mul else za & zb
        if node.target is ops.div:
            zero = za
        return self.define(node, text, zero)

    def _zero(self, x: Any) -> frozenset[str]:
        if isinstance(x, fx.Node):
            return self.tiles[x].zero
        return self.uneven if x == 0 else frozenset()


def value_name(node: fx.Node) -> str:
    """A readable name: the user's where there is one."""
    label = node.meta.get("label")
    base = label or OPERATORS[node.target].name if node.op == "call_function" else node.meta["key"]  # type: ignore[index]
    return str(base)


# -- selections and shape -------------------------------------------------------------------------


@handler(ops.where)
def _where(e: Expressions, node: fx.Node) -> Tile:
    mask, a, b = node.args
    text = f"tl.where({e.wide(mask)}, {e.addend(node, 1)}, {e.addend(node, 2)})"
    return e.define(node, text, e._zero(a) & e._zero(b))


@handler(ops.power)
def _power(e: Expressions, node: fx.Node) -> Tile:
    x, exponent = e.wide(node.args[0]), float(node.kwargs["exponent"])  # type: ignore[arg-type]
    if exponent == 0.0:
        dims = node.meta["dims"]
        scalar = all(dim == UNIT_DIM for dim in dims)
        return e.define(node, "1.0" if scalar else f"tl.full({shape_text(dims)}, 1.0, tl.float32)")
    if exponent.is_integer():
        zero = e._zero(node.args[0]) if exponent > 0 else frozenset()
        product = _repeated(e, x, int(abs(exponent)))
        return e.define(node, product if exponent > 0 else f"1.0 / ({product})", zero)
    return e.define(node, f"tl.exp({exponent!r} * tl.log({x}))")


def _repeated(e: Expressions, x: str, count: int) -> str:
    """The product of so many factors x, by squares."""
    if count <= 4:
        return " * ".join([x] * count)
    factors: list[str] = []
    while True:
        if count % 2:
            factors.append(x)
        count //= 2
        if not count:
            return " * ".join(factors)
        x = e.writer.assign("square", f"{x} * {x}")


def _renamed(e: Expressions, node: fx.Node) -> Tile:
    return replace(e.tiles[node.args[0]], dims=node.meta["dims"])  # type: ignore[index]


def _moved(e: Expressions, node: fx.Node, text: str) -> Tile:
    """A change of shape keeps the storage type."""
    tile = e.stored(node.args[0])  # type: ignore[arg-type]
    name = e.writer.assign(f"{tile.name}_v", text.format(tile.name))
    return replace(tile, name=name, dims=node.meta["dims"])


@handler(ops.unsqueeze)
def _unsqueeze(e: Expressions, node: fx.Node) -> Tile:
    if e.tiles[node.args[0]].scalar:  # type: ignore[index]
        return _renamed(e, node)
    return _moved(e, node, "{0}[:, None]" if node.kwargs["dim"] == -1 else "{0}[None, :]")


@handler(ops.squeeze)
def _squeeze(e: Expressions, node: fx.Node) -> Tile:
    if e.tiles[node.args[0]].scalar:  # type: ignore[index]
        return _renamed(e, node)
    axis = int(node.kwargs["dim"]) + 2  # type: ignore[arg-type]
    return e.define(
        node,
        f"tl.sum({e.wide(node.args[0])}, axis={axis})",
        e.tiles[node.args[0]].zero,  # type: ignore[index]
    )


@handler(ops.permute)
def _permute(e: Expressions, node: fx.Node) -> Tile:
    if e.tiles[node.args[0]].scalar or node.kwargs["order"] != (-1, -2):  # type: ignore[index]
        return _renamed(e, node)
    return _moved(e, node, "tl.trans({0})")


@handler(ops.expand)
def _expand(e: Expressions, node: fx.Node) -> Tile:
    x, dims = node.args[1], node.meta["dims"]
    shape = shape_text(dims)
    if all(dim == UNIT_DIM for dim in dims):
        return replace(e.tiles[x], dims=dims)  # type: ignore[index]
    if e.tiles[x].scalar:  # type: ignore[index]
        return e.define(node, f"tl.zeros({shape}, tl.float32) + {e.wide(x)}")
    return e.define(node, f"tl.broadcast_to({e.wide(x)}, {shape})", e.tiles[x].zero)  # type: ignore[index]


def _edge(dim: str, index: int) -> str:
    last = "tile_C - 1" if dim == TOKEN_DIM else f"size_{dim} - 1"
    return f"({index_name(dim)} == {'0' if index == 0 else last})"


@handler(ops.select)
def _select(e: Expressions, node: fx.Node) -> Tile:
    tile = e.tiles[node.args[0]]  # type: ignore[index]
    rank = len(tile.dims)
    axis = int(node.kwargs["dim"]) + rank  # type: ignore[arg-type]
    if tile.dims[axis] == UNIT_DIM:
        return _squeeze(e, node) if rank == 2 else _renamed(e, node)
    here = along(_edge(tile.dims[axis], int(node.kwargs["index"])), axis, rank)  # type: ignore[arg-type]
    text = f"tl.sum(tl.where({here}, {e.wide(node.args[0])}, 0.0), axis={axis})"
    return e.define(node, text, tile.zero)


@handler(ops.place)
def _place(e: Expressions, node: fx.Node) -> Tile:
    x, dims = node.args[1], node.meta["dims"]
    rank = len(dims)
    axis = int(node.kwargs["dim"]) + rank  # type: ignore[arg-type]
    here = along(_edge(dims[axis], int(node.kwargs["index"])), axis, rank)  # type: ignore[arg-type]
    value = e.wide(x)
    if rank == 2 and not e.tiles[x].scalar:  # type: ignore[index]
        value += "[None, :]" if axis == 0 else "[:, None]"
    text = f"tl.where({here}, {value}, 0.0)"
    if any(dim != UNIT_DIM for i, dim in enumerate(dims) if i != axis) and e.tiles[x].scalar:  # type: ignore[index]
        text = f"tl.zeros({shape_text(dims)}, tl.float32) + {text}"
    return e.define(node, text, e.tiles[x].zero)  # type: ignore[index]


@handler(ops.shift)
def _shift(e: Expressions, node: fx.Node) -> Tile:
    dims = node.meta["dims"]
    if len(dims) + int(node.kwargs["dim"]) != 0 or dims[0] != TOKEN_DIM:  # type: ignore[arg-type]
        raise e.error(node, "a shift along another dim than C")
    if abs(int(node.kwargs["by"])) != 1 or len(dims) != 2:  # type: ignore[arg-type]
        raise e.error(node, "a shift by more than one token")
    call = f"{e.helper('shift_rows')}({e.wide(node.args[0])}, tile_C, {node.kwargs['by']})"
    return e.define(node, call, e.tiles[node.args[0]].zero)  # type: ignore[index]


@handler(ops.tril, ops.triu)
def _triangle(e: Expressions, node: fx.Node) -> Tile:
    dim = node.meta["dims"][0]
    at = index_name(dim)
    sign = ">=" if node.target is ops.tril else "<="
    keep = f"{at}[:, None] + {node.kwargs['diagonal']} {sign} {at}[None, :]"
    x = node.args[0]
    return e.define(node, f"tl.where({keep}, {e.wide(x)}, 0.0)", e.tiles[x].zero)  # type: ignore[index]


# -- reductions and products ----------------------------------------------------------------------


@handler(ops.total, ops.amax)
def _reduce(e: Expressions, node: fx.Node) -> Tile:
    x = node.args[0]
    tile = e.tiles[x]  # type: ignore[index]
    rank = len(tile.dims)
    axis = int(node.kwargs["dim"]) + rank  # type: ignore[arg-type]
    if tile.scalar:
        return _renamed(e, node)
    if tile.dims[axis] == UNIT_DIM:
        return _squeeze(e, node)
    is_sum = node.target is ops.total
    text = e.masked(x, axis, fill="0.0" if is_sum else 'float("-inf")')  # type: ignore[arg-type]
    others = [dim for i, dim in enumerate(tile.dims) if i != axis]
    name = "tl.sum" if is_sum else "tl.max"
    if all(dim == UNIT_DIM for dim in others):
        return e.define(
            node, f"{name}({text})" if rank == 1 else f"{name}({name}({text}, axis=1), axis=0)"
        )
    return e.define(node, f"{name}({text}, axis={axis})", tile.zero if is_sum else frozenset())


@handler(ops.cumsum)
def _cumsum(e: Expressions, node: fx.Node) -> Tile:
    x = node.args[0]
    dims = node.meta["dims"]
    axis = int(node.kwargs["dim"]) + len(dims)  # type: ignore[arg-type]
    text = f"tl.cumsum({e.wide(x)}, axis={axis}, reverse={bool(node.kwargs['reverse'])})"
    return e.define(node, text, e.tiles[x].zero - {dims[axis]})  # type: ignore[index]


@handler(ops.matmul)
def _matmul(e: Expressions, node: fx.Node) -> Tile:
    a, b = node.args
    ta, tb = e.tiles[a], e.tiles[b]  # type: ignore[index]
    rows, inner, cols = ta.dims[0], ta.dims[1], tb.dims[1]
    zero = frozenset(
        ({rows} if rows in ta.zero else set()) | ({cols} if cols in tb.zero else set())
    )
    if inner == UNIT_DIM:
        return e.define(node, f"{e.wide(a)} * {e.wide(b)}", zero)
    if UNIT_DIM in (rows, cols):
        return _vector_product(e, node, zero)
    left = e.masked(a, 1, stored=True)  # type: ignore[arg-type]
    right = e.masked(b, 0, stored=True)  # type: ignore[arg-type]
    return e.define(node, f"{e.helper('mm')}({left}, {right}, MODE)", zero)


def _vector_product(e: Expressions, node: fx.Node, zero: frozenset[str]) -> Tile:
    a, b = node.args
    ta, tb = e.tiles[a], e.tiles[b]  # type: ignore[index]
    left, right = e.masked(a, 1), e.masked(b, 0)  # type: ignore[arg-type]
    if ta.dims[0] == UNIT_DIM and tb.dims[1] == UNIT_DIM:
        return e.define(node, f"tl.sum(tl.sum(tl.trans({left}) * {right}, axis=1), axis=0)")
    if ta.dims[0] == UNIT_DIM:
        return e.define(node, f"tl.sum(tl.trans({left}) * {right}, axis=0)[None, :]", zero)
    return e.define(node, f"tl.sum({left} * tl.trans({right}), axis=1)[:, None]", zero)


# -- domain operators and sources -----------------------------------------------------------------


@handler(ops.decay_matrix)
def _decay_matrix(e: Expressions, node: fx.Node) -> Tile:
    b_row, b_col = (e.wide(x) for x in node.args)
    strict = bool(node.kwargs["strict"])
    return e.define(node, f"{e.helper('decay_matrix')}({b_row}, {b_col}, tile_C, {strict})")


@handler(ops.decay_scores, ops.decay_rows, ops.decay_cols)
def _vector_decay(e: Expressions, node: fx.Node) -> Tile:
    name = e.helper(OPERATORS[node.target].name)  # type: ignore[index]
    width = e.tiles[node.args[2]].dims[1]  # type: ignore[index]
    operands = ", ".join(_bounded(e, x, width) for x in node.args)  # type: ignore[arg-type]
    strict = bool(node.kwargs["strict"])
    zero = frozenset() if node.target is ops.decay_scores else e.tiles[node.args[1]].zero  # type: ignore[index]
    return e.define(node, f"{name}({operands}, tile_C, tile_{width}, {strict}, MODE)", zero)


def _bounded(e: Expressions, x: fx.Node, dim: str) -> str:
    """An operand whose entries beyond the size of a dim are finite."""
    return e.masked(x, e.tiles[x].dims.index(dim)) if dim in e.tiles[x].wild else e.wide(x)


def emit_pair(e: Expressions, rows: fx.Node, cols: fx.Node) -> None:
    """`decay_rows(p, k, ...)` and `decay_cols(p, q, ...)` of the same p and gates, by one call that
    forms the decays once."""
    width = e.tiles[rows.args[2]].dims[1]  # type: ignore[index]
    p, k, b_row, b_col = (_bounded(e, x, width) for x in rows.args)  # type: ignore[arg-type]
    operands = ", ".join((p, _bounded(e, cols.args[1], width), k, b_row, b_col))  # type: ignore[arg-type]
    strict = bool(rows.kwargs["strict"])
    call = f"{e.helper('decay_rows_cols')}({operands}, tile_C, tile_{width}, {strict}, MODE)"
    for node, at in ((rows, 0), (cols, 1)):
        call = e.writer.assign("both", call) if at == 0 else call
        e.tiles[node] = e.define(node, f"{call}[{at}]", e.tiles[node.args[1]].zero)  # type: ignore[index]


@handler(ops.decay_scan, ops.decay_scan_reverse)
def _scan(e: Expressions, node: fx.Node) -> Tile:
    name = e.helper(OPERATORS[node.target].name)  # type: ignore[index]
    g, x = (e.wide(operand) for operand in node.args)
    return e.define(node, f"{name}({g}, {x})", e.tiles[node.args[1]].zero)  # type: ignore[index]


@handler(ops.unit_tril_inverse)
def _inverse(e: Expressions, node: fx.Node) -> Tile:
    call = f"{e.helper('unit_tril_inverse')}({e.wide(node.args[0])}, tile_C, MODE)"
    return e.define(node, call)


@handler(ops.full)
def _full(e: Expressions, node: fx.Node) -> Tile:
    dims: Dims = node.meta["dims"]
    value = number(node.kwargs["value"])  # type: ignore[arg-type]
    if all(dim == UNIT_DIM for dim in dims):
        return Tile(value, dims)
    zero = e.uneven if node.kwargs["value"] == 0 else frozenset()
    return e.define(node, f"tl.full({shape_text(dims)}, {value}, tl.float32)", zero)


@handler(ops.eye)
def _eye(e: Expressions, node: fx.Node) -> Tile:
    at = index_name(node.kwargs["dim"])  # type: ignore[arg-type]
    return e.define(node, f"({at}[:, None] == {at}[None, :]).to(tl.float32)")


@handler(ops.iota)
def _iota(e: Expressions, node: fx.Node) -> Tile:
    return e.define(node, f"{index_name(node.kwargs['dim'])}.to(tl.float32)")  # type: ignore[arg-type]


@handler(ops.size)
def _size(e: Expressions, node: fx.Node) -> Tile:
    return e.define(node, f"(size_{node.kwargs['dim']} * 1.0)")


@handler(ops.tri_mask)
def _tri_mask(e: Expressions, node: fx.Node) -> Tile:
    at = index_name(node.kwargs["dim"])  # type: ignore[arg-type]
    keep = f"{at}[:, None] + {node.kwargs['diagonal']} >= {at}[None, :]"
    return e.define(node, keep)
