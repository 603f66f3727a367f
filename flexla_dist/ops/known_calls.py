"""Calls like earlier ones, without looking at their arguments again.

Contract: a call that went through all checks is known by what the checks look at: names, shapes,
dtypes and devices of its tensors, types of its scalars, document bounds, the executor's name. A
later call with the same takes its tensors to the executor at once, and after a few runs to the
plan's straight code, which takes a few times as long to write as it saves in a run. Values of
scalars, strides, alignment, `requires_grad`, streams and current devices may differ from call to
call: they are looked at each time. What is not known, or looks odd (subclasses of tensors,
transforms of `torch.func`, dual numbers), takes the ordinary way, which also raises every error.
The calls used last are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.tables import MOST_ZEROS
from flexla_dist.ops.autograd import (
    Call,
    Executor,
    LocalGradients,
    exit_seeds,
    full_precision,
    output_seed,
)
from flexla_dist.ops.plan import Plan, Ran, plan_of

if TYPE_CHECKING:
    from flexla_dist.compiler.executor.straight import Straight

MOST_KNOWN = 256
PLAIN = frozenset((Tensor, torch.nn.Parameter))
NUMBERS = frozenset((float, int, type(None)))
States = tuple[Tensor, ...]
Key = tuple[Any, ...]


class Repeating(Executor, Protocol):
    """An executor that can run a call as straight code."""

    @property
    def choice(self) -> Any:
        """What its plans depend on beside the call."""

    def straight(
        self, problem: Problem, direction: str, kinds: Sequence[torch.dtype]
    ) -> Straight | None:
        """The straight code of a call, if one like it was made."""


def key_of(
    arguments: Mapping[str, Any], offsets: tuple[int, ...] | None, executor: str | None
) -> Key | None:
    """What a call is known by; None where it takes the ordinary way."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    parts: list[Any] = [executor, offsets, *arguments]
    for x in arguments.values():
        kind = type(x)
        if kind in PLAIN:
            parts += (x.shape, x.dtype, x.device)
        elif kind in NUMBERS:
            parts.append(kind)
        else:
            return None
    return tuple(parts)


def repeats(executor: Executor) -> TypeGuard[Repeating]:
    """Whether calls on an executor can be repeated as straight code."""
    return hasattr(executor, "straight")


class KnownCalls:
    """Calls of one operator by their keys; `repeated` counts those that were found."""

    def __init__(self, most: int = MOST_KNOWN):
        self._most = most
        self._calls: dict[Key, KnownCall] = {}
        self.repeated = 0

    def __len__(self) -> int:
        return len(self._calls)

    def clear(self) -> None:
        """Know nothing again."""
        self._calls.clear()

    def find(self, key: Key) -> KnownCall | None:
        """The known call of a key."""
        found = self._calls.pop(key, None)
        if found is None or found.choice != found.executor.choice:
            return None
        self._calls[key] = found  # the last one now
        self.repeated += 1
        return found

    def add(self, key: Key, call: KnownCall) -> None:
        """Know a call from now on; the one that was not used for longest goes."""
        while len(self._calls) >= self._most:
            self._calls.pop(next(iter(self._calls)), None)
        self._calls[key] = call


class KnownCall:
    """A call without tensors.

    `straight_calls` counts directions that ran as straight code here, `ordinary_calls` the others.
    """

    def __init__(
        self,
        executor: Repeating,
        problem: Problem,
        arguments: Mapping[str, Any],
        plan: Plan,
        ran: Ran,
    ):
        """arguments: of the call, by name; problem: what they were bound to; plan: of the call;
        ran: told when backward runs."""
        self.executor, self.choice, self.plan = executor, executor.choice, plan
        self.problem = problem.with_tensors({}, {})
        self.call = Call.of(problem, ran)
        self.ran, self._backward_plan = ran, plan_of(executor, problem, "backward")
        order = list(arguments)
        self._tensors = [order.index(n) for n in (*problem.inputs, *problem.params)]
        scalars = problem.spec.scalars
        self._numbers = [(n, order.index(n)) for n in scalars if n in arguments]
        self._defaults = {n: float(x) for n, x in scalars.items() if x is not None}
        self._zeros = _shared_zeros(problem)
        self._on_cuda = problem.device.type == "cuda"
        self._code: dict[str, Straight] = {}
        self.straight_calls = self.ordinary_calls = 0
        self.count = len(problem.state_names)

    def __call__(self, values: Sequence[Any], initial: Any) -> tuple[Tensor, ...]:
        """Output and exit states; `values` are the arguments of the call in order."""
        tensors = [unwrap_if_dead(values[at]) for at in self._tensors]
        scalars: Mapping[str, Any] = self._defaults
        if self._numbers:
            given = {n: values[at] for n, at in self._numbers if values[at] is not None}
            scalars = {**scalars, **{n: float(x) for n, x in given.items()}}
        entry = self._zeros
        if initial is not None or entry is None or (self._on_cuda and _capturing()):
            entry = self.problem.entry_state(initial)
        if torch.is_grad_enabled():
            for x in (*tensors, *entry):
                if x.requires_grad:
                    return _apply(self, scalars, *entry, *tensors)
        return self.forward(scalars, (*entry, *tensors))[: 1 + self.count]

    # -- the two directions: by straight code, or as any call ---------------------------------

    def forward(self, scalars: Mapping[str, float], tensors: States) -> States:
        """Output, exit states and what backward needs; `tensors` are entry states, inputs and
        parameters."""
        count = self.count
        code = self._code.get("forward") or self._find("forward", tensors[:count])
        if code is not None:
            found = _run(code, (*tensors[count:], *tensors[:count]), scalars)
            if found is not None:
                self.straight_calls += 1
                return found
        self._begin()
        with full_precision(self.problem.device):
            result = self.executor.forward(self._rebuilt(scalars, tensors), tensors[:count])
        return (result.output, *result.exit, *result.saved)

    def backward(
        self, scalars: Mapping[str, float], grads: Sequence[Tensor | None], kept: States
    ) -> States:
        """Gradients of `kept`, which is entry states, inputs and parameters, then what forward
        saved."""
        self.ran.backward = self._backward_plan
        count, end = self.count, self.count + self.call.count
        entry, saved = kept[:count], kept[end:]
        seeds = (output_seed(self.problem, grads[0]), *self._exit_seeds(entry, grads[1:]))
        rest = (*entry, *seeds, *saved)
        code = self._code.get("backward") or self._find("backward", rest)
        if code is not None:
            found = _run(code, (*kept[count:end], *rest), scalars)
            if found is not None:
                self.straight_calls += 1
                return found
        self._begin()
        with full_precision(self.problem.device):
            result = self.executor.backward(
                self._rebuilt(scalars, kept), saved, entry, seeds[0], exit_seeds(entry, grads[1:])
            )
        return (*result.entry, *self.call.ordered(result))

    def with_scalars(self, scalars: Mapping[str, float]) -> Call:
        """The call with these scalars."""
        problem = self.problem.with_tensors({}, {}, scalars)
        return replace(self.call, problem=problem)

    def _rebuilt(self, scalars: Mapping[str, float], tensors: States) -> Problem:
        end = self.count + self.call.count
        return self.with_scalars(scalars).rebuild(tensors[self.count : end])

    def _exit_seeds(self, entry: States, grads: Sequence[Tensor | None]) -> States:
        if self._zeros is not None and all(g is None for g in grads):
            return self._zeros
        return exit_seeds(entry, grads)

    def _begin(self) -> None:
        """Before an ordinary run, on whatever stream."""
        self.ordinary_calls += 1
        if self._on_cuda and not _capturing():
            for x in self._zeros or ():
                x.record_stream(torch.cuda.current_stream(x.device))

    def _find(self, direction: str, others: States) -> Straight | None:
        """The straight code of a direction, kept once it is there."""
        code = self.executor.straight(self.problem, direction, [x.dtype for x in others])
        if code is not None:
            code.hold(self._zeros or ())
            self._code[direction] = code
        return code


def _run(code: Straight, tensors: States, scalars: Mapping[str, float]) -> States | None:
    if code.computes:
        with full_precision(code.device):
            return code(tensors, scalars)
    return code(tensors, scalars)


def _shared_zeros(problem: Problem) -> States | None:
    """The states before the first token, if they are shared by all calls."""
    shapes = problem.family.states
    if shapes is None or problem.compute_dtype != torch.float32:
        return None
    if any(math.prod(shape) > MOST_ZEROS for shape in shapes):
        return None
    return problem.entry_state(None)


def _capturing() -> bool:
    """Whether a CUDA graph is captured: it has to keep the zeros that it reads."""
    return torch.cuda.is_current_stream_capturing()


class KnownAttention(torch.autograd.Function):
    """`LocalAttention` for a known call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        known, scalars, *tensors = arguments
        found = known.forward(scalars, tuple(tensors))
        results = 1 + known.count
        ctx.known, ctx.scalars = known, scalars
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *found[results:])
        return found[:results]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        known, scalars, kept = ctx.known, ctx.scalars, ctx.saved_tensors
        if torch.is_grad_enabled():  # the results could be differentiated again: refused there
            call = known.with_scalars(scalars)
            found = LocalGradients.apply(known.executor, call, known.count, *grads, *kept)
        else:
            found = known.backward(scalars, grads, kept)
        return (None, None, *found)


# `KnownAttention.apply` without what `Function.apply` does for `torch.func`, which takes as long as
# the rest of it: transforms are not active here, and dead wrappers are taken off.
_apply = super(torch.autograd.Function, KnownAttention).apply
