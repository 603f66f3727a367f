"""One call of a compiled operator on one shard, piece by piece.

Contract: everything here follows from the plan. States are [N_local, HV, ...] in the executor's
order, with one blank row where a shard has no documents. A shard without tokens computes nothing:
its element is the identity, in the structure that the operator's other shards have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flexla_dist.comm.element import Element, StateElement, identity_like
from flexla_dist.comm.engines import Arriving
from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.tag import Tag
from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.parallel.engine import Carrier, Groups
from flexla_dist.parallel.outgoing import Outgoing, as_element
from flexla_dist.parallel.plan import SequencePlan
from flexla_dist.parallel.recompute import CallRecord
from flexla_dist.parallel.rows import Rows

States = tuple[Tensor, ...]
Finals = Literal["none", "owner", "broadcast"]
Blanks = dict[tuple, Element]


@dataclass(frozen=True)
class LocalForward:
    """What backward reads besides the inputs."""

    entry: States
    saved: States


@dataclass(eq=False)
class LocalCall:
    """Everything of a call that is no tensor; captured by the autograd node.

    op, executor: the compiled operator and the executor to use. exchanger: of the group, None with
    one rank. carrier: moves the states, None where none crosses a cut. tag: place of the call.
    record, index: where received states are kept. replay: reuse them instead of communicating.
    finals: who gets final states. blanks: elements of no tokens by signature, kept by the caller.
    """

    op: Any
    executor: Any
    input_names: tuple[str, ...]
    param_names: tuple[str, ...]
    scalars: Mapping[str, float]
    plan: SequencePlan
    exchanger: StateExchanger | None
    carrier: Carrier | None
    tag: Tag
    record: CallRecord
    index: int
    replay: bool
    finals: Finals
    blanks: Blanks
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = Rows.of(self.plan)

    # -- binding ------------------------------------------------------------------------------

    def split(self, tensors: Sequence[Tensor]) -> tuple[dict, dict, States]:
        """Inputs and parameters by name, and the tensors after them."""
        first, second = len(self.input_names), len(self.input_names) + len(self.param_names)
        inputs = dict(zip(self.input_names, tensors[:first], strict=True))
        params = dict(zip(self.param_names, tensors[first:second], strict=True))
        return inputs, params, tuple(tensors[second:])

    def bind(self, inputs: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Any:
        """The operator's problem for this shard; of one blank token where the shard has none."""
        for name, x in inputs.items():
            if x.dim() < 2 or x.shape[1] != self.plan.tokens:
                raise ArgumentError(
                    f"input {name!r} has shape {list(x.shape)}, expected {self.plan.tokens} tokens "
                    "as its dim 1, the length of this rank's shard"
                )
        if self.plan.tokens == 0:
            return self.bind_blank(inputs, params)
        starts = self.plan.cu_seqlens if self.plan.documents.count > 1 else None
        return self.op.bind(inputs, params, self.scalars, cu_seqlens=starts)

    def bind_blank(self, inputs: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Any:
        """The problem of one blank token, with the operator's sizes."""
        blank = {name: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for name, x in inputs.items()}
        return self.op.bind(blank, params, self.scalars, cu_seqlens=None)

    def sequence(self, local: int) -> int:
        """Index for the executor of the first (0) or last (-1) local document; -1 is all rows."""
        count = self.plan.documents.count
        return -1 if count <= 1 else local % count

    def blank_states(self, problem: Any) -> States:
        """States before any token, one row for each local document."""
        zero = problem.zero_state()
        if not self.plan.packed or self.plan.tokens:
            return zero
        rows = max(self.plan.documents.count, 1)
        return tuple(t.expand(rows, *t.shape[1:]).contiguous() for t in zero)

    def groups(self, problem: Any) -> Groups:
        """The groups of heads in which states cross ranks, the same on all of them."""
        if self.carrier is None:
            return ((0, problem.heads),)
        return self.carrier.groups(problem)

    @property
    def touches_cuts(self) -> bool:
        """Whether a state crosses a border of this shard, and the shard has a say in it."""
        crosses = self.plan.sends or self.plan.receives
        return self.carrier is not None and crosses and self.plan.tokens > 0

    # -- elements -----------------------------------------------------------------------------

    def blank(self, problem: Any, params: Mapping[str, Tensor], adjoint: bool) -> Element:
        """The identity element, made from the structure of a problem of one blank token."""
        inputs = problem.inputs
        shapes = tuple((x.shape[0], *x.shape[2:], x.dtype, x.device) for x in inputs.values())
        key = (self.op, self.executor, adjoint, shapes)
        found = self.blanks.get(key)
        if found is None:
            small = self.bind_blank(inputs, params)
            if adjoint:
                zero = small.zero_state()
                ran = self.executor.forward(small, zero)
                gradient = torch.zeros_like(ran.output)
                like = self.executor.adjoint_summary(small, ran.saved, zero, gradient, -1)
            else:
                like = self.executor.summary(small, -1)
            found = self.blanks[key] = _compact(identity_like(as_element(like)))
        return found

    def leaving(
        self, problem: Any, params: Mapping[str, Tensor], initial: States, opened: Any
    ) -> Outgoing:
        """What the last local document, which leaves this shard, does to the state."""
        if not self.plan.sends or self.plan.tokens == 0:
            return Outgoing(self.blank(problem, params, adjoint=False))
        documents = self.plan.documents
        reset = documents.count - 1 in documents.starting
        start: States = ()
        if reset and initial:
            start = tuple(t[self.rows.last_whole].to(problem.compute_dtype) for t in initial)
        return Outgoing(None, opened, self.sequence(-1), reset, start)

    def returning(
        self, problem: Any, params: Mapping[str, Tensor], grad_exit: States, opened: Any
    ) -> Outgoing:
        """What the first local document does to the gradient, which leaves at its start."""
        if not self.plan.receives or self.plan.tokens == 0:
            return Outgoing(self.blank(problem, params, adjoint=True), adjoint=True)
        reset = 0 in self.plan.documents.ending
        start: States = ()
        if reset and self.finals != "none":
            states = grad_exit[: len(self.op.spec.state_dims)]
            start = tuple(t[self.rows.first] for t in states)
        return Outgoing(None, opened, self.sequence(0), reset, start, adjoint=True)

    # -- states -------------------------------------------------------------------------------

    def check_initial(self, initial: States, blank: States, batch: int) -> None:
        """ArgumentError unless given initial states are [N, HV, ...] of the whole row, and of a
        floating type."""
        if not initial:
            return
        if len(initial) != len(blank):
            raise ArgumentError(
                f"initial_state has {len(initial)} tensors, expected {len(blank)}, one for each "
                "state of the operator"
            )
        for given, like in zip(initial, blank, strict=True):
            if not given.is_floating_point():
                raise ArgumentTypeError(
                    f"initial_state has dtype {given.dtype}; expected a floating type such as "
                    "float32: convert it with .float()"
                )
            expected = (self.all_documents(batch), *like.shape[1:])
            if tuple(given.shape) != expected:
                raise ArgumentError(
                    f"initial_state has shape {tuple(given.shape)}, expected {expected}: the "
                    "states of all documents of the whole row, the same tensor on every rank"
                )

    def all_documents(self, batch: int) -> int:
        """N of the whole row: documents when packed, else batch rows."""
        return self.plan.num_documents if self.plan.packed else batch

    def entry(
        self, blank: States, arriving: Arriving, initial: States, groups: Groups
    ) -> tuple[States, list[Callable[[], None]]]:
        """States that enter the local documents: given ones, received ones, else none; with what
        completes each group of heads of them once they have arrived."""
        if self.plan.receives and not self.plan.packed:
            return arriving.state, self.arrivals(arriving, groups, ())
        states = tuple(t.clone() for t in blank)
        for state, given in zip(states, initial, strict=False):
            state[self.rows.start] = given[self.rows.whole_start].to(state.dtype)
        if not self.plan.receives:
            return states, []
        into = tuple(state[self.rows.first] for state in states)
        return states, self.arrivals(arriving, groups, into)

    def arrivals(
        self, arriving: Arriving, groups: Groups, into: States
    ) -> list[Callable[[], None]]:
        """For each group of heads a function that waits for it and copies it to `into`, rows
        [.., HV, ...] of states."""

        def arrive(group: int) -> None:
            arriving.arrive(group)
            for target, received in zip(into, arriving.state, strict=False):
                target.narrow(1, *groups[group]).copy_(received.narrow(1, *groups[group]))

        return [partial(arrive, group) for group in range(len(groups))]

    def final_states(self, exits: States, batch: int) -> States:
        """Final states [N, HV, ...] of the whole row: of documents that end here, or all."""
        if self.finals == "none":
            return ()
        if self.replay and self.finals == "broadcast":
            return tuple(t.clone() for t in self.record.finals[self.index])
        states = tuple(t.new_zeros(self.all_documents(batch), *t.shape[1:]) for t in exits)
        for state, leaving in zip(states, exits, strict=True):
            state[self.rows.whole_end] = leaving[self.rows.end]
        if self.finals == "broadcast":
            states = self.sum_over_ranks(states, self.tag)
            self.record.finals[self.index] = tuple(t.clone() for t in states)
        return states

    def grad_exit(self, entry: States, grad_finals: States) -> States:
        """Gradient of the final states of documents that end here; zero for the others."""
        grads = tuple(torch.zeros_like(t) for t in entry)
        for grad, given in zip(grads, grad_finals, strict=False):
            grad[self.rows.end] = given[self.rows.whole_end].to(grad.dtype)
        return grads

    def sum_over_ranks(self, tensors: States, tag: Tag) -> States:
        """Sums over the group; with one rank the tensors themselves."""
        if self.exchanger is None:
            return tensors
        return tuple(self.exchanger.all_reduce_sum(t, tag) for t in tensors)


def _compact(element: Element) -> Element:
    """An identity element that occupies almost no memory: views of single numbers."""

    def one(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.flatten()[:1].clone().expand(t.shape)

    states = []
    for s in element.states:
        matrix = s.matrix
        if matrix is not None:
            matrix = matrix[0, 0].clone().expand_as(matrix)
        states.append(StateElement(one(s.local), one(s.decay), matrix))  # type: ignore[arg-type]
    return Element(tuple(states), False, one(element.log_decay), one(element.log_weight))
