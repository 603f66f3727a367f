"""Proves that `decay_mode` is affine in the state and derives its element (M, S_hat).

Contract: `derive_transition` walks the graph of every next state with the form `E * S + A @ S + c`, E
elementwise, A dense on the first dim, c free of the state. What does not fit is refused with the user's line:
a function that is not linear, a product of two states, two states that mix, columns that mix. The cell it
returns has the results `local_<s>` (c), `decay_<s>` (E, unless it is one or, with a matrix, zero) and
`matrix_<s>` (A, if any); `Transition.kind` says what M is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell, Operand, dims_of
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.passes.simplify import constant_of
from flexla_dist.compiler.trace.stages import FRESH, SHIFT, state_argument
from flexla_dist.errors import NotAffineError
from flexla_dist.shapes import UNIT_DIM, format_dims
from flexla_dist.spec.spec import LinearAttentionSpec

KINDS = ("identity", "scalar", "rows", "columns", "full", "dense")


@dataclass(frozen=True)
class Transition:
    """What the linear part M of one state is.

    `kind` is one of KINDS: elementwise factors by the state dims they have, or `dense` on the first dim.
    `has_decay` and `has_matrix` tell which results the cell has.
    """

    state: str
    kind: str
    has_decay: bool
    has_matrix: bool


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
            if node.op == "call_function" and node in wanted:
                if any(isinstance(x, fx.Node) and x in self.forms for x in node.args):
                    self.forms[node] = self._step(node)
        outputs: dict[str, fx.Node] = {"output": self.results["output"]}  # type: ignore[dict-item]
        transitions = {name: self._finish_state(name, outputs) for name in self.state_dims}
        for name in ("log_decay", "log_weight"):
            if name in self.results:
                outputs[name] = self.results[name]  # type: ignore[assignment]
        for name in self.state_dims:
            outputs[f"next_{name}"] = self.results[f"next_{name}"]  # type: ignore[assignment]
        return self.builder.finish(outputs), transitions

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
        if fn in (ops.add, ops.sub):
            return self._sum(node, -1.0 if fn is ops.sub else 1.0)
        if fn is ops.neg:
            return self._map(self.forms[node.args[0]], lambda x: self._emit(ops.neg, x))  # type: ignore[index]
        if fn in (ops.mul, ops.div):
            return self._product(node)
        if fn is ops.where:
            return self._select(node)
        if fn is ops.matmul:
            return self._matmul(node)
        raise self._refuse_operator(node)

    def _refuse_operator(self, node: fx.Node) -> NotAffineError:
        info = OPERATORS[node.target]  # type: ignore[index]
        at = [i for i, x in enumerate(node.args) if isinstance(x, fx.Node) and x in self.forms]
        if set(at) <= set(info.linear) and info.kind in ("shape", "reduce"):
            return self._error(
                f"{info.name} of the state moves or sums its entries; the state may be multiplied "
                "elementwise or from the left by a matrix (c.M @ S), so that columns stay independent"
            )
        return self._error(
            f"the next state is not affine in the state: {info.name} of a value that depends on it. "
            "decay_mode may scale the state, multiply it from the left by a matrix and add to it"
        )

    # -- rules --------------------------------------------------------------------------------

    def _map(self, form: _Form, fn: Callable[[Operand], Operand]) -> _Form:
        parts = [None if p is None else fn(p) for p in (form.elementwise, form.matrix, form.constant)]
        return _Form(form.state, parts[0], parts[1], parts[2])  # type: ignore[arg-type]

    def _same_state(self, a: _Form, b: _Form) -> str:
        if a.state != b.state:
            raise self._error(
                f"states {a.state!r} and {b.state!r} mix in decay_mode; each state must evolve by "
                "itself (M is block-diagonal over states). Combine them in merge_mode, or make them one"
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
        forms = []
        for x in node.args:
            if isinstance(x, fx.Node) and x in self.forms:
                if dims_of(x) != node.meta["dims"]:
                    raise self._broadcast(x, node)
                forms.append(self.forms[x])
            else:
                forms.append(_Form("", None, None, x))  # type: ignore[arg-type]
        a, b = forms
        state = self._same_state(a, b) if a.state and b.state else a.state or b.state
        matrix = self._plus(a.matrix, b.matrix, sign)
        return _Form(
            state,
            self._plus(a.elementwise, b.elementwise, sign),
            matrix,  # type: ignore[arg-type]
            self._plus(a.constant, b.constant, sign),
        )

    def _product(self, node: fx.Node) -> _Form:
        fn = node.target
        a, b = node.args
        a_in = isinstance(a, fx.Node) and a in self.forms
        b_in = isinstance(b, fx.Node) and b in self.forms
        if (a_in and b_in) or (b_in and fn is ops.div):
            raise self._error(
                "the next state is not affine in the state: "
                + ("a product of two values that depend on it" if a_in else "a division by it")
            )
        inner, factor = (a, b) if a_in else (b, a)
        if dims_of(inner) != node.meta["dims"]:
            raise self._broadcast(inner, node)
        form = self.forms[inner]  # type: ignore[index]
        if form.matrix is not None and dims_of(factor)[-1:] not in ((), (UNIT_DIM,)):
            raise self._error(
                f"a dense transition scaled by a factor {format_dims(dims_of(factor))} that differs "
                "by column; scale rows, or scale the state before the matrix product"
            )

        def scaled(part: Operand) -> Operand:
            if constant_of(part) == 1.0 and fn is ops.mul:
                return factor  # type: ignore[return-value]
            if not isinstance(part, fx.Node) and not isinstance(factor, fx.Node):
                return part * factor if fn is ops.mul else part / factor  # type: ignore[operator]
            if not isinstance(part, fx.Node) and fn is ops.mul:
                return self._emit(ops.mul, factor, part)  # type: ignore[arg-type]
            return self._emit(fn, part, factor)  # type: ignore[arg-type]

        return self._map(form, scaled)

    def _select(self, node: fx.Node) -> _Form:
        mask = node.args[0]
        if isinstance(mask, fx.Node) and mask in self.forms:
            raise self._error("the next state is not affine in the state: a selection by its values")
        forms = []
        for x in node.args[1:]:
            known = isinstance(x, fx.Node) and x in self.forms
            if known and dims_of(x) != node.meta["dims"]:
                raise self._broadcast(x, node)
            forms.append(self.forms[x] if known else _Form("", None, None, x))  # type: ignore[index, arg-type]
        a, b = forms
        state = self._same_state(a, b) if a.state and b.state else a.state or b.state
        if (a.matrix is not None or b.matrix is not None) and dims_of(mask)[-1:] != (UNIT_DIM,):
            raise self._error("a selection by column of a dense transition")

        def pick(x: Operand | None, y: Operand | None) -> Operand | None:
            if x is None and y is None:
                return None
            x, y = (0.0 if x is None else x), (0.0 if y is None else y)
            if not isinstance(x, fx.Node) and not isinstance(y, fx.Node):
                x = self.builder.expand(x, dims_of(mask))
            return self._emit(ops.where, mask, x, y)  # type: ignore[arg-type]

        matrix = pick(a.matrix, b.matrix)
        return _Form(
            state,
            pick(a.elementwise, b.elementwise),
            matrix,  # type: ignore[arg-type]
            pick(a.constant, b.constant),
        )

    def _matmul(self, node: fx.Node) -> _Form:
        left, right = node.args
        if isinstance(left, fx.Node) and left in self.forms:
            raise self._error(
                "the state is multiplied from the right, which mixes its columns; multiply from the left "
                "(c.M @ S), or declare the state transposed, so that columns stay independent"
            )
        form = self.forms[right]  # type: ignore[index]
        matrix = form.matrix
        product = self._emit(ops.matmul, left, matrix) if matrix is not None else None  # type: ignore[arg-type]
        if form.elementwise is not None:
            product = self._plus(product, self._times_rows(left, form.elementwise), 1.0)  # type: ignore[assignment, arg-type]
        constant = form.constant
        if constant is not None:
            rows = self.builder.expand(constant, dims_of(right))
            constant = self._emit(ops.matmul, left, rows)  # type: ignore[arg-type]
        return _Form(form.state, None, product, constant)

    def _times_rows(self, left: fx.Node, factor: Operand) -> Operand:
        if constant_of(factor) is not None:
            value = constant_of(factor)
            return left if value == 1.0 else self._emit(ops.mul, left, value)  # type: ignore[arg-type]
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
        form = self.forms.get(node) if isinstance(node, fx.Node) else None  # type: ignore[arg-type]
        self.node = node if isinstance(node, fx.Node) else None
        if form is None:
            form = _Form(name, 0.0, None, node)
        if form.state != name:
            raise self._error(
                f"the next state {name!r} is made from state {form.state!r}; each state must evolve by itself"
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
        present = tuple(dim != UNIT_DIM for dim in dims_of(decay))
        kind = {(): "scalar", (False,): "scalar", (True,): "full"}.get(present)
        if kind is None:
            kind = {
                (False, False): "scalar",
                (True, False): "rows",
                (False, True): "columns",
                (True, True): "full",
            }[present]
        return Transition(name, kind, True, False)

    # -- errors -------------------------------------------------------------------------------

    def _broadcast(self, x: Any, node: fx.Node) -> NotAffineError:
        return self._error(
            f"the state {format_dims(dims_of(x))} is broadcast to {format_dims(node.meta['dims'])}"
        )

    def _error(self, message: str) -> NotAffineError:
        origin = self.node.meta["origin"] if self.node is not None else None
        return NotAffineError(message, spec=self.spec.name, stage="decay_mode", origin=origin)


def derive_transition(
    spec: LinearAttentionSpec, cell: Cell
) -> tuple[Cell, dict[str, Transition]]:
    """The cell with elements instead of next states only, and what M is for every state."""
    cell, transitions = _Deriver(spec, cell).run()
    if spec.log_scaled is not None:
        cell = _LogScaledCheck(spec, cell, transitions).run()
    return cell, transitions


class _LogScaledCheck:
    """M must be exactly `carry`, the contribution homogeneous of degree one in `fresh`."""

    def __init__(self, spec: LinearAttentionSpec, cell: Cell, transitions: Mapping[str, Transition]):
        self.spec, self.cell, self.transitions = spec, cell, transitions

    def run(self) -> Cell:
        outputs = self.cell.outputs
        for name, transition in self.transitions.items():
            decay = outputs.get(f"decay_{name}")
            if transition.kind != "scalar" or decay is None or not self._is_carry(decay):
                raise self._error(
                    f"state {name!r} of a log-scaled spec must be scaled by c.carry alone: "
                    "return S * c.carry + c.fresh * X"
                )
            if self._degree(outputs[f"local_{name}"], {}) != 1:
                raise self._error(
                    f"what is added to state {name!r} must be c.fresh times a value: "
                    "return S * c.carry + c.fresh * X"
                )
        builder = Builder()
        whole = self.cell.copy_into(builder)
        bare = self.cell.copy_into(builder, substitute={FRESH: 1.0})
        for name in self.transitions:
            whole[f"local_{name}"] = builder.expand(
                bare[f"local_{name}"], self.spec.state_dims[name]
            )
        return builder.finish(whole)  # type: ignore[arg-type]

    def _is_carry(self, node: fx.Node) -> bool:
        while node.target in (ops.unsqueeze, ops.expand):
            node = node.args[-1]  # type: ignore[assignment]
        if node.target is not ops.exp or node.args[0].target is not ops.add:  # type: ignore[union-attr]
            return False
        keys = {x.meta.get("key") for x in node.args[0].args if isinstance(x, fx.Node)}  # type: ignore[union-attr]
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
        if node.target in (ops.add, ops.sub) and len(set(degrees)) == 1:
            return degrees[0]
        if OPERATORS[node.target].kind in ("shape", "reduce") or node.target is ops.neg:  # type: ignore[index]
            return max(degrees)
        raise self._error("c.fresh may only be multiplied with what is added to the state")

    def _error(self, message: str) -> NotAffineError:
        return NotAffineError(message, spec=self.spec.name, stage="decay_mode")
