"""A compiled operator as one node of PyTorch's autograd, on one device.

Contract: saves the inputs and a few entry states, never chunk-local values; backward is the
derived one of the executor. Gradients come back in the dtype of what they belong to. Autocast has
no say in what an operator computes: arithmetic follows the dtypes of the inputs, and states stay
in the compute dtype. `torch.func.grad` and `vjp` work; `vmap`, forward-mode derivatives and
second derivatives are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap
from flexla_dist.compiler.executor.problem import Outline, Problem
from flexla_dist.compiler.executor.results import ForwardResult, Gradients, Saved
from flexla_dist.compiler.executor.tables import device_zeros
from flexla_dist.errors import DoubleBackwardError, TransformError
from flexla_dist.ops.plan import Ran, plan_of

States = tuple[Tensor, ...]


class Executor(Protocol):
    """What runs a spec: four phases, the same for one device and for a shard."""

    name: str
    plan: str  # of the forward pass
    backward_plan: str

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

    def configurations(self, problem: Problem, direction: str) -> Mapping[str, object]:
        """Where the configuration of each kernel of a direction is from."""

    def saved_shapes(self, outline: Outline) -> tuple[Saved, ...]:
        """What `forward` saves at most; it may save nothing instead."""


@dataclass(frozen=True)
class Call:
    """A problem without its tensors: how to rebuild it from the tensors that autograd saved."""

    problem: Problem
    inputs: tuple[str, ...]  # names of the tensor arguments in order: inputs, then parameters
    params: tuple[str, ...]
    ran: Ran | None = None  # told when the backward pass runs

    @staticmethod
    def of(problem: Problem, ran: Ran | None = None) -> Call:
        """Take the tensors of a problem apart."""
        bare = problem.with_tensors({}, {})
        return Call(bare, tuple(problem.inputs), tuple(problem.params), ran)

    def note_backward(self, executor: Executor) -> None:
        """Say what the backward pass runs."""
        if self.ran is not None:
            self.ran.backward = plan_of(executor, self.problem, "backward")

    @property
    def count(self) -> int:
        """Number of tensor arguments."""
        return len(self.inputs) + len(self.params)

    def rebuild(self, tensors: Sequence[Tensor]) -> Problem:
        """The problem with these tensors, inputs and parameters in order."""
        count = len(self.inputs)
        inputs = dict(zip(self.inputs, tensors[:count], strict=True))
        params = dict(zip(self.params, tensors[count:], strict=True))
        return self.problem.with_tensors(inputs, params)

    def ordered(self, found: Gradients) -> States:
        """Gradients in the order of the tensor arguments."""
        inputs = [found.inputs[name] for name in self.inputs]
        return (*inputs, *[found.params[name] for name in self.params])


# -- what is refused, and what is switched off ------------------------------------------------


def refuse_double_backward(name: str) -> NoReturn:
    """Raise because the backward pass itself is being differentiated."""
    raise DoubleBackwardError(
        f"{name}: a second derivative was asked for (create_graph=True), but only first "
        "derivatives are derived; differentiate flexla_dist.spec.oracle.run_recurrence twice "
        "instead"
    )


def refuse_vmap(name: str) -> NoReturn:
    """Raise because an operator is being mapped over a dim that it does not see."""
    raise TransformError(
        f"{name}: torch.func.vmap cannot map over a compiled operator; inputs are [B, T, heads, "
        "...], so move the mapped dim into B: reshape [N, B, T, ...] to [N * B, T, ...]"
    )


def refuse_forward_mode(name: str) -> NoReturn:
    """Raise because a derivative in forward mode was asked for."""
    raise TransformError(
        f"{name}: only reverse-mode derivatives are derived; use torch.func.grad or vjp instead "
        "of jvp, and jacrev instead of jacfwd"
    )


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off where it is on: inside an operator the inputs' dtypes decide."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


# -- nodes ------------------------------------------------------------------------------------


def attend(executor: Executor, call: Call, entry: States, tensors: Sequence[Tensor]) -> States:
    """Output and exit states of a call, differentiable in entry states, inputs and parameters."""
    # torch.func needs a node whose context is set up apart; that costs 0.04 ms on the host.
    transformed = torch._C._are_functorch_transforms_active()
    node = TransformedAttention if transformed else LocalAttention
    results = node.apply(executor, call, len(entry), *entry, *tensors)
    return results[: 1 + len(entry)]


def _forward(executor: Executor, call: Call, num_states: int, tensors: States) -> ForwardResult:
    with full_precision(call.problem.device):
        return executor.forward(call.rebuild(tensors[num_states:]), tensors[:num_states])


def _remember(
    ctx: Any, arguments: Sequence[Any], exits: Sequence[Tensor], saved: Sequence[Tensor]
) -> None:
    ctx.executor, ctx.call, ctx.num_states = arguments[:3]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arguments[3:], *saved)
    constant = exits[-1:] if ctx.call.problem.spec.log_scaled is not None else ()
    ctx.mark_non_differentiable(*constant)  # a log scale has no gradient


class LocalAttention(torch.autograd.Function):
    """Forward and derived backward of one call on one device."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        executor, call, num_states, *tensors = arguments
        result = _forward(executor, call, num_states, tuple(tensors))
        _remember(ctx, arguments, result.exit, result.saved)
        return (result.output, *result.exit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        run = LocalGradients.apply if torch.is_grad_enabled() else LocalGradients.forward
        seeds = grads[: 1 + ctx.num_states]
        found = run(ctx.executor, ctx.call, ctx.num_states, *seeds, *ctx.saved_tensors)
        return (None, None, None, *found)


class TransformedAttention(torch.autograd.Function):
    """`LocalAttention` for `torch.func`: what backward reads is a result like the others."""

    @staticmethod
    def forward(executor: Executor, call: Call, num_states: int, *tensors: Tensor) -> Any:
        result = _forward(executor, call, num_states, tensors)
        return (result.output, *result.exit, *result.saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        states = 1 + inputs[2]
        _remember(ctx, inputs, output[1:states], output[states:])

    backward = LocalAttention.backward

    @staticmethod
    def vmap(info: Any, in_dims: Any, executor: Executor, call: Call, *rest: Any) -> NoReturn:
        refuse_vmap(call.problem.spec.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode(ctx.call.problem.spec.name)


class LocalGradients(torch.autograd.Function):
    """The backward pass of one call: gradients of entry states, inputs and parameters.

    A node of its own only where its results could be differentiated again: there it refuses.
    """

    @staticmethod
    def forward(
        executor: Executor, call: Call, num_states: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        seeds, kept = tensors[: 1 + num_states], tensors[1 + num_states :]
        entry, rest = kept[:num_states], kept[num_states : num_states + call.count]
        problem = call.rebuild(rest)  # type: ignore[arg-type]
        call.note_backward(executor)
        with full_precision(problem.device):
            found = executor.backward(
                problem,
                kept[num_states + call.count :],  # type: ignore[arg-type]
                entry,  # type: ignore[arg-type]
                output_seed(problem, seeds[0]),
                exit_seeds(entry, seeds[1:]),  # type: ignore[arg-type]
            )
        return (*found.entry, *call.ordered(found))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[1].problem.spec.name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        refuse_double_backward(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: Any, executor: Executor, call: Call, *rest: Any) -> NoReturn:
        refuse_vmap(call.problem.spec.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode(ctx.name)


def output_seed(problem: Outline, gradient: Tensor | None) -> Tensor:
    """The gradient of the output; zero where none arrived."""
    if gradient is not None:
        return gradient
    return torch.zeros(problem.output_shape(), dtype=problem.output_dtype, device=problem.device)


def exit_seeds(entry: States, gradients: Sequence[Tensor | None]) -> States:
    """The gradients of the exit states; zeros that nobody writes where none arrived."""
    return tuple(
        device_zeros(tuple(state.shape), state.dtype, state.device)
        if gradient is None
        else gradient.contiguous()
        for state, gradient in zip(entry, gradients, strict=True)
    )
