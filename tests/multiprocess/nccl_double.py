"""A double of NCCL under `torch.distributed`: no GPU, no NCCL, and strict about what NCCL is.

`StreamChannel` takes the path of devices on CPU tensors: gloo carries the bytes, and every call
that NCCL would get is written down. `unfinished` then plays the calls of all ranks as NCCL would:

* a plain send or receive is on the communicator of its two ranks, a batch on that of the group, as
  in `ProcessGroupNCCL::pointToPoint` without eager initialisation;
* the group's communicator is made by a call of all ranks; a batch may be of some ranks after that;
* a rank's calls are done one after the other, each when the peers have come to its counterparts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import flexla_dist.comm.channel as channel_module
from flexla_dist.comm import StateExchanger
from flexla_dist.comm.after_backward import AfterBackward
from flexla_dist.comm.channel import Channel

Message = tuple[str, int]  # "send" or "receive", and the other rank
Call = tuple[str, tuple[Message, ...]]  # "plain", "batch" or "all"
ALL: Call = ("all", ())


class StreamChannel(Channel):
    """A channel that treats CPU tensors as those of a device; its blocks travel as on the CPU."""

    _blocks = False

    def _on_streams(self, device: torch.device) -> bool:
        return not self._blocks

    def gather_blocks(self, what: str, own: Tensor) -> Tensor:
        """As a group with `cpu:gloo,cuda:nccl` does it."""
        self._blocks = True
        try:
            return super().gather_blocks(what, own)
        finally:
            self._blocks = False


def exchanger_on_streams(strategy: str, **options: Any) -> StateExchanger:
    """An exchanger with such a channel."""
    exchanger = StateExchanger(None, strategy, **options)
    exchanger._channel = StreamChannel(exchanger.ranks, exchanger._watch)
    exchanger.after_backward = AfterBackward(exchanger._channel.works.check)
    return exchanger


@contextlib.contextmanager
def recorded(channel: StreamChannel) -> Iterator[list[Call]]:
    """The calls that NCCL would get from this rank inside the block."""
    calls: list[Call] = []
    inside: list[list[Message]] = []

    def single(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, peer: int | None = None, *args: Any, **kwargs: Any) -> Any:
            if not channel._blocks:
                other = next((kwargs[k] for k in ("group_dst", "group_src") if k in kwargs), peer)
                message = (name, int(other))  # type: ignore[arg-type]
                if inside:
                    inside[-1].append(message)
                else:
                    calls.append(("plain", (message,)))
            return original(tensor, peer, *args, **kwargs)

        return call

    def batch(ops: list[dist.P2POp]) -> list[dist.Work]:
        inside.append([])
        try:
            return originals["batch_isend_irecv"](ops)
        finally:
            calls.append(("batch", tuple(inside.pop())))

    def gather(*args: Any, **kwargs: Any) -> Any:
        calls.append(ALL)
        return all_gather(*args, **kwargs)

    names = ("isend", "irecv", "batch_isend_irecv")
    originals = {name: getattr(dist, name) for name in names}
    all_gather = channel_module.all_gather_flat
    found = {
        "isend": single("send", originals["isend"]),
        "irecv": single("receive", originals["irecv"]),
        "batch_isend_irecv": batch,
    }
    _replace(found)
    channel_module.all_gather_flat = gather
    try:
        yield calls
    finally:
        _replace(originals)
        channel_module.all_gather_flat = all_gather


def _replace(functions: dict[str, Callable[..., Any]]) -> None:
    for name, function in functions.items():
        for module in (dist, c10d):  # P2POp compares functions by identity
            setattr(module, name, function)


def unfinished(ranks: list[list[Call]]) -> dict[int, Call]:
    """The calls in which ranks hang for ever; empty if all end."""
    place = [0] * len(ranks)
    left = [list(calls[0][1]) if calls else [] for calls in ranks]
    made = False

    def head(rank: int) -> Call | None:
        return ranks[rank][place[rank]] if place[rank] < len(ranks[rank]) else None

    def advance(rank: int) -> None:
        place[rank] += 1
        following = head(rank)
        left[rank] = list(following[1]) if following else []

    moved = True
    while moved:
        moved = False
        if all(head(rank) == ALL for rank in range(len(ranks))):
            made = moved = True
            for rank in range(len(ranks)):
                advance(rank)
        for rank in range(len(ranks)):
            call = head(rank)
            if call is None or call == ALL or (call[0] == "batch" and not made):
                continue
            for message in list(left[rank]):
                kind, peer = message
                counterpart = ("receive" if kind == "send" else "send", rank)
                other = head(peer)
                if other and other[0] == call[0] and counterpart in left[peer]:
                    left[rank].remove(message)
                    left[peer].remove(counterpart)
                    moved = True
            if not left[rank]:
                advance(rank)
                moved = True
    return {rank: call for rank in range(len(ranks)) if (call := head(rank)) is not None}
