"""A place of the program that exchanges: one wrapped layer, or one wrapped operator.

Contract: a site numbers its calls, keeps their records, and asks the ranks once for each signature
whether they do the same thing and whether any of them wants a gradient. Nothing in it depends on
local masks or labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.links import nodes_of_size
from flexla_dist.comm.strategies import check_strategy
from flexla_dist.comm.tag import Tag
from flexla_dist.errors import ShardingError
from flexla_dist.parallel.attend import ShardedAttend
from flexla_dist.parallel.context import current_context, current_plan, plan_for
from flexla_dist.parallel.engine import (
    Carrier,
    ExchangePlan,
    HeadGroups,
    check_backend,
    check_groups,
    choose_carrier,
)
from flexla_dist.parallel.halo import HaloCall, ShardedHalo
from flexla_dist.parallel.local_call import Blanks, Finals, LocalCall
from flexla_dist.parallel.recompute import CallRecord, CallRecords, recomputing, refuse_reentrant
from flexla_dist.parallel.runtime import GroupRuntime, runtime_of

EXCHANGES_PER_CALL = 256
State = Tensor | tuple[Tensor, ...]


class Site:
    """See the module's text. name: for messages. strategy, node_size, backend, groups: of the state
    exchange. last_plan: how the last call's states crossed the ranks, None before it."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        strategy: str = "auto",
        node_size: int | None = None,
        timeout: float | None = None,
        backend: str = "auto",
        groups: HeadGroups = None,
    ) -> None:
        check_strategy(strategy)
        check_backend(backend)
        check_groups(groups)
        if node_size is not None:
            nodes_of_size(1, node_size)
        self.group = group
        self.name = name
        self.strategy = strategy
        self.node_size = node_size
        self.backend = backend
        self.groups = groups
        self.last_plan: ExchangePlan | None = None
        self.runtime: GroupRuntime = runtime_of(group, timeout)
        self.records = CallRecords(name)
        self._layer: int | None = None
        self._calls = 0
        self.blanks: Blanks = {}
        self._agreed: dict[tuple, bool] = {}
        self._carriers: dict[tuple, Carrier] = {}

    def copy(self) -> Site:
        """A site of the same group for a copy of the layer; it has calls and records of its own."""
        settings = (self.strategy, self.node_size, None, self.backend, self.groups)
        return Site(self.group, self.name, *settings)

    @property
    def exchanger(self) -> StateExchanger:
        """The group's exchanger with this site's strategy."""
        return self.runtime.exchanger(self.strategy, self.node_size)

    def carrier(
        self, call: LocalCall, inputs: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Carrier:
        """What moves the states of such calls; chosen together by all ranks at the first one."""
        first = next(iter((*inputs.values(), *params.values())))
        dtypes = tuple(t.dtype for t in (*inputs.values(), *params.values()))
        key = (call.op, first.device, dtypes)
        found = self._carriers.get(key)
        if found is None:
            problem = call.bind_blank(inputs, params)
            exchanger, backend = self.exchanger, self.backend
            found = choose_carrier(self.runtime, exchanger, backend, call.op, problem, self.groups)
            self._carriers[key] = found
        return found

    def guard(self) -> AbstractContextManager[None]:
        """Tells the other ranks of an error in this call; not of the exceptions by which
        checkpointing ends a recomputation early."""
        return nullcontext() if recomputing() else self.runtime.guard(self.name)

    def open(self, x: Tensor) -> SequenceExchange:
        """The exchange of one call whose input is x [B, T_local, ...]."""
        if recomputing():
            with self.runtime.guard(self.name):
                record = self.records.find(x, current_plan(self.group))
            return SequenceExchange(self, record, replay=True, device=x.device)
        refuse_reentrant(self.name)
        if x.dim() < 2:
            raise ShardingError(
                f"{self.name}: input has shape {list(x.shape)}, expected [B, T, ...]"
            )
        plan = plan_for(self.runtime, x.shape[1])
        if plan.packed and x.shape[0] != 1:
            raise ShardingError(
                f"{self.name}: cu_seqlens means one packed row, got a batch of {x.shape[0]}; "
                "concatenate the documents into [1, T, ...]"
            )
        if self._layer is None:
            self._layer = self.runtime.next_layer()
        record = self.records.open(plan, self._calls, x)
        self._calls += 1
        return SequenceExchange(self, record, replay=False, device=x.device)

    def tag(self, record: CallRecord, index: int) -> Tag:
        """Place of the index-th exchange of a call."""
        assert self._layer is not None
        call = record.call * EXCHANGES_PER_CALL + index
        return Tag(record.plan.step, record.plan.micro_batch, self._layer, call)

    def gradient_wanted(self, index: int, signature: Mapping[str, Any], local: bool) -> bool:
        """Whether any rank wants a gradient; RankMismatch unless all ranks do the same.

        signature: field and value of all that must be equal on the ranks. They are asked at its
        first use, and again when a gradient is wanted here that no rank wanted before. That must
        happen on all ranks at once, as it does when a model's parameters are unfrozen.
        """
        enabled = torch.is_grad_enabled()
        local = local and enabled
        if self.runtime.size == 1:
            return local
        key = (index, enabled, *signature.values())
        wanted = self._agreed.get(key)
        if wanted is None or (local and not wanted):
            what = f"{self.name}, exchange {index}"
            fields = ("gradients enabled", *signature)
            values = (str(enabled), *(str(value) for value in signature.values()))
            exchanger = self.exchanger
            exchanger.agree(what, values, fields)
            wanted = bool(exchanger.all_reduce_max(what, [int(local)])[0])
            self._agreed[key] = wanted
        return wanted


class SequenceExchange:
    """What a layer gets from outside its own tokens, when these are one rank's shard.

    Made by a wrapped layer for one call and given to its forward as `exchange`.
    """

    def __init__(
        self, site: Site, record: CallRecord, *, replay: bool, device: torch.device
    ) -> None:
        self._site = site
        self._record = record
        self._replay = replay
        self._device = device
        self._exchanges = 0

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Starts [N_local+1] of the local documents, on the CPU; None when nothing is packed."""
        return self._record.plan.cu_seqlens

    @property
    def position_ids(self) -> Tensor:
        """Position [1, T_local] of every local token in its document, on the input's device."""
        return self._record.plan.positions(self._device)

    def convolve_halo(self, x: Tensor, width: int) -> Tensor:
        """The `width` tokens before x [B, T_local, ...], as [B, width, ...].

        Zero before the start of the first local document. The gradient goes back to the ranks that
        own the tokens. A token shift is a halo of width 1.
        """
        site, record = self._site, self._record
        transfer = record.plan.halo(width)
        if x.shape[1] != record.plan.tokens:
            raise ShardingError(
                f"{site.name}: a halo was asked for {x.shape[1]} tokens, expected this shard's "
                f"{record.plan.tokens}"
            )
        index = self._next()
        signature = {
            "halo width": width,
            "shape": (x.shape[0], *x.shape[2:]),
            "dtype": x.dtype,
        }
        if not self._replay:
            wanted = site.gradient_wanted(index, signature, x.requires_grad)
            record.wanted.append(wanted)
        if not transfer.pieces:
            return x.new_zeros(x.shape[0], width, *x.shape[2:])
        call = HaloCall(
            site.exchanger, transfer, site.tag(record, index), record, index, self._replay
        )
        return ShardedHalo.apply(call, _anchor(x, record.wanted[index]), x)

    halo = convolve_halo

    def attend(
        self,
        op: Any,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        initial_state: State | None = None,
        output_final_state: bool | Finals = False,
        executor: str | None = None,
    ) -> Any:
        """The output [B, T_local, HV, V] of a compiled operator, entered by the right state.

        Args:
            op: the compiled operator; inputs, params, scalars by name: the local tokens.
            initial_state: states [N, HV, ...] of all documents (batch rows when unpacked), the same
                on every rank; a document's row is read, and its gradient lives, on the rank that
                owns its first token.
            output_final_state: True or "owner" also returns states [N, HV, ...], a document's row
                on the rank that owns its last token and zero elsewhere; "broadcast": all rows on
                every rank.
            executor: name of the op's executor; None lets the op choose.
        Returns:
            output, or (output, final state) as the operator returns states.
        """
        site, record = self._site, self._record
        finals = _finals(output_final_state)
        initial = _as_tuple(initial_state)
        tensors = (*inputs.values(), *params.values(), *initial)
        double = any(t.dtype == torch.float64 for t in tensors)
        dtype = torch.float64 if double else torch.float32
        engine = op.executor(executor, tensors[0].device, dtype)
        index = self._next()
        if not self._replay:
            signature = _signature(op, engine, inputs, params, scalars, initial, finals)
            signature |= {
                "strategy": site.strategy,
                "node_size": site.node_size,
                "backend": site.backend,
                "groups": site.groups,
                "device": tensors[0].device.type,
            }
            local = any(t.requires_grad for t in tensors)
            record.wanted.append(site.gradient_wanted(index, signature, local))
        call = LocalCall(
            op=op,
            executor=engine,
            input_names=tuple(inputs),
            param_names=tuple(params),
            scalars=dict(scalars),
            plan=record.plan,
            exchanger=site.exchanger if site.runtime.size > 1 else None,
            carrier=None,
            tag=site.tag(record, index),
            record=record,
            index=index,
            replay=self._replay,
            finals=finals,
            blanks=site.blanks,
        )
        anchor = _anchor(tensors[0], record.wanted[index])
        carrier = None if call.exchanger is None else site.carrier(call, inputs, params)
        if carrier is not None and record.plan.communicates:
            call.carrier = carrier
        output, *states = ShardedAttend.apply(call, anchor, *tensors)
        if call.carrier is not None and not self._replay:
            self._after(call.carrier, wanted=record.wanted[index])
        if finals == "none":
            return output
        return output, states[0] if len(states) == 1 else tuple(states)

    def _after(self, carrier: Carrier, wanted: bool) -> None:
        """Note what ran; outside of any context a call without gradients is checked at once."""
        site = self._site
        site.last_plan = carrier.plan
        if wanted and torch.is_grad_enabled():
            return
        carrier.no_backward_follows()
        if current_context(site.group) is None:
            site.runtime.check_kernels_without_backward()

    def _next(self) -> int:
        self._exchanges += 1
        return self._exchanges - 1


def _anchor(like: Tensor, wanted: bool) -> Tensor:
    """A leaf that keeps the node in this rank's graph when any rank wants a gradient."""
    anchor = torch.zeros((), device=like.device)
    return anchor.requires_grad_(wanted and torch.is_grad_enabled())


def _as_tuple(state: State | None) -> tuple[Tensor, ...]:
    if state is None:
        return ()
    return (state,) if isinstance(state, Tensor) else tuple(state)


def _finals(wanted: bool | str) -> Finals:
    known: dict[Any, Finals] = {
        False: "none",
        True: "owner",
        "none": "none",
        "owner": "owner",
        "broadcast": "broadcast",
    }
    if wanted not in known:
        raise ShardingError(
            f"output_final_state is {wanted!r}, expected False, True, 'owner' or 'broadcast'"
        )
    return known[wanted]


def _signature(
    op: Any,
    engine: Any,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    initial: tuple[Tensor, ...],
    finals: Finals,
) -> dict[str, Any]:
    """What must be equal on all ranks, without the number of tokens."""
    signature: dict[str, Any] = {
        "operator": f"{op.spec.name} {op.graphs.structural_hash}",
        "executor": engine.name,
        "final states": finals,
        "initial state": tuple((tuple(t.shape), t.dtype) for t in initial),
    }
    for name, tensor in inputs.items():
        signature[f"input {name} [B, heads, ...]"] = (tensor.shape[0], *tensor.shape[2:])
        signature[f"dtype of {name}"] = tensor.dtype
    for name, tensor in params.items():
        signature[f"parameter {name}"] = (tuple(tensor.shape), tensor.dtype)
    for name, value in scalars.items():
        signature[f"scalar {name}"] = value
    return signature
