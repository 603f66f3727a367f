"""What a process remembers about one sequence group: its exchanger, its plans, its order of layers.

Contract: everything is reached through the group that the caller passes in. All ranks of a group go
through the same calls in the same order, so counters kept here are equal on all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from flexla_dist.comm.engines import DeviceEngine
from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.heaps import SymmetricHeap
from flexla_dist.comm.open_engine import EngineRefused, open_engine
from flexla_dist.comm.tag import outside_context
from flexla_dist.errors import ShardingError
from flexla_dist.parallel.documents import Offsets
from flexla_dist.parallel.mesh import MeshOrGroup, sequence_group
from flexla_dist.parallel.plan import SequencePlan, make_plan

DEFAULT_TIMEOUT = 60.0
_BASE = ("auto", None)


class GroupRuntime:
    """One process's part in a sequence group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.timeout = DEFAULT_TIMEOUT
        self.shard_calls = 0
        self.sleeping: WeakSet[Any] = WeakSet()
        self._exchangers: dict[tuple[str, int | None], StateExchanger] = {}
        self._plans: dict[int, SequencePlan] = {}
        self._layers = 0
        self._contexts = 0
        self._heap: SymmetricHeap | None = None
        self._engines: dict[torch.device, DeviceEngine | EngineRefused] = {}

    def exchanger(self, strategy: str = "auto", node_size: int | None = None) -> StateExchanger:
        """The group's exchanger, set to a strategy; all of them share one order of operations."""
        key = (strategy, node_size)
        if key not in self._exchangers:
            base = self._exchangers.get(_BASE)
            if base is None:
                base = StateExchanger(self.group, timeout=self.timeout)
                self._exchangers[_BASE] = base
            self._exchangers[key] = base.using(strategy, node_size=node_size)
        return self._exchangers[key]

    def set_timeout(self, timeout: float) -> None:
        """Seconds that a rank waits for a peer at most, for the whole group from now on."""
        if not timeout > 0:
            raise ShardingError(f"timeout is {timeout}, expected a positive number of seconds")
        self.timeout = timeout
        for exchanger in self._exchangers.values():
            exchanger.set_timeout(timeout)
        for engine in self._opened():
            engine.set_timeout(timeout)

    def device_engine(self, device: torch.device) -> DeviceEngine | EngineRefused:
        """The group's engine for this rank's device, or why there is none; collective at its first
        call. A training run has one: its tensors stay on a device."""
        found = self._engines.get(device)
        if found is None:
            try:
                found = open_engine(self.exchanger(), device, self.timeout, self._heap)
            except EngineRefused as refused:
                found = refused
            self._engines[device] = found
        return found

    def _base(self) -> list[StateExchanger]:
        """The exchanger that all others are copies of, if it was made."""
        base = self._exchangers.get(_BASE)
        return [] if base is None else [base]

    def _opened(self) -> list[DeviceEngine]:
        return [e for e in self._engines.values() if isinstance(e, DeviceEngine)]

    def use_heap(self, heap: SymmetricHeap) -> None:
        """Let the device engine work on this heap; before the first exchange."""
        if self._engines:
            raise ShardingError(
                "use_heap came after the group's first exchange by kernels; call it right after "
                "the group is made, on all ranks"
            )
        if (heap.rank, heap.size) != (self.rank, self.size):
            raise ShardingError(
                f"use_heap got a heap of rank {heap.rank} of {heap.size}, expected rank "
                f"{self.rank} of {self.size}: make the heap for this group"
            )
        self._heap = heap

    def check(self, *, always: bool = False) -> None:
        """Raise what went wrong in exchanges that the device does by itself.

        Those by kernels on every rank, see `DeviceEngine.check`; NCCL's see `StateExchanger.check`.
        """
        for exchanger in self._base():
            exchanger.check(ask=always)
        for engine in self._opened():
            engine.check(always=always)

    def check_without_backward(self) -> None:
        """The same where no gradient was wanted, so that no backward pass will check."""
        for exchanger in self._base():
            exchanger.check_without_backward()
        self.check_kernels_without_backward()

    def check_kernels_without_backward(self) -> None:
        """The same for exchanges by kernels alone, unless the caller of many calls checks."""
        for engine in self._opened():
            if engine.no_backward and not engine.after_backward.paused:
                engine.check()

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Context in which an error is told to the other ranks of the group."""
        return nullcontext() if self.size == 1 else self.exchanger().guard(what)

    def next_layer(self) -> int:
        """A number for a layer, in the order in which layers are first called."""
        self._layers += 1
        return self._layers - 1

    def next_context(self) -> int:
        """A number for a sequence_context, in the order in which they are entered."""
        self._contexts += 1
        return self._contexts - 1

    def default_plan(self, tokens: int) -> SequencePlan:
        """The plan outside of any context: nothing packed, shards as long as the ranks' inputs."""
        plan = self._plans.get(tokens)
        if plan is None:
            plan = self.remember_lengths(self.gather_lengths(tokens))
        return plan

    def remember_lengths(self, lengths: tuple[int, ...]) -> SequencePlan:
        """The default plan for inputs of these lengths, from now on. Its number follows from the
        lengths, so that ranks that remember different ones are told so by the first message."""
        tokens = lengths[self.rank]
        plan = self._plans.get(tokens)
        if plan is None or plan.lengths != lengths:
            number = outside_context(zlib.crc32(repr(lengths).encode()))
            plan = self._plans[tokens] = make_plan(self.rank, lengths, micro_batch=number)
        return plan

    def gather_lengths(self, tokens: int) -> tuple[int, ...]:
        """The shard length of every rank."""
        if self.size == 1:
            return (tokens,)
        what = "lengths of the shards, which no sequence_context and no shard_sequence told"
        news = (
            f"The shard length changed on rank {self.rank}, to {tokens} tokens"
            if self._plans and tokens not in self._plans
            else f"Rank {self.rank} was given {tokens} tokens and asks for the others' lengths"
        )
        fix = "give every rank the same lengths= through sequence_context or shard_sequence"
        rows = self.exchanger().gather_integers(what, [tokens], hint=f"{news}: {fix}")
        return tuple(row[0] for row in rows)

    def agreed_plan(
        self, lengths: Sequence[int], starts: Offsets | None, step: int, micro_batch: int
    ) -> SequencePlan:
        """A plan from what this rank was told, once all ranks were told the same."""
        plan = make_plan(self.rank, lengths, starts, step=step, micro_batch=micro_batch)
        if self.size > 1:
            documents = "none" if starts is None else " ".join(map(str, starts))
            fields = ("lengths", "cu_seqlens", "step", "micro_batch", "gradients enabled")
            values = (str(plan.lengths), documents, step, micro_batch, str(torch.is_grad_enabled()))
            self.exchanger().agree("sequence_context", values, fields)
        return plan


def use_heap(mesh: MeshOrGroup, heap: SymmetricHeap) -> None:
    """Exchange states by kernels over this symmetric heap instead of one that is made.

    mesh: the mesh dim over which sequences are cut, or its group. heap: of the same ranks, such as
    `make_heap(group, device, "nvshmem")`. All ranks call it before their first sharded layer.
    Raises ShardingError for a heap of other ranks, or too late.
    """
    runtime_of(sequence_group(mesh)).use_heap(heap)


def check_exchanges(mesh: MeshOrGroup) -> None:
    """Raise what went wrong in exchanges by kernels or over NCCL, which the host does not wait
    for; all ranks call it.

    Backward and `sequence_context` do so by themselves. It is for what they cannot see: replays of
    CUDA graphs, and results of a forward pass that has no backward yet. A failure by kernels is
    raised on every rank; one over NCCL by the ranks that wait, and by others once they hear of it.

    mesh: the mesh dim over which sequences are cut, or its group. Raises ExchangeTimeout, after
    which the next step starts anew (not over NCCL), TagMismatch, RemoteRankError.
    """
    runtime_of(sequence_group(mesh)).check(always=True)


_RUNTIMES: WeakKeyDictionary[ProcessGroup, GroupRuntime] = WeakKeyDictionary()


def runtime_of(group: ProcessGroup, timeout: float | None = None) -> GroupRuntime:
    """The runtime of a group that was passed in; made at first use. timeout: the longest wait."""
    runtime = _RUNTIMES.get(group)
    if runtime is None:
        runtime = _RUNTIMES[group] = GroupRuntime(group)
    if timeout is not None and timeout != runtime.timeout:
        runtime.set_timeout(timeout)
    return runtime
