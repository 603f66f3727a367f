"""Traces the callables of a spec, one after the other, into one graph.

Contract: `trace_spec` returns a cell with the results `output`, `next_<state>`, and for log-scaled
specs `log_decay` and `log_weight`. Padding is selected in after `token_mode`, so that every later
value sees it. The whole trace is made twice, with other stand-ins of sizes and dtype; a difference
between the two means that a callable looked at them (a loop over C, a constant made from a size) or
is not pure, and is refused with its line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.ir.operators import OPERATORS
from flexla_dist.compiler.trace.names import FRESH, LOG_SCALE, SHIFT, VALID, state_argument
from flexla_dist.compiler.trace.tracer import Tracer
from flexla_dist.errors import TraceError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM
from flexla_dist.spec.spec import RESERVED_LOCALS, LinearAttentionSpec
from flexla_dist.spec.values import Values

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157)
_COMPOSITES = (180, 240, 300, 360, 420, 480, 540, 600, 660, 720, 780, 840)  # gcd, parity differ


def dim_names(spec: LinearAttentionSpec) -> list[str]:
    """Every dim of a spec, in order of appearance."""
    names: list[str] = [TOKEN_DIM]
    for item in (*spec.input_specs.values(), *spec.param_specs.values()):
        names.extend(item.dims)
    for dims in spec.state_dims.values():
        names.extend(dims)
    return [name for name in dict.fromkeys(names) if name != UNIT_DIM]


def trace_spec(spec: LinearAttentionSpec) -> Cell:
    """Trace all stages of a spec; raises TraceError with the user's line."""
    _check_names(spec)
    names = dim_names(spec)
    if len(names) > len(_PRIMES):
        raise TraceError(
            f"{len(names)} dims are too many; at most {len(_PRIMES)}",
            spec=spec.name,
            stage="inputs",
        )
    first = _Trace(spec, names, _PRIMES, torch.float32).run()
    second = _Trace(spec, names, _COMPOSITES, torch.float64).run()
    _compare(spec, first, second)
    return first


def _check_names(spec: LinearAttentionSpec) -> None:
    """Values that wait between programs or kernels are called after their operator."""
    for name in (*spec.inputs, *spec.params, *spec.scalars):
        operator = re.fullmatch(r"value_([a-z0-9_]*?)(_\d+)?", name)
        if operator and operator[1] in {info.name for info in OPERATORS.values()}:
            raise TraceError(
                f"{name!r} is a name of the compiler's own values; rename it",
                spec=spec.name,
                stage="inputs",
            )


class _Trace:
    """One pass over the callables."""

    def __init__(
        self,
        spec: LinearAttentionSpec,
        names: list[str],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
    ):
        self.spec = spec
        self.tracer = Tracer(spec.name, names, list(sizes[: len(names)]), dtype)
        self.builder = self.tracer.builder

    def run(self) -> Cell:
        inputs = self._padded(self._token_stage(self._inputs()))
        params = self._params()
        chunk = self._chunk_stage(inputs, params)
        states = self._states()
        results = self._decay_stage(states, chunk)
        results["output"] = self._merge_stage(states, chunk)
        if self.spec.log_scaled is not None:
            results["log_decay"] = chunk[self.spec.log_scaled.decay]
            results["log_weight"] = chunk[self.spec.log_scaled.weight]
        return self.builder.finish(results)

    # -- arguments ----------------------------------------------------------------------------

    def _inputs(self) -> dict[str, fx.Node]:
        return {
            name: self.builder.placeholder(
                name, item.dims, "log_decay" if item.log_decay else "input"
            )
            for name, item in self.spec.input_specs.items()
        }

    def _params(self) -> Values:
        nodes = {
            name: self.builder.placeholder(name, item.dims, "param")
            for name, item in self.spec.param_specs.items()
        }
        for name in self.spec.scalars:
            nodes[name] = self.builder.placeholder(name, (), "scalar")
        return self.tracer.values(nodes, "parameter or scalar")

    def _states(self) -> dict[str, fx.Node]:
        return {
            name: self.builder.placeholder(state_argument(name), dims, "state")
            for name, dims in self.spec.state_dims.items()
        }

    # -- stages -------------------------------------------------------------------------------

    def _token_stage(self, inputs: dict[str, fx.Node]) -> dict[str, fx.Node]:
        if self.spec.token_mode is None:
            return inputs
        with self.tracer.in_stage("token_mode", self.spec.token_mode):
            x = self.tracer.values(inputs, "input")
            returned = self.tracer.run(self.spec.token_mode, ("x", x), ("p", self._params()))
            new = self._named(returned, "token_mode", "inputs")
            for name, node in new.items():
                if name not in inputs:
                    raise self._error(
                        f"token_mode returns {name!r}, which is no input; it replaces declared "
                        f"inputs: {', '.join(inputs)}"
                    )
                dims = self.spec.input_specs[name].dims
                inputs = {**inputs, name: self.tracer.fit(f"input {name!r}", node, dims)}
        return inputs

    def _padded(self, inputs: dict[str, fx.Node]) -> dict[str, fx.Node]:
        valid = self.builder.placeholder(VALID, (TOKEN_DIM,), "valid", mask=True)
        out = {}
        for name, node in inputs.items():
            rows = valid
            for _ in node.meta["dims"][1:]:
                rows = self.builder.emit(ops.unsqueeze, rows, dim=-1)
            pad = float(self.spec.padding.get(name, 0.0))
            out[name] = self.builder.emit(ops.where, rows, node, pad)
            out[name].meta.update(stage="padding", pads=name, label=name)
        return out

    def _chunk_stage(self, inputs: dict[str, fx.Node], params: Values) -> dict[str, fx.Node]:
        with self.tracer.in_stage("chunk_mode", self.spec.chunk_mode):
            x = self.tracer.values(inputs, "input")
            returned = self.tracer.run(self.spec.chunk_mode, ("x", x), ("p", params))
            local = self._named(returned, "chunk_mode", "local values")
            for name in local:
                if name in RESERVED_LOCALS and self.spec.log_scaled is not None:
                    raise self._error(f"local value {name!r} is reserved in a log-scaled spec")
            for name, node in local.items():
                if node.op == "call_function" and not node.meta["label"]:
                    node.meta["label"] = name
            if self.spec.log_scaled is not None:
                local = self._log_scaled_locals(local)
        return local

    def _log_scaled_locals(self, local: dict[str, fx.Node]) -> dict[str, fx.Node]:
        scaled = self.spec.log_scaled
        assert scaled is not None
        out = dict(local)
        for name in (scaled.decay, scaled.weight):
            if name not in local:
                raise self._error(
                    f"log_scaled names {name!r}, which chunk_mode does not return; it returns "
                    f"{', '.join(local)}"
                )
            out[name] = self.tracer.fit(f"log_scaled local {name!r}", local[name], ())
        out[scaled.weight] = self._constant_everywhere(out[scaled.weight])
        shift = self.builder.placeholder(SHIFT, (), "state")
        out["carry"] = self.builder.emit(
            ops.exp, self.builder.emit(ops.add, out[scaled.decay], shift)
        )
        out["fresh"] = self.builder.placeholder(FRESH, (), "state")
        out["m"] = self.builder.placeholder(LOG_SCALE, (), "state")
        return out

    def _constant_everywhere(self, node: fx.Node) -> fx.Node:
        """Differentiate as if the weight were a constant: exp(m) * S~ does not depend on it."""
        if node.op == "placeholder":
            return self.builder.emit(ops.stop_gradient, node)
        with self.builder.graph.inserting_after(node):
            constant = self.builder.graph.call_function(ops.stop_gradient, (node,), {})
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant, lambda user: user is not constant)
        return constant

    def _decay_stage(
        self, states: dict[str, fx.Node], local: dict[str, fx.Node]
    ) -> dict[str, fx.Node]:
        hidden = {"m"} if self.spec.log_scaled is not None else set()
        with self.tracer.in_stage("decay_mode", self.spec.decay_mode):
            c = self.tracer.values(
                {k: v for k, v in local.items() if k not in hidden}, "local value"
            )
            entering = self._state_argument(states)
            returned = self.tracer.run(self.spec.decay_mode, ("state", entering), ("c", c))
            if self.spec.single_state:
                new = {"S": self.tracer.result("the next state", returned)}
            else:
                new = self._named(returned, "decay_mode", "states")
            missing = set(states) - set(new)
            extra = set(new) - set(states)
            if missing or extra:
                raise self._error(
                    f"decay_mode returns states {sorted(new)}; expected {sorted(states)}"
                )
            dims = self.spec.state_dims
            return {
                f"next_{k}": self.tracer.fit(f"next state {k!r}", new[k], dims[k]) for k in states
            }

    def _merge_stage(self, states: dict[str, fx.Node], local: dict[str, fx.Node]) -> fx.Node:
        hidden = {"carry", "fresh"} if self.spec.log_scaled is not None else set()
        with self.tracer.in_stage("merge_mode", self.spec.merge_mode):
            c = self.tracer.values(
                {k: v for k, v in local.items() if k not in hidden}, "local value"
            )
            entering = self._state_argument(states)
            returned = self.tracer.run(self.spec.merge_mode, ("state", entering), ("c", c))
            node = self.tracer.result("the output", returned)
            return self.tracer.fit("the output", node, self.spec.output_dims)

    # -- helpers ------------------------------------------------------------------------------

    def _state_argument(self, states: dict[str, fx.Node]) -> Any:
        if self.spec.single_state:
            return self.tracer.wrap(states["S"])
        return self.tracer.values(states, "state")

    def _named(self, returned: Any, stage: str, what: str) -> dict[str, fx.Node]:
        if not isinstance(returned, Mapping):
            raise self._error(
                f"{stage} returns {type(returned).__name__}; expected a dict of {what} by name"
            )
        return {k: self.tracer.result(f"{what} {k!r}", v) for k, v in returned.items()}

    def _error(self, message: str) -> TraceError:
        return TraceError(
            message, spec=self.spec.name, stage=self.tracer.stage, origin=self.tracer.defined
        )


def _signature(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    if node.op == "placeholder":
        return ("placeholder", node.meta["key"])
    if node.op == "output":
        return ("output", tuple((k, numbers[v]) for k, v in node.args[0].items()))
    operands = tuple(numbers[x] if isinstance(x, fx.Node) else repr(x) for x in node.args)
    return (node.target, operands, repr(node.kwargs))


def _compare(spec: LinearAttentionSpec, first: Cell, second: Cell) -> None:
    """Refuse callables whose graph depends on the sizes."""
    one, two = list(first.graph.nodes), list(second.graph.nodes)
    numbers_one = {node: at for at, node in enumerate(one)}
    numbers_two = {node: at for at, node in enumerate(two)}
    for a, b in zip(one, two, strict=False):
        if _signature(a, numbers_one) != _signature(b, numbers_two):
            culprit = a if a.meta.get("origin") is not None else b
            raise TraceError(
                "the graph changes with the sizes of the dims, with the dtype, or from call to "
                "call: a Python loop over a dim such as C, a constant computed from a size with "
                "math, a branch on x.dtype or a number of torch.finfo(x.dtype), or an impure "
                "callable. Use whole-chunk operations, `x.shape[-1] ** -0.5` on the size itself, "
                "a constant such as float('-inf'), or a scalar",
                spec=spec.name,
                stage=culprit.meta.get("stage", "").removeprefix("d ") or "callables",
                origin=culprit.meta.get("origin"),
            )
