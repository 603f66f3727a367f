"""The tokens before a shard, as one autograd node.

Contract: every rank gets the `width` rows before its own, from as many predecessors as hold them,
zero before the start of the document; their gradient goes back to each owner. Who sends what
follows from the plan alone. The node is in the graph of every rank and never communicates when
recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.tag import Tag
from flexla_dist.comm.transfer import TransferPlan
from flexla_dist.errors import DoubleBackwardError
from flexla_dist.parallel.recompute import CallRecord


@dataclass(frozen=True)
class HaloCall:
    """What the node captures: the transfer, its place, and where received rows are kept."""

    exchanger: StateExchanger
    transfer: TransferPlan
    tag: Tag
    record: CallRecord
    index: int
    replay: bool


class ShardedHalo(torch.autograd.Function):
    """The rows before x [B, T, ...], as [B, width, ...]; see the module's text."""

    @staticmethod
    def forward(ctx: Any, call: HaloCall, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.call = call
        if call.replay:
            return call.record.halos[call.index].clone()
        with call.exchanger.guard(f"halo ({call.tag})"), _disable_current_modes():
            halo = call.exchanger.transfer(x, call.transfer, call.tag)
        call.record.halos[call.index] = halo
        call.record.open_nodes += any(ctx.needs_input_grad)
        return halo.clone()

    @staticmethod
    def backward(ctx: Any, grad_halo: Tensor) -> tuple[None, None, Tensor]:
        call: HaloCall = ctx.call
        tag = replace(call.tag, direction="backward")
        with call.exchanger.guard(f"gradient of the halo ({tag})"):
            if torch.is_grad_enabled():
                raise DoubleBackwardError(
                    "a second derivative was asked for (create_graph=True); sharded layers have "
                    "first derivatives only"
                )
            grad = call.exchanger.transfer_adjoint(grad_halo, call.transfer, tag)
            call.exchanger.check_after_backward()
        call.record.open_nodes -= 1
        return None, None, grad
