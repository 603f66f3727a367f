"""`sequence_context`: the documents and shards of one micro-batch, agreed by all ranks.

Contract: a context is found by its group, so nested contexts of different groups do not disturb
each other; of one group the innermost counts. Sharded nodes capture the plan when they run
forward, backward and recomputation never look here for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flexla_dist.errors import ShardingError
from flexla_dist.parallel.documents import Offsets, check_lengths, read_cu_seqlens, shard_lengths
from flexla_dist.parallel.mesh import MeshOrGroup, sequence_group
from flexla_dist.parallel.plan import SequencePlan
from flexla_dist.parallel.recompute import refuse_recomputation
from flexla_dist.parallel.runtime import GroupRuntime, runtime_of


class SequenceContext:
    """What `sequence_context` yields: the plan of the micro-batch.

    Where neither documents nor lengths were given the plan is made at first use, from the lengths
    of what the ranks pass to the first sharded layer or to `shard_sequence`.
    """

    def __init__(self, runtime: GroupRuntime, step: int, micro_batch: int) -> None:
        self.runtime = runtime
        self.step = step
        self.micro_batch = micro_batch
        self._plan: SequencePlan | None = None

    @property
    def known_plan(self) -> SequencePlan | None:
        """The plan, None while no lengths are known."""
        return self._plan

    @property
    def plan(self) -> SequencePlan:
        """The plan; ShardingError while no lengths are known."""
        if self._plan is None:
            raise ShardingError(
                "the plan of this sequence_context is not known yet: give cu_seqlens or lengths, "
                "or shard the sequence first"
            )
        return self._plan

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Document starts of the local tokens, on the CPU, or None when nothing is packed."""
        return self.plan.cu_seqlens

    @property
    def position_ids(self) -> Tensor:
        """Position [1, T_local] of every local token in its document, on the CPU."""
        return self.plan.positions()

    def settle(self, lengths: Sequence[int], starts: Offsets | None = None) -> SequencePlan:
        """Fix the plan, the same on all ranks (one small collective)."""
        self._plan = self.runtime.agreed_plan(lengths, starts, self.step, self.micro_batch)
        return self._plan

    def plan_for(self, tokens: int) -> SequencePlan:
        """The plan for a local input of `tokens` tokens; makes it from the inputs if need be."""
        if self._plan is None:
            return self.settle(self.runtime.gather_lengths(tokens))
        return self._plan


_CONTEXTS: ContextVar[tuple[SequenceContext, ...]] = ContextVar("flexla_dist_sequence", default=())


def current_context(group: ProcessGroup) -> SequenceContext | None:
    """The innermost context of a group, None outside of any."""
    for context in reversed(_CONTEXTS.get()):
        if context.runtime.group is group:
            return context
    return None


def current_plan(group: ProcessGroup) -> SequencePlan | None:
    """The plan of the innermost context of a group, None where there is none yet."""
    context = current_context(group)
    return None if context is None else context.known_plan


def plan_for(runtime: GroupRuntime, tokens: int) -> SequencePlan:
    """The plan for a local input of `tokens` tokens: of the context, or the default plan."""
    context = current_context(runtime.group)
    plan = runtime.default_plan(tokens) if context is None else context.plan_for(tokens)
    if plan.tokens != tokens:
        raise ShardingError(
            f"rank {plan.rank} was given {tokens} tokens, expected {plan.tokens}: its "
            f"sequence_context has {plan.describe()}; shard inputs with shard_sequence "
            "or give lengths="
        )
    return plan


@contextmanager
def sequence_context(
    mesh: MeshOrGroup,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    *,
    step: int = 0,
    micro_batch: int | None = None,
) -> Iterator[SequenceContext]:
    """Say how the sequences of a micro-batch are cut and packed, around its forward pass.

    Needed for packed documents and for shards of given lengths; optional otherwise. Backward may
    run inside or outside; several micro-batches may be under way.

    Args:
        mesh: the mesh dim over which sequences are cut, such as mesh["cp"], or its group.
        cu_seqlens: starts [N+1] of the documents of the *whole* packed row (then B = 1), best on
            the CPU: int32 or int64, from 0 to the number of tokens, the same on every rank.
        lengths: tokens of every rank's shard, the same on every rank; some may be 0. Default: as
            even as can be when cu_seqlens tells the total, else whatever the ranks pass in.
        step, micro_batch: numbers that messages carry and errors name; micro_batch counts the
            contexts by default.
    Raises ShardingError for lengths and cu_seqlens that do not fit, RankMismatch on every rank when
    ranks disagree, RemoteRankError when another rank raised; at its end ExchangeTimeout if an
    exchange by kernels failed in a call without gradients.
    """
    group = sequence_group(mesh)
    runtime = runtime_of(group)
    number = runtime.next_context()
    context = SequenceContext(runtime, step, number if micro_batch is None else micro_batch)
    with runtime.guard("sequence_context"):
        refuse_recomputation("sequence_context")
        starts = None if cu_seqlens is None else read_cu_seqlens(cu_seqlens)
        total = None if starts is None else starts[-1]
        if lengths is not None:
            lengths = check_lengths(lengths, runtime.size, total)
        elif total is not None:
            lengths = shard_lengths(total, runtime.size)
        if starts is not None:
            for layer in list(runtime.sleeping):
                layer.wake()
        if lengths is not None:
            context.settle(lengths, starts)
    token = _CONTEXTS.set((*_CONTEXTS.get(), context))
    try:
        yield context
    finally:
        _CONTEXTS.reset(token)
    runtime.check_without_backward()


def position_ids(
    mesh: MeshOrGroup,
    *,
    tokens: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Position [1, T_local] of every local token in its document (in its sequence if unpacked),
    int64.

    tokens: local tokens T_local, needed outside of a sequence_context that knows its lengths.
    """
    runtime = runtime_of(sequence_group(mesh))
    plan = current_plan(runtime.group)
    if plan is None:
        if tokens is None:
            raise ShardingError(
                "position_ids needs tokens= (the local number of tokens) outside of a "
                "sequence_context with cu_seqlens or lengths"
            )
        plan = plan_for(runtime, tokens)
    elif tokens is not None and tokens != plan.tokens:
        raise ShardingError(f"tokens is {tokens}, expected {plan.tokens}: {plan.describe()}")
    return plan.positions("cpu" if device is None else device)
