"""Proves that a chunk of padding leaves every state as it was.

Contract: `prove_padding_identity` runs the graph on abstract values with every token invalid: a
constant everywhere, the identity matrix, an entering state, or unknown. If a next state is not the
entering one it raises PaddingError with stage, line and, where one input's padding value would mend
it, that value. Zero times an unknown value is zero, because an unknown value of a valid call is
finite; zero times a constant that is infinite or NaN is NaN, as it would be at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell, dims_of
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.trace.lines import definition_line
from flexla_dist.compiler.trace.stages import SHIFT, VALID, state_argument
from flexla_dist.errors import PaddingError
from flexla_dist.shapes import UNIT_DIM
from flexla_dist.spec.spec import LinearAttentionSpec

CANDIDATES = (0.0, 1.0, -math.inf)


@dataclass(frozen=True)
class Uniform:
    """The same number in every entry."""

    value: float


@dataclass(frozen=True)
class Identity:
    """The identity matrix."""


@dataclass(frozen=True)
class State:
    """An entering state; `layout` names its dims in order, None for an inserted one."""

    name: str
    layout: tuple[int | None, ...]


@dataclass(frozen=True)
class Flag:
    """A mask with one truth value."""

    value: bool


@dataclass(frozen=True)
class Unknown:
    """Any finite value."""


Abstract = Uniform | Identity | State | Flag | Unknown
ZERO, ANY = Uniform(0.0), Unknown()


def prove_padding_identity(cell: Cell, spec: LinearAttentionSpec) -> None:
    """Raise PaddingError unless an all-padding chunk keeps every state."""
    values = _evaluate(cell, spec, {})
    failing = _failing(cell, spec, values)
    if failing is None:
        return
    for name in spec.inputs:
        for value in CANDIDATES:
            if value == spec.padding.get(name, 0.0):
                continue
            if _failing(cell, spec, _evaluate(cell, spec, {name: value})) is None:
                shown = "-math.inf" if value == -math.inf else str(value)
                entries = {**spec.padding, name: shown}
                text = ", ".join(f"{k!r}: {v}" for k, v in entries.items())
                raise _error(spec, cell, values, failing, f"declare padding={{{text}}}")
    fix = (
        "declare padding={'name': value} for the inputs that it depends on, so that the decay of a "
        "padded token is one and its contribution zero"
    )
    raise _error(spec, cell, values, failing, fix)


def _failing(
    cell: Cell, spec: LinearAttentionSpec, values: Mapping[fx.Node, Abstract]
) -> str | None:
    """Name of the first result that is wrong on padding."""
    outputs = cell.outputs
    if spec.log_scaled is not None and values[outputs["log_decay"]] != ZERO:
        return "log_decay"
    for name, dims in spec.state_dims.items():
        if values[outputs[f"next_{name}"]] != State(name, tuple(range(len(dims)))):
            return f"next_{name}"
    return None


def _error(
    spec: LinearAttentionSpec,
    cell: Cell,
    values: Mapping[fx.Node, Abstract],
    failing: str,
    fix: str,
) -> PaddingError:
    node = cell.outputs[failing]
    culprit = _where_lost(node, values) if failing != "log_decay" else node
    padded = ", ".join(f"{n} = {spec.padding.get(n, 0.0):g}" for n in spec.inputs)
    if failing == "log_decay":
        assert spec.log_scaled is not None
        what = f"the log decay {spec.log_scaled.decay!r}"
        expected, stage = "0", "chunk_mode"
    else:
        what = f"the next state {failing.removeprefix('next_')!r}"
        expected, stage = "the entering state", "decay_mode"
    return PaddingError(
        f"a chunk of padding must leave the state as it is, but {what} is {_text(values[node])}; "
        f"expected {expected}. Padded tokens have {padded}. Fix: {fix}",
        spec=spec.name,
        stage=stage,
        origin=culprit.meta["origin"] or definition_line(getattr(spec, stage)),
    )


def _text(value: Abstract) -> str:
    if isinstance(value, Uniform):
        return f"{value.value:g} everywhere"
    if isinstance(value, State):
        order = "" if value.layout == tuple(sorted(value.layout, key=str)) else ", transposed"
        return f"the entering state {value.name!r}{order}"
    return "a different value"


def _where_lost(node: fx.Node, values: Mapping[fx.Node, Abstract]) -> fx.Node:
    """The latest operation above `node` that gets a state and does not return it."""
    seen: set[fx.Node] = set()
    stack, above = [node], []
    while stack:
        current = stack.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        above.append(current)
        stack.extend(x for x in current.args if isinstance(x, fx.Node))
    lost = [
        n
        for n in above
        if not isinstance(values[n], State)
        and any(isinstance(values.get(x), State) for x in n.args if isinstance(x, fx.Node))
        and n.meta["origin"] is not None
    ]
    return lost[0] if lost else node


# -- abstract interpretation ----------------------------------------------------------------------


def _evaluate(
    cell: Cell, spec: LinearAttentionSpec, override: Mapping[str, float]
) -> dict[fx.Node, Abstract]:
    states = {state_argument(name): name for name in spec.state_dims}
    values: dict[fx.Node, Abstract] = {}
    for node in cell.graph.nodes:
        if node.op == "placeholder":
            key = node.meta["key"]
            known: dict[str, Abstract] = {VALID: Flag(False), SHIFT: ZERO}
            if key in states:
                known[key] = State(states[key], tuple(range(len(dims_of(node)))))
            values[node] = known.get(key, ANY)
        elif node.op == "call_function":
            if node.meta.get("pads") in override:
                values[node] = Uniform(override[node.meta["pads"]])
                continue
            operands = [
                values[x] if isinstance(x, fx.Node) else Uniform(float(x)) for x in node.args
            ]
            values[node] = _apply(node, operands)
    return values


def _apply(node: fx.Node, x: list[Abstract]) -> Abstract:
    fn = node.target
    if fn in _RULES:
        return _RULES[fn](node, x)
    kind = OPERATORS[fn].kind
    if any(isinstance(v, Uniform) and math.isnan(v.value) for v in x):
        return Uniform(math.nan)
    if kind in ("elementwise", "mask"):
        return _elementwise(node, x)
    if kind == "shape":
        return _moved(x[-1])
    return ANY


def _elementwise(node: fx.Node, x: list[Abstract]) -> Abstract:
    """Exactly what the operator does, on numbers."""
    known = [v for v in x if isinstance(v, Uniform | Flag)]
    if len(known) != len(x):
        return ANY
    tensors = [torch.tensor(v.value, dtype=_dtype(v)) for v in known]
    result = node.target(*tensors, **node.kwargs)
    return Flag(bool(result)) if result.dtype is torch.bool else Uniform(float(result))


def _dtype(value: Abstract) -> torch.dtype:
    return torch.bool if isinstance(value, Flag) else torch.float64


def _moved(x: Abstract) -> Abstract:
    """A change of shape keeps constants; everything else has its own rule."""
    return x if isinstance(x, Uniform | Flag) else ANY


def _is_nan(x: list[Abstract]) -> bool:
    return any(isinstance(v, Uniform) and math.isnan(v.value) for v in x)


def _infinite(value: Abstract) -> bool:
    return isinstance(value, Uniform) and not math.isfinite(value.value)


def _kept(node: fx.Node, at: int, value: Abstract) -> Abstract:
    """`value` of operand `at`, unless it is broadcast to more dims."""
    if isinstance(value, State | Identity) and dims_of(node.args[at]) != dims_of(node):
        return ANY
    return value


def _add(node: fx.Node, x: list[Abstract]) -> Abstract:
    if not _is_nan(x):
        if x[1] == ZERO:
            return _kept(node, 0, x[0])
        if x[0] == ZERO and node.target is ops.add:
            return _kept(node, 1, x[1])
    return Uniform(math.nan) if _is_nan(x) else _elementwise(node, x)


def _mul(node: fx.Node, x: list[Abstract]) -> Abstract:
    if _is_nan(x):
        return Uniform(math.nan)
    for at in (0, 1):
        if x[at] == ZERO and not _infinite(x[1 - at]):
            return ZERO
        if x[at] == Uniform(1.0):
            return _kept(node, 1 - at, x[1 - at])
    return _elementwise(node, x)


def _div(node: fx.Node, x: list[Abstract]) -> Abstract:
    if _is_nan(x):
        return Uniform(math.nan)
    if x[1] == Uniform(1.0):
        return _kept(node, 0, x[0])
    if x[0] == ZERO and not isinstance(x[1], Uniform):
        return ZERO
    return _elementwise(node, x)


def _where(node: fx.Node, x: list[Abstract]) -> Abstract:
    mask, a, b = x
    if isinstance(mask, Flag):
        at = 1 if mask.value else 2
        return _kept(node, at, x[at])
    return _kept(node, 1, a) if a == b and not isinstance(a, Unknown) else ANY


def _matmul(node: fx.Node, x: list[Abstract]) -> Abstract:
    if _is_nan(x):
        return Uniform(math.nan)
    for at in (0, 1):
        if x[at] == ZERO:
            return Uniform(math.nan) if _infinite(x[1 - at]) else ZERO
        if isinstance(x[at], Identity):
            return x[1 - at]
    return ANY


def _sum(node: fx.Node, x: list[Abstract]) -> Abstract:
    """A sum keeps zero, infinities and NaN; of one entry, everything."""
    value = x[0]
    if isinstance(value, Uniform):
        single = dims_of(node.args[0])[node.kwargs["dim"]] == UNIT_DIM
        if value.value == 0.0 or not math.isfinite(value.value) or single:
            return value
    return ANY


def _first(node: fx.Node, x: list[Abstract]) -> Abstract:
    return x[0] if isinstance(x[0], Uniform | State | Identity) else ANY


def _uniform(node: fx.Node, x: list[Abstract]) -> Abstract:
    return x[0] if isinstance(x[0], Uniform) else ANY


def _triangle(node: fx.Node, x: list[Abstract]) -> Abstract:
    if x[0] == ZERO or _is_nan(x):
        return x[0]
    if isinstance(x[0], Identity):
        k = node.kwargs["diagonal"]
        keeps = k >= 0 if node.target is ops.tril else k <= 0
        return x[0] if keeps else ZERO
    return ANY


def _zero_if(*positions: int) -> Callable[[fx.Node, list[Abstract]], Abstract]:
    def rule(node: fx.Node, x: list[Abstract]) -> Abstract:
        if _is_nan(x) or any(_infinite(x[at]) for at in positions):
            return Uniform(math.nan)
        return ZERO if any(x[at] == ZERO for at in positions) else ANY

    return rule


def _inverse(node: fx.Node, x: list[Abstract]) -> Abstract:
    if isinstance(x[0], Identity) or (x[0] == ZERO and node.target is ops.unit_tril_inverse):
        return Identity()
    return Uniform(math.nan) if _is_nan(x) else ANY


def _logical(node: fx.Node, x: list[Abstract]) -> Abstract:
    decisive = Flag(node.target is ops.logical_or)
    return decisive if decisive in x else _elementwise(node, x)


def _unsqueeze(node: fx.Node, x: list[Abstract]) -> Abstract:
    value = x[0]
    if not isinstance(value, State):
        return _moved(value)
    at = len(value.layout) + 1 + node.kwargs["dim"]
    return State(value.name, (*value.layout[:at], None, *value.layout[at:]))


def _squeeze(node: fx.Node, x: list[Abstract]) -> Abstract:
    value = x[0]
    if not isinstance(value, State):
        return _moved(value)
    at = len(value.layout) + node.kwargs["dim"]
    return State(value.name, value.layout[:at] + value.layout[at + 1 :])


def _permute(node: fx.Node, x: list[Abstract]) -> Abstract:
    value, order = x[0], node.kwargs["order"]
    if isinstance(value, State):
        return State(value.name, tuple(value.layout[at] for at in order))
    return value if isinstance(value, Identity) and len(order) == 2 else _moved(value)


def _expand(node: fx.Node, x: list[Abstract]) -> Abstract:
    same = dims_of(node.args[1]) == dims_of(node)
    return x[1] if same else _moved(x[1])


_Rule = Callable[[fx.Node, list[Abstract]], Abstract]
_RULES: dict[Any, _Rule] = {
    ops.full: lambda node, x: Uniform(float(node.kwargs["value"])),
    ops.eye: lambda node, x: Identity(),
    ops.add: _add,
    ops.sub: _add,
    ops.mul: _mul,
    ops.div: _div,
    ops.where: _where,
    ops.matmul: _matmul,
    ops.total: _sum,
    ops.cumsum: lambda node, x: _sum(node, x),
    ops.amax: _uniform,
    ops.stop_gradient: _first,
    ops.tril: _triangle,
    ops.triu: _triangle,
    ops.shift: _zero_if(0),
    ops.place: _zero_if(1),
    ops.decay_scores: _zero_if(0, 1),
    ops.decay_rows: _zero_if(0, 1),
    ops.decay_cols: _zero_if(0, 1),
    ops.decay_scan: _zero_if(1),
    ops.decay_scan_reverse: _zero_if(1),
    ops.unit_tril_inverse: _inverse,
    ops.inverse: _inverse,
    ops.logical_and: _logical,
    ops.logical_or: _logical,
    ops.unsqueeze: _unsqueeze,
    ops.squeeze: _squeeze,
    ops.permute: _permute,
    ops.expand: _expand,
}
