"""What every baseline is given: a compiled operator, and how its tokens are cut over the ranks.

Contract: baselines use the same executor phases as `flexla_dist.parallel`, so that two systems
differ in what they send and when, not in the local kernels. They take whole rows [B, T_local, ...]
without documents and without initial states; what a system cannot do it refuses by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.element import Element, identity_like
from flexla_dist.comm.links import GroupRanks, Line
from flexla_dist.parallel.local_call import as_element

Values = Mapping[str, Tensor]


class Refused(ValueError):
    """A system that cannot run a case; the message says which, why and what to do."""


@dataclass(frozen=True)
class Sharding:
    """Ranks of a sequence group and the tokens that each holds, in group order."""

    ranks: GroupRanks
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, group: Any, lengths: Sequence[int]) -> Sharding:
        """The sharding over a process group (None: the default group). Raises Refused where the
        number of lengths is not that of the ranks."""
        ranks = GroupRanks.of(group)
        if len(lengths) != ranks.size or min(lengths) < 0:
            raise Refused(
                f"lengths are {tuple(lengths)} for {ranks.size} ranks; expected one number of "
                "tokens for every rank, none negative"
            )
        return cls(ranks, tuple(lengths))

    @property
    def tokens(self) -> int:
        """Tokens of this rank's shard."""
        return self.lengths[self.ranks.rank]

    @property
    def equal(self) -> bool:
        """Whether all shards are equally long."""
        return len(set(self.lengths)) == 1

    @property
    def offset(self) -> int:
        """Place of this rank's first token in the whole sequence."""
        return [0, *accumulate(self.lengths)][self.ranks.rank]

    def line(self, reverse: bool) -> Line:
        """All ranks in the order of a scan, seen from this one."""
        return Line.around(self.ranks.rank, (True,) * (self.ranks.size - 1), reverse)


@dataclass(frozen=True)
class HeadRange:
    """Some of the heads of a call: of q and k, and of v and the state."""

    heads: slice
    value_heads: slice


def head_panels(spec: Any, inputs: Values, count: int) -> list[HeadRange]:
    """The heads of a call in `count` equal parts; in one part where they do not divide."""
    heads, value_heads = head_counts(spec, inputs)
    if heads % count or value_heads % count:
        count = 1
    parts = []
    for part in range(count):
        q = slice(part * heads // count, (part + 1) * heads // count)
        v = slice(part * value_heads // count, (part + 1) * value_heads // count)
        parts.append(HeadRange(q, v))
    return parts


def head_counts(spec: Any, inputs: Values) -> tuple[int, int]:
    """(H of head groups, HV of all else); HV twice for a spec without groups."""
    grouped = {n: item.group is not None for n, item in spec.input_specs.items()}
    value_heads = next(inputs[name].shape[2] for name in inputs if not grouped[name])
    heads = next((inputs[name].shape[2] for name in inputs if grouped[name]), value_heads)
    return heads, value_heads


def slice_inputs(spec: Any, inputs: Values, part: HeadRange) -> dict[str, Tensor]:
    """The inputs of some heads, as views."""
    grouped = {n: item.group is not None for n, item in spec.input_specs.items()}
    return {
        name: x[:, :, part.heads if grouped[name] else part.value_heads]
        for name, x in inputs.items()
    }


@dataclass(frozen=True)
class Shard:
    """One call of an operator on this rank's tokens, phase by phase, for some or all heads.

    A shard without tokens is bound with one blank token, for shapes alone.
    """

    op: Any
    executor: Any
    sharding: Sharding
    problem: Any

    @classmethod
    def bind(
        cls,
        op: Any,
        executor: Any,
        sharding: Sharding,
        inputs: Values,
        params: Values,
        scalars: Mapping[str, float],
    ) -> Shard:
        """Check the arguments; Refused where they have another number of tokens than the shard."""
        tokens = next(iter(inputs.values())).shape[1]
        if tokens != sharding.tokens:
            raise Refused(
                f"{op.spec.name}: inputs have {tokens} tokens, expected {sharding.tokens}, the "
                "length of this rank's shard"
            )
        if tokens == 0:
            inputs = {n: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for n, x in inputs.items()}
        return cls(op, executor, sharding, op.bind(inputs, params, scalars))

    @property
    def empty(self) -> bool:
        """Whether this rank holds no tokens."""
        return self.sharding.tokens == 0

    def zero_state(self) -> tuple[Tensor, ...]:
        """The state before any token."""
        return self.problem.zero_state()

    def open(self) -> Any:
        """The forward call, stopped where a state would enter: it tells what the shard does to it,
        goes on with what needs none, and is completed by `forward`."""
        return self.executor.open_forward(self.problem, self.zero_state())

    def open_adjoint(
        self, saved: tuple[Tensor, ...], entry: tuple[Tensor, ...], grad_output: Tensor
    ) -> Any:
        """The backward call, likewise: what the shard does to the gradient of a state."""
        return self.executor.open_backward(self.problem, saved, entry, grad_output)

    def identity(self, adjoint: bool) -> Element:
        """The element of no tokens, in the structure of the others; from one blank token."""
        inputs = {
            n: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for n, x in self.problem.inputs.items()
        }
        small = self.op.bind(inputs, self.problem.params, self.problem.scalars)
        if not adjoint:
            return identity_like(as_element(self.executor.summary(small, -1)))
        zero = small.zero_state()
        ran = self.executor.forward(small, zero)
        blank = torch.zeros_like(ran.output)
        found = self.executor.adjoint_summary(small, ran.saved, zero, blank, -1)
        return identity_like(as_element(found))

    def forward(
        self, entry: tuple[Tensor, ...], opened: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(output, states that leave, tensors kept for the backward pass). opened: by `open`."""
        if self.empty:
            batch, _, *rest = self.problem.output_shape()
            dtype, device = self.problem.output_dtype, self.problem.device
            return torch.empty(batch, 0, *rest, dtype=dtype, device=device), entry, ()
        result = self.executor.forward(self.problem, entry, opened)
        return result.output, result.exit, result.saved

    def backward(
        self,
        saved: tuple[Tensor, ...],
        entry: tuple[Tensor, ...],
        grad_output: Tensor,
        grad_exit: tuple[Tensor, ...],
        opened: Any = None,
    ) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...]]:
        """Gradients of the inputs, the parameters and the entering states, in their order.
        opened: by `open_adjoint`."""
        inputs, params = self.problem.inputs, self.problem.params
        if self.empty:
            rows = [x.new_zeros(x.shape[0], 0, *x.shape[2:]) for x in inputs.values()]
            return rows, [torch.zeros_like(x) for x in params.values()], grad_exit
        grads = self.executor.backward(
            self.problem, saved, entry, grad_output, grad_exit, opened=opened
        )
        return (
            [grads.inputs[name] for name in inputs],
            [grads.params[name] for name in params],
            grads.entry,
        )


def executor_of(op: Any, tensors: Sequence[Tensor]) -> Any:
    """The executor that the operator itself would choose for these tensors."""
    double = any(t.dtype == torch.float64 for t in tensors)
    return op.executor(None, tensors[0].device, torch.float64 if double else torch.float32)
