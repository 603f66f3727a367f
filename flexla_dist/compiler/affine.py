"""Proves that `decay_mode` is affine in the state and derives its element (M, S_hat).

Contract: `derive_transition` walks the graph of every next state with the form `E * S + A @ S +
c`, E elementwise, A dense on the first dim, c free of the state. What does not fit is refused
with the user's line: a function that is not linear, a product of two states, two states that mix,
columns that mix. The cell it returns has the results `local_<s>` (c), `decay_<s>` (E, unless it
is one or, with a matrix, zero) and `matrix_<s>` (A, if any); `Transition.kind` says what M is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell, Mark, Operand, dims_of
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.log_scaled import unscaled
from flexla_dist.compiler.passes.simplify import constant_of
from flexla_dist.compiler.trace.stages import state_argument
from flexla_dist.compiler.transition import Transition, elementwise_kind
from flexla_dist.errors import NotAffineError
from flexla_dist.shapes import UNIT_DIM, format_dims
from flexla_dist.spec.spec import LinearAttentionSpec


@dataclass(frozen=True)
class _Form:
    """E * S + A @ S + c for the state called `state`; None stands for zero."""

    state: str
    elementwise: Operand | None
    matrix: fx.Node | None
    constant: Operand | None


class _Deriver:
    def __init__(self, spec: LinearAttentionSpec, cell: Cell):
        self.spec = spec
        self.builder = Builder()
        self.forms: dict[fx.Node, _Form] = {}
        self.results = cell.copy_into(self.builder, emit=self._emit)
        self.state_dims = spec.state_dims
        self.node: fx.Node | None = None  # the node at hand, for errors

    def _emit(self, fn: Callable[..., Any], *operands: Operand, **attrs: Any) -> fx.Node:
        return self.builder.emit(fn, *operands, **attrs)

    # -- the walk -----------------------------------------------------------------------------

    def run(self) -> tuple[Cell, dict[str, Transition]]:
        by_argument = {state_argument(name): name for name in self.state_dims}
        for node in list(self.builder.graph.nodes):
            if node.op == "placeholder" and node.meta["key"] in by_argument:
                self.forms[node] = _Form(by_argument[node.meta["key"]], 1.0, None, None)
        wanted = self._ancestors([self.results[f"next_{name}"] for name in self.state_dims])
        for node in list(self.builder.graph.nodes):
            if node in wanted and any(self._depends(x) for x in node.args):
                self.forms[node] = self._step(node)
        outputs: dict[str, fx.Node] = {"output": self.results["output"]}
        transitions = {name: self._finish_state(name, outputs) for name in self.state_dims}
        for name in ("log_decay", "log_weight"):
            if name in self.results:
                outputs[name] = self.results[name]
        for name in self.state_dims:
            outputs[f"next_{name}"] = self.results[f"next_{name}"]
        return self.builder.finish(outputs), transitions

    def _depends(self, x: Any) -> bool:
        return isinstance(x, fx.Node) and x in self.forms

    def _ancestors(self, roots: list[Operand]) -> set[fx.Node]:
        seen: set[fx.Node] = set()
        stack = [x for x in roots if isinstance(x, fx.Node)]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return seen

    def _step(self, node: fx.Node) -> _Form:
        fn = node.target
        self.node = node
        self.builder.mark = Mark(node.meta["stage"], node.meta["origin"])
        if fn in (ops.add, ops.sub):
            return self._sum(node, -1.0 if fn is ops.sub else 1.0)
        if fn is ops.neg:
            return self._map(self.forms[node.args[0]], lambda x: self._emit(ops.neg, x))
        if fn in (ops.mul, ops.div):
            return self._product(node)
        if fn is ops.where:
            return self._select(node)
        if fn is ops.matmul:
            return self._matmul(node)
        raise self._refuse_operator(node)

    def _refuse_operator(self, node: fx.Node) -> NotAffineError:
        info = OPERATORS[node.target]
        at = [i for i, x in enumerate(node.args) if self._depends(x)]
        if set(at) <= set(info.linear) and info.kind in ("shape", "reduce"):
            return self._error(
                f"{info.name} of the state moves or sums its entries; the state may be multiplied "
                "elementwise or from the left by a matrix (c.M @ S), so that columns stay "
                "independent"
            )
        return self._error(
            f"the next state is not affine in the state: {info.name} of a value that depends on "
            "it. decay_mode may scale the state, multiply it from the left by a matrix and add to "
            "it"
        )

    # -- rules --------------------------------------------------------------------------------

    def _map(self, form: _Form, fn: Callable[[Operand], Operand]) -> _Form:
        parts = [
            None if p is None else fn(p) for p in (form.elementwise, form.matrix, form.constant)
        ]
        return _Form(form.state, parts[0], parts[1], parts[2])

    def _form(self, x: Any, node: fx.Node) -> _Form:
        """The form of an operand of `node`, broadcast over rows if it is narrower."""
        if not self._depends(x):
            return _Form("", None, None, x)
        form, have, dims = self.forms[x], dims_of(x), node.meta["dims"]
        if have == dims:
            return form
        if form.elementwise is not None or have[-1:] != dims[-1:]:
            raise self._error(
                f"the state {format_dims(have)} is broadcast to {format_dims(dims)}; its columns "
                "must stay as they are"
            )
        assert form.matrix is not None
        matrix = self.builder.expand(form.matrix, (dims[0], dims_of(form.matrix)[1]))
        constant = None if form.constant is None else self.builder.expand(form.constant, dims)
        return _Form(form.state, None, matrix, constant)

    def _same_state(self, a: _Form, b: _Form) -> str:
        if a.state != b.state:
            raise self._error(
                f"states {a.state!r} and {b.state!r} mix in decay_mode; each state must evolve by "
                "itself (M is block-diagonal over states). Combine them in merge_mode, or make "
                "them one"
            )
        return a.state

    def _plus(self, a: Operand | None, b: Operand | None, sign: float) -> Operand | None:
        if b is None:
            return a
        if a is None:
            return b if sign > 0 else self._negated(b)
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return a + sign * b
        fn = ops.add if sign > 0 else ops.sub
        if fn is ops.add and not isinstance(a, fx.Node):
            a, b = b, a
        return self._emit(fn, a, b)

    def _negated(self, x: Operand) -> Operand:
        return self._emit(ops.neg, x) if isinstance(x, fx.Node) else -x

    def _sum(self, node: fx.Node, sign: float) -> _Form:
        a, b = (self._form(x, node) for x in node.args)
        state = self._same_state(a, b) if a.state and b.state else a.state or b.state
        matrix = self._plus(a.matrix, b.matrix, sign)
        return _Form(
            state,
            self._plus(a.elementwise, b.elementwise, sign),
            matrix,
            self._plus(a.constant, b.constant, sign),
        )

    def _product(self, node: fx.Node) -> _Form:
        fn = node.target
        a, b = node.args
        a_in = self._depends(a)
        b_in = self._depends(b)
        if (a_in and b_in) or (b_in and fn is ops.div):
            raise self._error(
                "the next state is not affine in the state: "
                + ("a product of two values that depend on it" if a_in else "a division by it")
            )
        inner, factor = (a, b) if a_in else (b, a)
        form = self._form(inner, node)
        if form.matrix is not None and dims_of(factor)[-1:] not in ((), (UNIT_DIM,)):
            raise self._error(
                f"a dense transition scaled by a factor {format_dims(dims_of(factor))} that "
                "differs by column; scale rows, or scale the state before the matrix product"
            )

        def scaled(part: Operand) -> Operand:
            if part == 1.0 and fn is ops.mul:
                return factor
            if not isinstance(part, fx.Node) and not isinstance(factor, fx.Node):
                return part * factor if fn is ops.mul else part / factor
            if not isinstance(part, fx.Node) and fn is ops.mul:
                return self._emit(ops.mul, factor, part)
            return self._emit(fn, part, factor)

        return self._map(form, scaled)

    def _select(self, node: fx.Node) -> _Form:
        mask = node.args[0]
        if self._depends(mask):
            raise self._error(
                "the next state is not affine in the state: a selection by its values"
            )
        a, b = (self._form(x, node) for x in node.args[1:])
        state = self._same_state(a, b) if a.state and b.state else a.state or b.state
        if (a.matrix is not None or b.matrix is not None) and dims_of(mask)[-1:] != (UNIT_DIM,):
            raise self._error("a selection by column of a dense transition")

        def pick(x: Operand | None, y: Operand | None) -> Operand | None:
            if x is None and y is None:
                return None
            x, y = (0.0 if x is None else x), (0.0 if y is None else y)
            if not isinstance(x, fx.Node) and not isinstance(y, fx.Node):
                x = self.builder.expand(x, dims_of(mask))
            return self._emit(ops.where, mask, x, y)

        matrix = pick(a.matrix, b.matrix)
        return _Form(
            state,
            pick(a.elementwise, b.elementwise),
            matrix,
            pick(a.constant, b.constant),
        )

    def _matmul(self, node: fx.Node) -> _Form:
        left, right = node.args
        if self._depends(left):
            raise self._error(
                "the state is multiplied from the right, which mixes its columns; multiply from "
                "the left (c.M @ S), or declare the state transposed, so that columns stay "
                "independent"
            )
        form = self.forms[right]
        matrix = form.matrix
        product = self._emit(ops.matmul, left, matrix) if matrix is not None else None
        if form.elementwise is not None:
            product = self._plus(product, self._times_rows(left, form.elementwise), 1.0)
        constant = form.constant
        if constant is not None:
            rows = self.builder.expand(constant, dims_of(right))
            constant = self._emit(ops.matmul, left, rows)
        return _Form(form.state, None, product, constant)

    def _times_rows(self, left: fx.Node, factor: Operand) -> Operand:
        if constant_of(factor) is not None:
            value = constant_of(factor)
            return left if value == 1.0 else self._emit(ops.mul, left, value)
        assert isinstance(factor, fx.Node)
        if dims_of(factor)[-1] != UNIT_DIM:
            raise self._error(
                "a matrix product with a state already scaled by column; scale by column afterwards"
            )
        return self._emit(ops.mul, left, self.builder.transpose(factor))

    # -- results ------------------------------------------------------------------------------

    def _finish_state(self, name: str, outputs: dict[str, fx.Node]) -> Transition:
        node = self.results[f"next_{name}"]
        dims = self.state_dims[name]
        form = self.forms.get(node) if isinstance(node, fx.Node) else None
        self.node = node if isinstance(node, fx.Node) else None
        if form is None:
            form = _Form(name, 0.0, None, node)
        if form.state != name:
            raise self._error(
                f"the next state {name!r} is made from state {form.state!r}; each state must "
                "evolve by itself"
            )
        constant = 0.0 if form.constant is None else form.constant
        outputs[f"local_{name}"] = self.builder.expand(constant, dims)
        elementwise = 0.0 if form.elementwise is None else form.elementwise
        value = constant_of(elementwise)
        plain = 0.0 if form.matrix is not None else 1.0
        if value != plain:
            factor = elementwise
            if not isinstance(factor, fx.Node):
                factor = self.builder.expand(factor, (UNIT_DIM,) * len(dims))
            outputs[f"decay_{name}"] = self.builder.lift(factor, len(dims))
        if form.matrix is not None:
            outputs[f"matrix_{name}"] = form.matrix
        return self._transition(name, outputs)

    def _transition(self, name: str, outputs: Mapping[str, fx.Node]) -> Transition:
        decay, matrix = outputs.get(f"decay_{name}"), outputs.get(f"matrix_{name}")
        if matrix is not None:
            if decay is not None and dims_of(decay)[-1] != UNIT_DIM:
                raise self._error("a dense transition plus a decay that differs by column")
            return Transition(name, "dense", decay is not None, True)
        if decay is None:
            return Transition(name, "identity", False, False)
        return Transition(name, elementwise_kind(dims_of(decay)), True, False)

    def _error(self, message: str) -> NotAffineError:
        origin = self.node.meta["origin"] if self.node is not None else None
        return NotAffineError(message, spec=self.spec.name, stage="decay_mode", origin=origin)


def derive_transition(spec: LinearAttentionSpec, cell: Cell) -> tuple[Cell, dict[str, Transition]]:
    """The cell with elements instead of next states only, and what M is for every state."""
    cell, transitions = _Deriver(spec, cell).run()
    if spec.log_scaled is not None:
        cell = unscaled(spec, cell, transitions)
    return cell, transitions
