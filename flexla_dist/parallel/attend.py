"""A compiled operator on one shard: local work and state exchange as one autograd node.

Contract: the node is in the graph of every rank, whatever its own inputs require, and does the same
exchanges on every rank, decided from the plan and from a flag that the ranks agreed on. Forward
sends the state that leaves the last local document and receives the one that enters the first;
backward does the same with gradients, reversed. A shard without tokens passes on what it
receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flexla_dist.comm.engines import Arriving
from flexla_dist.errors import DoubleBackwardError
from flexla_dist.ops.plan import plan_of
from flexla_dist.parallel.engine import Groups
from flexla_dist.parallel.local_call import LocalCall, LocalForward, States


class ShardedAttend(torch.autograd.Function):
    """(output, *final states) of a compiled operator on this rank's shard.

    Tensors are the inputs and parameters in the order of the call's names, then the initial states.
    `anchor` requires a gradient where any rank wants one.
    """

    @staticmethod
    def forward(ctx: Any, call: LocalCall, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, params, initial = call.split(tensors)
        with full_precision(tensors):
            problem = call.bind(inputs, params)
            blank, batch = call.blank_states(problem), problem.batch
            call.check_initial(initial, blank, batch)
            groups, opened = call.groups(problem), None
            if call.touches_cuts:
                opened = call.executor.open_forward(problem, blank, groups)
            arriving = _entering(call, problem, params, initial, blank, opened, groups)
            if opened is not None:
                opened.proceed()
            entry, arrivals = call.entry(blank, arriving, initial, groups)
            expect(opened, arrivals)
            if call.plan.tokens:
                result = call.executor.forward(problem, entry, opened=opened)
                output, exits, kept = result.output, result.exit, result.saved
            else:
                output, exits, kept = _no_output(call, problem), entry, ()
            finals = call.final_states(exits, batch)
            arriving.join()
        call.op.last_plan = plan_of(call.executor, problem)
        ctx.call, ctx.states, ctx.initial = call, len(entry), [(t.shape, t.dtype) for t in initial]
        ctx.save_for_backward(*inputs.values(), *params.values(), *entry, *kept)
        if not call.replay:
            call.record.open_nodes += any(ctx.needs_input_grad)
        if finals and call.op.spec.log_scaled is not None:
            ctx.mark_non_differentiable(finals[-1])
        return (output, *finals)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *grad_finals: Tensor) -> tuple[Tensor | None, ...]:
        call: LocalCall = ctx.call
        saved = ctx.saved_tensors
        tag = replace(call.tag, direction="backward")
        with _guard(call, f"backward of {call.op.spec.name} ({tag})"), full_precision(saved):
            if torch.is_grad_enabled():
                raise DoubleBackwardError(
                    f"{call.op.spec.name}: a second derivative was asked for (create_graph=True); "
                    "sharded linear attention has first derivatives only"
                )
            inputs, params, rest = call.split(saved)
            ran = LocalForward(rest[: ctx.states], rest[ctx.states :])
            grads = _backward(ctx, call, inputs, params, ran, grad_output, grad_finals)
            if call.carrier is not None:
                call.carrier.check_after_backward()
        call.record.open_nodes -= 1
        return (None, None, *grads)


def full_precision(tensors: Sequence[Tensor]) -> torch.autocast:
    """Autocast off, forward and backward: the operator keeps states in full precision itself."""
    return torch.autocast(tensors[0].device.type, enabled=False)


def expect(opened: Any, arrivals: Sequence[Callable[[], None]]) -> None:
    """What enters comes by `arrivals`: just before a call that was opened reads it, or now."""
    if opened is not None:
        opened.expect(arrivals)
        return
    for arrive in arrivals:
        arrive()


def _guard(call: LocalCall, what: str) -> AbstractContextManager[None]:
    return nullcontext() if call.exchanger is None else call.exchanger.guard(what)


def _entering(
    call: LocalCall,
    problem: Any,
    params: Mapping[str, Tensor],
    initial: States,
    blank: States,
    opened: Any,
    groups: Groups,
) -> Arriving:
    """The state that enters the first local document: on its way, or from the record."""
    if call.carrier is None:
        return Arriving(())
    if call.replay:
        return Arriving(call.record.states[call.index])
    template = tuple(t[call.rows.first] for t in blank)
    with _disable_current_modes():
        leaving = call.leaving(problem, params, initial, opened)
        arriving = call.carrier.begin(
            leaving, call.plan.crossing, call.tag, template, groups, reverse=False
        )
    call.record.states[call.index] = arriving.state
    return arriving


def _no_output(call: LocalCall, problem: Any) -> Tensor:
    """The output [B, 0, HV, ...] of a shard without tokens."""
    batch, _, *rest = problem.output_shape()
    return torch.empty(batch, 0, *rest, dtype=problem.output_dtype, device=problem.device)


def _backward(
    ctx: Any,
    call: LocalCall,
    inputs: dict[str, Tensor],
    params: dict[str, Tensor],
    ran: LocalForward,
    grad_output: Tensor,
    grad_finals: States,
) -> list[Tensor | None]:
    """Gradients of inputs, parameters and initial states, in the order of the node's tensors."""
    tag = replace(call.tag, direction="backward")
    if call.finals == "broadcast":
        grad_finals = call.sum_over_ranks(grad_finals, tag)
    problem = call.bind(inputs, params)
    grad_exit = call.grad_exit(ran.entry, grad_finals)
    wanted = ctx.needs_input_grad[2:]
    groups, opened = call.groups(problem), None
    if call.touches_cuts and (any(wanted) or call.plan.receives):
        opened = call.executor.open_backward(problem, ran.saved, ran.entry, grad_output, groups)
    arriving = Arriving(())
    if call.carrier is not None:
        returning = call.returning(problem, params, grad_exit, opened)
        template = tuple(t[call.rows.first] for t in grad_exit[: len(call.op.spec.state_dims)])
        arriving = call.carrier.begin(
            returning, call.plan.crossing, tag, template, groups, reverse=True
        )
    grads: list[Tensor | None] = [None] * len(wanted)
    if any(wanted) and opened is not None:
        opened.proceed()
    if call.carrier is not None and call.plan.sends:
        into = tuple(grad[call.rows.last] for grad in grad_exit)
        expect(opened, call.arrivals(arriving, groups, into))
    if any(wanted):
        if call.plan.tokens:
            found = _gradients(ctx, call, problem, ran, grad_output, grad_exit, opened)
        else:
            zeros = [torch.zeros_like(t) for t in (*inputs.values(), *params.values())]
            found = [*zeros, *_initial_gradients(ctx, call, grad_exit)]
        grads = [g if w else None for g, w in zip(found, wanted, strict=True)]
    arriving.join()
    return grads


def _gradients(
    ctx: Any,
    call: LocalCall,
    problem: Any,
    ran: LocalForward,
    grad_output: Tensor,
    grad_exit: States,
    opened: Any,
) -> list[Tensor | None]:
    """All gradients, once the gradient of the state that leaves this shard is known."""
    call.op.ran.backward = plan_of(call.executor, problem, "backward")
    grads = call.executor.backward(
        problem, ran.saved, ran.entry, grad_output, grad_exit, opened=opened
    )
    named = [grads.inputs[name] for name in call.input_names]
    named += [grads.params[name] for name in call.param_names]
    return [*named, *_initial_gradients(ctx, call, grads.entry)]


def _initial_gradients(ctx: Any, call: LocalCall, grad_entry: States) -> list[Tensor | None]:
    """Gradients [N, HV, ...] of initial states: rows of documents that start here, else zero."""
    found: list[Tensor | None] = []
    for place, (shape, dtype) in enumerate(ctx.initial):
        if place >= len(grad_entry) or grad_entry[place] is None:
            found.append(None)
            continue
        grad = grad_entry[place].new_zeros(shape)
        grad[call.rows.whole_start] = grad_entry[place][call.rows.start]
        found.append(grad.to(dtype))
    return found
