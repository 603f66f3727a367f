"""The compiler on one screen: from a spec to programs that an executor runs.

    1. trace          the user's callables, twice, into one graph
    2. passes         canonical spelling, transposes, domain operators; verified after each
    3. transition     decay_mode is affine; its element (M, S_hat) and the kind of M
    4. padding        decay_mode is the identity on a chunk of padding
    5. signs          no exponential can overflow
    6. differentiate  the adjoint element and the gradients, from the same graph
    7. precision      exponents in float64, for executors that run operators one by one
    8. partition      programs by what is known when

Contract: `compile_graphs` is a pure function of the spec; every intermediate form is kept in
`stages`, in order, and prints. Steps 6 to 8 are made when first asked for.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from flexla_dist.compiler.affine import Transition, derive_transition
from flexla_dist.compiler.differentiate import differentiate
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.ir.operators import ShapeRuleError
from flexla_dist.compiler.padding import prove_padding_identity
from flexla_dist.compiler.partition import Program, partition
from flexla_dist.compiler.passes.cuts import needs_cuts
from flexla_dist.compiler.passes.domain import refuse_inverses
from flexla_dist.compiler.passes.engine import Rule, rewrite
from flexla_dist.compiler.passes.order import (
    BACKWARD_PASSES,
    CUT_PASSES,
    DERIVED_PASSES,
    FORWARD_PASSES,
    KERNEL_PASSES,
    UNPADDED_PASSES,
)
from flexla_dist.compiler.precision import widen_exponents
from flexla_dist.compiler.signs import analyse_signs
from flexla_dist.compiler.trace.stages import state_argument, trace_spec
from flexla_dist.compiler.verify import VerifyError, verify_cell
from flexla_dist.shapes import Dims
from flexla_dist.spec.spec import LinearAttentionSpec

Passes = Sequence[tuple[str, tuple[Rule, ...]]]
GRAD_OUTPUT = "grad_output"
_DIFFERENTIABLE = ("input", "log_decay", "param")


@dataclass(frozen=True)
class Stage:
    """One intermediate form: what was done, the graph after it, which rules fired how often."""

    name: str
    cell: Cell
    fired: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Graphs:
    """Everything that is derived from a spec, independent of any executor.

    `forward(padded)` has the results `output`, `local_<s>`, `decay_<s>`, `matrix_<s>`;
    `backward(padded)` has `adjoint_<s>` (G_hat), the elements again, and `grad_<name>` of every
    input and parameter.
    """

    spec: LinearAttentionSpec
    stages: tuple[Stage, ...]
    transitions: dict[str, Transition]

    @property
    def cell(self) -> Cell:
        """The final forward graph."""
        return self.stages[-1].cell

    @property
    def elements(self) -> list[str]:
        """Names of the results that make up the elements (M, S_hat)."""
        scaled = self.spec.log_scaled is not None
        factors = ("log_decay", "log_weight") if scaled else ("decay_", "matrix_")
        return [n for n in self.cell.outputs if n.startswith(("local_", *factors))]

    @functools.cached_property
    def structural_hash(self) -> str:
        """Hash of the graph, equal for equal callables whatever their Python identity."""
        text = "\n".join(line.split("#")[0].rstrip() for line in str(self.cell).splitlines())
        dims = repr((self.spec.state_dims, self.spec.output_dims, dict(self.spec.padding)))
        return hashlib.sha256((text + dims).encode()).hexdigest()[:16]

    @functools.cache  # noqa: B019  (one entry for padded, one for whole chunks)
    def forward(self, padded: bool) -> Cell:
        """Forward graph; without padding selections when `padded` is false."""
        cell = self.cell
        keep = {n: x for n, x in cell.outputs.items() if not n.startswith("next_")}
        cell = _restrict(cell, list(keep))
        return cell if padded else run_passes(cell, UNPADDED_PASSES, [])

    @functools.cache  # noqa: B019
    def backward(self, padded: bool) -> Cell:
        """Backward graph, see the class."""
        cell = _backward_cell(self.spec, self.cell)
        passes = BACKWARD_PASSES if padded else (*UNPADDED_PASSES, *BACKWARD_PASSES)
        return run_passes(cell, passes, [])

    @functools.cached_property
    def kernel_forward(self) -> Cell:
        """Graph of the forward kernels: `output`, `next_<s>`, and M by itself: `decay_<s>` where it
        is elementwise, `map_<s>` (M times the state) where it is dense; padding selected in."""
        return self.kernel_stages("forward")[-1].cell

    @functools.cached_property
    def kernel_backward(self) -> Cell:
        """Graph of the backward kernels: `next_<s>`, `prev_<s>` (gradient of the entering state)
        and `grad_<name>`."""
        return self.kernel_stages("backward")[-1].cell

    @functools.cache  # noqa: B019
    def kernel_stages(self, direction: str) -> tuple[Stage, ...]:
        """The graph of the `forward` or `backward` kernels, as derived and after each pass."""
        forward = direction == "forward"
        cell = (
            _kernel_forward_cell(self) if forward else _kernel_backward_cell(self.spec, self.cell)
        )
        stages = [Stage(f"kernel {direction}", cell)]
        cell = run_passes(cell, DERIVED_PASSES if forward else BACKWARD_PASSES, stages)
        if not forward and needs_cuts(cell, self.spec.param_specs):
            cell = run_passes(cell, CUT_PASSES, stages)
        run_passes(cell, KERNEL_PASSES, stages)
        return tuple(stages)

    @functools.cache  # noqa: B019
    def programs(self, direction: str, padded: bool) -> dict[int, Program]:
        """Programs by level of `forward`, `backward`, `summary` (elements only) or
        `adjoint_summary` (elements and G_hat)."""
        forward = direction in ("forward", "summary")
        cell = widen_exponents(self.forward(padded) if forward else self.backward(padded))
        verify_cell(cell, "widen exponents")
        names = list(cell.outputs)
        if direction == "summary":
            names = self.elements
        elif direction == "adjoint_summary":
            names = [n for n in names if not n.startswith("grad_")]
        return partition(cell, names)


def compile_graphs(spec: LinearAttentionSpec, strict: bool = False) -> Graphs:
    """Steps 1 to 5; raises TraceError kinds with the user's line."""
    traced = trace_spec(spec)
    verify_cell(traced, "trace")
    stages = [Stage("trace", traced)]
    rewritten = run_passes(traced, FORWARD_PASSES, stages)
    refuse_inverses(rewritten, spec)
    cell, transitions = derive_transition(spec, rewritten)
    prove_padding_identity(traced, spec)
    analyse_signs(rewritten, spec, strict=strict)
    verify_cell(cell, "transition")
    stages.append(Stage("transition", cell))
    run_passes(cell, FORWARD_PASSES[-1:], stages)
    return Graphs(spec, tuple(stages), transitions)


def run_passes(cell: Cell, passes: Passes, stages: list[Stage]) -> Cell:
    """Run passes in order, verifying after each; what they did is appended to `stages`."""
    results = {name: node.meta["dims"] for name, node in cell.outputs.items()}
    for name, rules in passes:
        try:
            cell, fired = rewrite(cell, rules)
        except ShapeRuleError as wrong:
            raise VerifyError(f"in {name}: {wrong}") from wrong
        verify_cell(cell, name, results)
        stages.append(Stage(name, cell, fired))
    return cell


def _restrict(cell: Cell, names: list[str]) -> Cell:
    builder = Builder()
    results = cell.copy_into(builder)
    return builder.finish({name: results[name] for name in names})  # type: ignore[misc]


def _backward_cell(spec: LinearAttentionSpec, cell: Cell) -> Cell:
    """The joint graph: G_hat from the output alone, gradients from output and next states."""
    builder = Builder()
    forward = cell.copy_into(builder)
    seed = builder.placeholder(GRAD_OUTPUT, spec.output_dims, "grad_output")
    output: fx.Node = forward["output"]  # type: ignore[assignment]
    states = {
        name: builder.placeholder(state_argument(name), dims, "state")
        for name, dims in spec.state_dims.items()
    }
    results: dict[str, fx.Node] = {}
    adjoint = differentiate(builder, [(output, seed)], states.values())
    for name, node in states.items():
        found = adjoint[node]
        dims = spec.state_dims[name]
        results[f"adjoint_{name}"] = found if found is not None else builder.expand(0.0, dims)
    seeds = [(output, seed)]
    for name, dims in spec.state_dims.items():
        following: fx.Node = forward[f"next_{name}"]  # type: ignore[assignment]
        seeds.append((following, builder.placeholder(f"grad_next_{name}", dims, "grad_next")))
    wanted = [n for n in builder.placeholders.values() if n.meta["role"] in _DIFFERENTIABLE]
    for node, gradient in differentiate(builder, seeds, wanted).items():
        if gradient is not None:
            results[f"grad_{node.meta['key']}"] = gradient
    for name, node in forward.items():
        if name.startswith(("local_", "decay_", "matrix_", "log_decay", "log_weight")):
            results[name] = node  # type: ignore[assignment]
    return builder.finish(results)


def _kernel_backward_cell(spec: LinearAttentionSpec, cell: Cell) -> Cell:
    """Gradients of states, inputs and parameters from the gradients of output and next states."""
    builder = Builder()
    forward = cell.copy_into(builder)
    output: fx.Node = forward["output"]  # type: ignore[assignment]
    seeds = [(output, builder.placeholder(GRAD_OUTPUT, spec.output_dims, "grad_output"))]
    results: dict[str, fx.Node] = {}
    wanted: dict[str, fx.Node] = {}
    for name, dims in spec.state_dims.items():
        following: fx.Node = forward[f"next_{name}"]  # type: ignore[assignment]
        results[f"next_{name}"] = following
        seeds.append((following, builder.placeholder(f"grad_next_{name}", dims, "grad_next")))
        wanted[f"prev_{name}"] = builder.placeholder(state_argument(name), dims, "state")
    for node in list(builder.placeholders.values()):
        if node.meta["role"] in _DIFFERENTIABLE:
            wanted[f"grad_{node.meta['key']}"] = node
    found = differentiate(builder, seeds, wanted.values())
    for name, node in wanted.items():
        gradient = found[node]
        if gradient is not None:
            results[name] = gradient
        elif name.startswith("prev_"):
            results[name] = builder.expand(0.0, node.meta["dims"])
    return builder.finish(results)


def _kernel_forward_cell(graphs: Graphs) -> Cell:
    spec = graphs.spec
    builder = Builder()
    forward = graphs.cell.copy_into(builder)
    results: dict[str, fx.Node] = {"output": forward["output"]}  # type: ignore[dict-item]
    for name, dims in spec.state_dims.items():
        following: fx.Node = forward[f"next_{name}"]  # type: ignore[assignment]
        results[f"next_{name}"] = following
        if graphs.transitions[name].has_matrix:
            results[f"map_{name}"] = _state_map(builder, name, dims, following)
        elif graphs.transitions[name].has_decay:
            results[f"decay_{name}"] = forward[f"decay_{name}"]  # type: ignore[assignment]
    return builder.finish(results)


def _state_map(builder: Builder, name: str, dims: Dims, following: fx.Node) -> fx.Node:
    """M S without what is added: the transpose of the transpose of `decay_mode` in the state."""
    state = builder.placeholder(state_argument(name), dims, "state")
    seed = builder.placeholder(f"grad_next_{name}", dims, "grad_next")
    transposed = differentiate(builder, [(following, seed)], [state])[state]
    if transposed is None:
        return builder.expand(0.0, dims)
    back = differentiate(builder, [(transposed, state)], [seed])[seed]
    return back if back is not None else builder.expand(0.0, dims)
