"""Runs the generated Triton kernels of a spec.

Contract: kernels are emitted from the same rewritten graphs that the torch executor runs; none is
written for a variant. Plans are `fused` or `unfused` (see `schedule`), their scans cut into
segments where documents are few and long; a call may stop where states cross ranks (`open_*`).
Values between kernels and states are stored in the inputs' dtype, gates and vectors in float32;
running states are float32 in registers. Sums over column tiles, head groups, batch and chunks have
a fixed order: the same call gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from triton.runtime.errors import OutOfResources

from flexla_dist.compiler.build import load_module, module_text
from flexla_dist.compiler.emit.kernel import Emitted, emit_kernel
from flexla_dist.compiler.executor import choosing, fold_kernel
from flexla_dist.compiler.executor import launch as launching
from flexla_dist.compiler.executor.choosing import Choice, Tuned
from flexla_dist.compiler.executor.element import SpanMap
from flexla_dist.compiler.executor.launch import interpreting
from flexla_dist.compiler.executor.opened import OpenedTriton
from flexla_dist.compiler.executor.planned_launches import Arguments, Configured, Heads
from flexla_dist.compiler.executor.planning import Planner
from flexla_dist.compiler.executor.problem import Outline, Problem
from flexla_dist.compiler.executor.results import ForwardResult, Gradients, Saved
from flexla_dist.compiler.executor.segments import Cutting
from flexla_dist.compiler.executor.straight import PATIENCE, Straight, straight
from flexla_dist.compiler.executor.triton_run import Plan, Run, run
from flexla_dist.compiler.kernels import Kernel, Schedule, buffer_name
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.compiler.schedule import can_fuse, schedule_backward, schedule_forward
from flexla_dist.compiler.shared_values import shared_values
from flexla_dist.errors import ExecutorError

States = tuple[Tensor, ...]
Result = TypeVar("Result")
MAX_SHRINK = 4
MOST_PLANS = 256  # plans kept; the oldest goes
FUSED_PROGRAMS = 2  # of a processor, where M is elementwise; other loops fill it one by one
LEAST_SEGMENTS = 4  # fewer cost more in passes over the chunks than they bring

__all__ = ["Built", "TritonExecutor", "interpreting"]


@dataclass(frozen=True)
class Built:
    """A kernel of a schedule, compiled lazily by Triton."""

    kernel: Kernel
    emitted: Emitted
    function: Any


class TritonExecutor:
    """The executor called `triton`."""

    name = "triton"
    backward_plan = "unfused"

    def __init__(self, graphs: Graphs, tuned: Tuned | None = None):
        """tuned: where measured configurations are; None is the user's and the package's files."""
        self.graphs = graphs
        self.tuned = tuned or Tuned()
        self.spec = graphs.spec
        if self.spec.log_scaled is not None:
            raise ExecutorError(
                f"{self.spec.name}: log-scaled states run on executor='torch'; the triton executor "
                "carries plain states only"
            )
        self.state_names = tuple(self.spec.state_dims)
        transitions = graphs.transitions
        self.mapped_states = tuple(  # those whose M is not the identity
            n for n in self.state_names if transitions[n].has_decay or transitions[n].has_matrix
        )
        self._shrink: dict[Any, int] = {}
        self._refused: dict[Any, str] = {}  # why calls of a direction and sizes are not tuned
        self._choices: dict[Any, dict[str, Choice]] = {}
        self._plans: dict[Any, Plan] = {}
        self.configured: dict[Any, Configured] = {}  # by the planner
        self.compiled: dict[Any, Any] = {}  # kernels that were launched
        self.segment_chunks: int | None = None  # chunks of a segment; None chooses
        self.plan = self._default_plan()  # of the forward pass, "fused" or "unfused"

    def _default_plan(self) -> str:
        """Fused wherever that can be: states then stay in registers."""
        return "fused" if can_fuse(self.spec, self.graphs.kernel_forward) else "unfused"

    # -- kernels ------------------------------------------------------------------------------

    @functools.cached_property
    def kept(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """Values that forward keeps: nodes of the forward and of the backward graph."""
        return shared_values(self.graphs.kernel_forward, self.graphs.kernel_backward)

    @functools.cached_property
    def forward_schedule(self) -> Schedule:
        """Kernels of the forward pass."""
        kept = [mine for mine, _ in self.kept]
        return schedule_forward(self.spec, self.graphs.kernel_forward, self.plan, kept)

    @functools.cached_property
    def backward_schedule(self) -> Schedule:
        """Kernels of the backward pass."""
        graphs, kept = self.graphs, [theirs for _, theirs in self.kept]
        return schedule_backward(self.spec, graphs.kernel_backward, graphs.kernel_forward, kept)

    @functools.cache  # noqa: B019
    def gates(self, direction: str) -> set[fx.Node]:
        """Values that stay in float32 between kernels."""
        forward = direction == "forward"
        cell = self.graphs.kernel_forward if forward else self.graphs.kernel_backward
        return launching.feeds_gates(list(cell.graph.nodes))

    @functools.cache  # noqa: B019
    def source(self, direction: str, uneven: frozenset[str]) -> tuple[str, tuple[Emitted, ...]]:
        """Generated module of a direction, and its kernels in order."""
        schedule = self.forward_schedule if direction == "forward" else self.backward_schedule
        emitted = tuple(
            emit_kernel(self.spec, schedule, kernel, uneven) for kernel in schedule.kernels
        )
        helpers = frozenset().union(*(e.helpers for e in emitted))
        plan = self.plan if direction == "forward" else self.backward_plan
        title = f"{self.spec.name}: {direction} kernels, plan {plan}"
        return module_text(title, helpers, [e.source for e in emitted]), emitted

    @functools.cache  # noqa: B019
    def built(self, direction: str, uneven: frozenset[str]) -> tuple[Built, ...]:
        """Imported kernels of a direction."""
        schedule = self.forward_schedule if direction == "forward" else self.backward_schedule
        text, emitted = self.source(direction, uneven)
        module = load_module(f"{self.spec.name}_{direction}", text)
        return tuple(
            Built(kernel, e, getattr(module, e.name))
            for kernel, e in zip(schedule.kernels, emitted, strict=True)
        )

    def helper(self, direction: str, name: str, subject: str) -> Any:
        """A kernel of `fold_kernel`, as a direction launches it for the argument `subject`."""
        return getattr(fold_kernel, name)

    # -- configurations -----------------------------------------------------------------------

    def uneven_dims(self, outline: Outline) -> frozenset[str]:
        """Dims that do not fill their tiles."""
        sizes = outline.sizes
        uneven = {dim for dim, size in sizes.items() if size != launching.power_of_two(size)}
        if uneven:  # M is scanned with as many columns as rows
            dims = self.spec.state_dims
            transitions = self.graphs.transitions
            uneven.update(dims[name][-1] for name, t in transitions.items() if t.has_matrix)
        return frozenset(uneven)

    def choose(self, problem: Problem, direction: str, built: Built, shrink: int) -> Choice:
        """The configuration of a kernel."""
        schedule = self.forward_schedule if direction == "forward" else self.backward_schedule
        return choosing.choose(
            self.tuned,
            problem,
            schedule,
            built.kernel,
            built.emitted,
            direction=direction,
            shrink=shrink,
            refused=self.refusal(problem, direction),
        )

    def refusal(self, problem: Problem, direction: str) -> str:
        """Why calls of these sizes are not tuned; empty where they may be."""
        return self._refused.get((direction, problem.family.sizes, self.tuned), "")

    def configurations(self, problem: Problem, direction: str) -> dict[str, Choice]:
        """What every kernel of a direction of a call is launched with, by name."""
        shrink = self._shrink.get((direction, problem.family.sizes), 0)
        sizes, chunk = problem.family.sizes, problem.longest_chunk
        key: tuple[Any, ...]
        key = (direction, sizes, chunk, choosing.buckets_of(problem), shrink, *self.choice)
        key = (*key, self.refusal(problem, direction))
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = {
                built.kernel.name: self.choose(problem, direction, built, shrink)
                for built in self.built(direction, self.uneven_dims(problem))
            }
        return found

    # -- phases -------------------------------------------------------------------------------

    def forward(
        self, problem: Problem, entry: States, opened: OpenedTriton | None = None
    ) -> ForwardResult:
        """Outputs and exit states from the states that enter each document.

        opened: the call as `open_forward` left it.
        """
        found = self._complete(problem, "forward", Arguments(entry), entry, opened)
        states = 1 + len(self.state_names)
        return ForwardResult(found[0], tuple(found[1:states]), tuple(found[states:]))

    def backward(
        self,
        problem: Problem,
        saved: States,
        entry: States,
        grad_output: Tensor,
        grad_exit: States,
        opened: OpenedTriton | None = None,
    ) -> Gradients:
        """Gradients of inputs, parameters and entry states."""
        arguments = Arguments(entry, (grad_output,), grad_exit, saved)
        found = self._complete(problem, "backward", arguments, grad_exit, opened)
        states, inputs = len(self.state_names), len(problem.inputs)
        named = zip(problem.inputs, found[states : states + inputs], strict=True)
        rest = zip(problem.params, found[states + inputs :], strict=True)
        return Gradients(dict(named), dict(rest), tuple(found[:states]))

    def open_forward(
        self, problem: Problem, entry: States, groups: tuple[Heads, ...] = ()
    ) -> OpenedTriton:
        """A forward call up to what its segments do; `entry` gives shapes alone.

        groups: (first, count) of heads whose states travel together, in order; () takes all.
        """
        return self._open(problem, "forward", Arguments(entry), groups)

    def open_backward(
        self,
        problem: Problem,
        saved: States,
        entry: States,
        grad_output: Tensor,
        groups: tuple[Heads, ...] = (),
    ) -> OpenedTriton:
        """A backward call up to what its segments do to the gradient of the state.

        saved: of a forward call that was opened with the same groups; of one that was not opened
            it is computed again.
        """
        if len(saved) <= len(self.kept):
            opened = self.open_forward(problem, entry, groups)
            saved = self.forward(problem, entry, opened).saved
        arguments = Arguments(entry, (grad_output,), entry, saved)
        return self._open(problem, "backward", arguments, groups)

    def _open(
        self, problem: Problem, direction: str, arguments: Arguments, groups: tuple[Heads, ...]
    ) -> OpenedTriton:
        if not problem.layout.chunks or problem.batch == 0:
            raise ExecutorError(
                f"{self.spec.name}: B is {problem.batch} and T is {problem.tokens}; a call that "
                "stops where states cross ranks needs at least one row and one token"
            )
        transitions = self.graphs.transitions
        kinds = [
            "dense" if transitions[n].has_matrix
            else "elementwise" if transitions[n].has_decay
            else "identity"
            for n in self.state_names
        ]  # fmt: skip
        adjoint = direction == "backward"
        first = len(problem.inputs) + len(problem.params)
        first += len(arguments.entry) + 1 if adjoint else 0
        lanes = 1 if problem.layout.packed else problem.batch
        pauses = groups or ((0, problem.heads),)

        def once(shrink: int) -> OpenedTriton:
            plan = self._planned(problem, direction, arguments, shrink, pauses)
            run = Run(plan, self._given(problem, arguments), problem.scalars, problem.device)
            assert plan.segments is not None
            return OpenedTriton(run, plan.segments, kinds, first, lanes, adjoint, pauses)

        return self._fitting(problem, direction, once)

    def _complete(
        self,
        problem: Problem,
        direction: str,
        arguments: Arguments,
        entering: States,
        opened: OpenedTriton | None,
    ) -> list[Any]:
        """The results of a call, in the planner's order."""

        def once(shrink: int) -> list[Any]:
            if opened is not None and not begun:
                begun.append(True)
                plan, slots = opened.run.plan, opened.finish(entering)
            else:  # or once more, with smaller tiles
                if opened is not None:
                    opened.arrive()
                pauses = () if opened is None else opened.groups
                plan = self._planned(problem, direction, arguments, shrink, pauses)
                given = self._given(problem, arguments)
                code = None if opened is not None else self._code(plan, problem.device)
                found = None if code is None else code(given, problem.scalars)
                if found is not None:
                    return list(found)
                plan.runs += 1
                slots = run(plan, given, problem.scalars, problem.device)
            return [slots[slot] for slot in plan.results]

        begun: list[bool] = []
        return self._fitting(problem, direction, once)

    @staticmethod
    def _given(problem: Problem, arguments: Arguments) -> States:
        return (*problem.inputs.values(), *problem.params.values(), *arguments.tensors)

    def prepared(
        self, problem: Problem, direction: str, arguments: Arguments
    ) -> tuple[Plan, tuple[Tensor, ...]]:
        """The plan of a direction of a call, and the tensors to run it with."""
        shrink = self._shrink.get((direction, problem.family.sizes), 0)
        return self._planned(problem, direction, arguments, shrink), self._given(problem, arguments)

    def _planned(
        self,
        problem: Problem,
        direction: str,
        arguments: Arguments,
        shrink: int,
        pauses: tuple[Heads, ...] = (),
    ) -> Plan:
        """The plan of a call: made once for equal shapes, dtypes and documents."""
        kinds = [x.dtype for x in arguments.tensors]
        key = self._plan_key(problem, direction, shrink, pauses, kinds)
        plan = self._plans.get(key)
        if plan is None:
            plan = Planner(self, problem, direction, arguments, shrink, pauses).plan()
            if len(self._plans) >= MOST_PLANS:
                self._plans.pop(next(iter(self._plans)), None)
            self._plans[key] = plan
        return plan

    def _plan_key(
        self,
        problem: Problem,
        direction: str,
        shrink: int,
        pauses: tuple[Heads, ...],
        kinds: Sequence[torch.dtype],
    ) -> tuple[Any, ...]:
        refused = self.refusal(problem, direction)
        return (problem.family, direction, shrink, *self.choice, refused, pauses, *kinds)

    @property
    def choice(self) -> tuple[str, int | None, Tuned]:
        """What plans depend on beside the call."""
        return self.plan, self.segment_chunks, self.tuned

    def straight(
        self, problem: Problem, direction: str, kinds: Sequence[torch.dtype]
    ) -> Straight | None:
        """A call as straight code, if one like it was made; see `straight`.

        kinds: dtypes of the arguments that are not tensors of the problem, in a plan's order.
        """
        shrink = self._shrink.get((direction, problem.family.sizes))
        if shrink is None:
            return None
        plan = self._plans.get(self._plan_key(problem, direction, shrink, (), kinds))
        return None if plan is None else self._code(plan, problem.device)

    @staticmethod
    def _code(plan: Plan, device: torch.device) -> Straight | None:
        if plan.code is None and plan.runs >= PATIENCE:
            plan.code = straight(plan, device)
        return plan.code

    def saved_shapes(self, outline: Outline) -> tuple[Saved, ...]:
        """Shapes that hold what `forward` saves: states entering the segments, M of each segment,
        and values of every chunk that backward reads."""
        cutting = self.cutting(outline)
        rows = 0 if cutting is None else cutting.most_segments(outline)
        found = []
        if rows:
            shapes = [outline.state_shape(name, rows) for name in self.state_names]
            shapes += [self._map_shape(outline, name, rows) for name in self.mapped_states]
            found = [Saved(shape, torch.float32) for shape in shapes]
        tile = max(launching.MIN_TILE, outline.longest_chunk)
        chunks = outline.most_chunks * (1 if outline.packed else outline.batch)
        for node, _ in self.kept:
            kind = self.kept_dtype(node, outline.output_dtype)
            found.append(Saved((chunks, outline.heads, tile, tile), kind))
        return tuple(found)

    def kept_dtype(self, node: fx.Node, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a value of the forward graph is kept for backward."""
        return launching.value_dtype(buffer_name(node), node, self.gates("forward"), dtype)

    def cutting(self, outline: Outline, groups: int = 1) -> Cutting | None:
        """How scans are cut into segments; None if they stay whole.

        The same forward and backward and for column tiles of any size: both must cut alike.
        groups: of heads that run one after the other, which then are to fill the device by
        themselves.
        """
        if self.segment_chunks is not None:
            return Cutting(self.segment_chunks)
        if interpreting():
            return None
        programs = outline.heads * self.scan_tiles(outline)
        if programs == 0:
            return None
        wanted = self.programs(outline) * launching.processors(outline.device)
        segments = wanted * groups // programs
        if groups > 1:  # they have segments anyway
            return Cutting(None, max(1, segments))
        return Cutting(None, segments) if segments >= LEAST_SEGMENTS else None

    def programs(self, outline: Outline) -> int:
        """Programs that a processor is to have of a scan."""
        if self.tuned.programs is not None:
            return self.tuned.programs
        databases = self.tuned.databases(choosing.arch_of(outline.device))
        if any(database.scans for database in databases):
            key = self.scans_key(outline)
            for database in databases:
                if key in database.scans:
                    return database.scans[key].programs
        dense = any(t.has_matrix for t in self.graphs.transitions.values())
        return FUSED_PROGRAMS if self.plan == "fused" and not dense else 1

    def scans_key(self, outline: Outline) -> choosing.Key:
        """What measured segments are found by."""
        kernels = self.forward_schedule.kernels
        at = next(i for i, kernel in enumerate(kernels) if kernel.kind == "scan")
        _, emitted = self.source("forward", self.uneven_dims(outline))
        return choosing.scans_key(outline, emitted[at])

    def scan_tiles(self, outline: Outline) -> int:
        """Programs of the scan for one head of one segment; 0 where nothing is scanned."""
        schedule = self.forward_schedule
        scan = next((kernel for kernel in schedule.kernels if kernel.kind == "scan"), None)
        if scan is None:
            return 0
        launch = launching.configuration(outline, schedule, scan, shrink=0)
        tiles = launching.column_tiles(outline, schedule, scan, launch)
        return tiles * launching.row_tiles(outline, scan)

    def _map_shape(self, outline: Outline, name: str, rows: int) -> tuple[int, ...]:
        dims = self.spec.state_dims[name]
        if self.graphs.transitions[name].has_matrix:
            dims = (dims[0], dims[0])
        else:
            dims = self.graphs.kernel_forward.outputs[f"decay_{name}"].meta["dims"]
        return (rows, outline.heads, *(outline.size(dim) for dim in dims))

    def _fitting(self, problem: Problem, direction: str, once: Callable[[int], Result]) -> Result:
        """Run with the largest column tiles whose kernels fit the device, as measured if they fit
        so; remembered by sizes."""
        key = (direction, problem.family.sizes)
        shrink = self._shrink.get(key, 0)
        while True:
            try:
                result = once(shrink)
            except OutOfResources as full:
                if self._refuse(problem, direction, full):
                    continue
                shrink += 1
                if shrink > MAX_SHRINK:
                    raise ExecutorError(
                        f"{self.spec.name}: a {direction} kernel needs {full.required} bytes of "
                        f"{full.name}, the device has {full.limit}, even with column tiles of 16; "
                        "use a smaller chunk_size or executor='torch'"
                    ) from full
                continue
            self._shrink[key] = shrink
            return result

    def _refuse(self, problem: Problem, direction: str, full: OutOfResources) -> bool:
        """Use no measured configurations for calls of these sizes, if any were used."""
        chosen = self.configurations(problem, direction).values()
        if not any(choice.source in (choosing.TUNED, choosing.NEAR) for choice in chosen):
            return False
        reason = f"a kernel needs {full.required} bytes of {full.name}, there are {full.limit}"
        self._refused[direction, problem.family.sizes, self.tuned] = reason
        return True

    def summary(self, problem: Problem, sequence: int) -> SpanMap:
        """M and S_hat of one document."""
        return self.open_forward(problem, problem.zero_state()).summary(sequence)

    def adjoint_summary(
        self, problem: Problem, saved: States, entry: States, grad_output: Tensor, sequence: int
    ) -> SpanMap:
        """M transposed and G_hat of one document."""
        return self.open_backward(problem, saved, entry, grad_output).summary(sequence)
