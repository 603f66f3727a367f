"""A compiled operator as one node of PyTorch's autograd, on one device.

Contract: saves the inputs and a few entry states, never chunk-local values; backward is the
derived one of the executor. Gradients come back in the dtype of what they belong to. Double
backward is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.results import ForwardResult, Gradients
from flexla_dist.errors import DoubleBackwardError

States = tuple[Tensor, ...]


class Executor(Protocol):
    """What runs a spec: four phases, the same for one device and for a shard."""

    name: str

    def forward(self, problem: Problem, entry: States) -> ForwardResult:
        """Outputs and exit states from entry states."""

    def backward(
        self,
        problem: Problem,
        saved: States,
        entry: States,
        grad_output: Tensor,
        grad_exit: States,
    ) -> Gradients:
        """Gradients from the gradients of output and exit states."""

    def summary(self, problem: Problem, sequence: int) -> SpanMap:
        """The element (M, S_hat) of one document."""

    def adjoint_summary(
        self, problem: Problem, saved: States, entry: States, grad_output: Tensor, sequence: int
    ) -> SpanMap:
        """The adjoint element (M^T, G_hat) of one document."""


@dataclass(frozen=True)
class Call:
    """A problem without its tensors: how to rebuild it from the tensors that autograd saved."""

    problem: Problem
    names: tuple[str, ...]  # inputs then parameters, the order of the tensor arguments
    num_inputs: int

    @staticmethod
    def of(problem: Problem) -> Call:
        """Take the tensors of a problem apart."""
        names = (*problem.inputs, *problem.params)
        bare = _with_tensors(problem, {}, {})
        return Call(bare, names, len(problem.inputs))

    def rebuild(self, tensors: Sequence[Tensor]) -> Problem:
        """The problem with these tensors, in the order of `names`."""
        named = dict(zip(self.names, tensors, strict=True))
        inputs = {name: named[name] for name in self.names[: self.num_inputs]}
        params = {name: named[name] for name in self.names[self.num_inputs :]}
        return _with_tensors(self.problem, inputs, params)


def _with_tensors(
    problem: Problem, inputs: dict[str, Tensor], params: dict[str, Tensor]
) -> Problem:
    return replace(problem, inputs=inputs, params=params)


def refuse_double_backward(name: str) -> None:
    """Raise if the backward pass itself is being differentiated (create_graph=True)."""
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            f"{name}: a second derivative was asked for (create_graph=True), but only first "
            "derivatives are derived; differentiate flexla_dist.spec.oracle.run_recurrence twice "
            "instead"
        )


class LocalAttention(torch.autograd.Function):
    """Forward and derived backward of one call on one device."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, call: Call, num_states: int, *tensors: Tensor) -> Any:
        entry, rest = tensors[:num_states], tensors[num_states:]
        result = executor.forward(call.rebuild(rest), entry)
        ctx.executor, ctx.call, ctx.num_states = executor, call, num_states
        ctx.num_saved = len(result.saved)
        ctx.save_for_backward(*tensors, *result.saved)
        return (result.output, *result.exit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        refuse_double_backward(ctx.call.problem.spec.name)
        kept = ctx.saved_tensors
        tensors, saved = kept[: len(kept) - ctx.num_saved], kept[len(kept) - ctx.num_saved :]
        entry, rest = tensors[: ctx.num_states], tensors[ctx.num_states :]
        found = ctx.executor.backward(ctx.call.rebuild(rest), saved, entry, grads[0], grads[1:])
        named = {**found.inputs, **found.params}
        return (None, None, None, *found.entry, *(named[name] for name in ctx.call.names))
