"""Messages between the ranks of one group: posting, bounded waiting, checked headers."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.comm.element import Element, State, element_tensors, with_tensors
from flexla_dist.comm.errors import ExchangeError, TagMismatch
from flexla_dist.comm.links import GroupRanks, all_gather_flat
from flexla_dist.comm.packing import empty_message, header_words, pack, packed_bytes, views
from flexla_dist.comm.stream_works import StreamWorks
from flexla_dist.comm.tag import Header, Kind, Tag, describe_words, same_message
from flexla_dist.comm.watch import Waiting, Watch

Sent = deque[tuple[dist.Work, Tensor, Waiting]]

PENDING_SENDS = 32
PENDING_BYTES = 64 << 20
LEAVE_SECONDS = 5.0
# gloo aborts the process when a message has another size than its receiver expects: messages of
# different sizes are given different tags, so that they never meet; nor do single messages, parts
# of an all-gather, and blocks of an agreement.
MESSAGE_TAGS = 1 << 28
GATHER_TAGS, BLOCK_TAGS = MESSAGE_TAGS, 2 * MESSAGE_TAGS


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Tensors to send to a group rank."""

    rank: int
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Incoming:
    """Tensors of the shapes and dtypes of `like` to receive from a group rank."""

    rank: int
    like: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Message:
    """Received tensors, on the device of what they were asked like, and the reset flag."""

    tensors: tuple[Tensor, ...]
    reset: bool | Tensor


class Channel:
    """Point-to-point messages and all-gathers of one rank, with a checked header on each.

    A send is posted and not waited for: its buffer is kept until it is known to have left, so the
    first rank of a chain goes on computing. Headers are compared at once on the CPU; on a device
    they are copied aside and compared at a later operation, which costs no synchronisation.

    On a device every single message is a batch, even one alone. NCCL puts a plain send on a
    communicator of two ranks, and a batch on that of the group: a send and its receive would never
    meet if one rank had one message to post and the other two. The group's communicator is made by
    all ranks together, so before the first message all of them call `open`.
    """

    def __init__(self, ranks: GroupRanks, watch: Watch) -> None:
        self.ranks = ranks
        self.watch = watch
        self.works = StreamWorks(ranks, watch)
        self._sent: Sent = deque()
        self._sent_bytes = 0
        self._open: set[str] = set()
        at_exit = partial(_leave, self._sent, watch)
        atexit.register(at_exit)
        weakref.finalize(self, _settle, self._sent, watch, at_exit).atexit = False

    def open(self, device: torch.device) -> None:
        """Make what messages about tensors on `device` travel by; all ranks call it together."""
        place = self.ranks.device_for(device)
        if self._on_streams(place) and place.type not in self._open:
            own = torch.zeros(1, dtype=torch.uint8, device=place)
            self._gather("opening of messages", own.new_empty(self.ranks.size, 1), own, GATHER_TAGS)

    def is_open(self, device: torch.device) -> bool:
        """Whether messages about tensors on `device` can be posted by some ranks alone."""
        place = self.ranks.device_for(device)
        return not self._on_streams(place) or place.type in self._open

    def on_streams(self, device: torch.device) -> bool:
        """Whether messages about tensors on `device` are works of a stream."""
        return self._on_streams(self.ranks.device_for(device))

    def exchange(
        self,
        kind: Kind,
        tag: Tag,
        sends: Sequence[Outgoing] = (),
        receives: Sequence[Incoming] = (),
        reset: bool | Tensor = False,
    ) -> list[Message]:
        """Post all sends and receives together, wait for the receives."""
        self._look_back()
        outgoing = [self._packed(kind, tag, out.tensors, reset) for out in sends]
        incoming = [empty_message(item.like, self._device(item.like)) for item in receives]
        sources = [item.rank for item in receives]
        targets = [out.rank for out in sends]
        self._post(
            kind, tag, zip(targets, outgoing, strict=True), zip(sources, incoming, strict=True)
        )
        return [
            self._opened(kind, tag, item, buffer)
            for item, buffer in zip(receives, incoming, strict=True)
        ]

    def send_state(self, rank: int, state: State, tag: Tag) -> None:
        """Post a state to a group rank; returns at once."""
        self.exchange(Kind.STATE, tag, sends=[Outgoing(rank, state)])

    def receive_state(self, rank: int, like: State, tag: Tag) -> State:
        """Wait for the state of a group rank."""
        return self.exchange(Kind.STATE, tag, receives=[Incoming(rank, like)])[0].tensors

    def pass_element(
        self, element: Element, target: int | None, source: int | None, tag: Tag
    ) -> Element | None:
        """Send `element` to `target` and return the one from `source`, of the same structure."""
        tensors = element_tensors(element)
        sends = [] if target is None else [Outgoing(target, tensors)]
        receives = [] if source is None else [Incoming(source, tensors)]
        found = self.exchange(Kind.ELEMENT, tag, sends, receives, element.reset)
        return with_tensors(element, found[0].tensors, found[0].reset) if found else None

    def gather_elements(self, element: Element, tag: Tag) -> list[Element]:
        """The elements of all ranks, in group order."""
        tensors = element_tensors(element)
        messages = self.all_gather(Kind.ELEMENT, tag, tensors, element.reset)
        return [with_tensors(element, m.tensors, m.reset) for m in messages]

    def all_gather(
        self, kind: Kind, tag: Tag, tensors: Sequence[Tensor], reset: bool | Tensor = False
    ) -> list[Message]:
        """One message of the same shapes from every rank, in group order."""
        self._look_back()
        own = self._packed(kind, tag, tensors, reset)
        gathered = torch.empty((self.ranks.size, own.numel()), dtype=torch.uint8, device=own.device)
        what = f"all-gather ({kind.name.lower()}, {tag})"
        self._gather(what, gathered, own, GATHER_TAGS)
        return [
            self._opened(kind, tag, Incoming(rank, tensors), gathered[rank])
            for rank in range(self.ranks.size)
        ]

    def gather_blocks(self, what: str, own: Tensor) -> Tensor:
        """Blocks [P, n] of all ranks, n the same for every agreement; without a message header."""
        gathered = own.new_empty((self.ranks.size, own.numel()))
        self._gather(what, gathered, own, BLOCK_TAGS)
        return gathered

    def _gather(self, what: str, gathered: Tensor, own: Tensor, tags: int) -> None:
        """All-gather; on the CPU of single messages, so that ranks in different ones never meet."""
        group, rank, whole = self.ranks.group, self.ranks.rank, self.ranks.global_ranks
        waiting = Waiting(None, what)
        if self._on_streams(own.device):
            self.works.forget_completed()
            start = partial(all_gather_flat, gathered.view(-1), own, group)
            with self.works.starting(waiting, own.device):
                work = self._start(waiting, start)
            self._finish(work, own.device, waiting)
            self._open.add(own.device.type)
            return
        tag = tags + own.numel() * own.element_size() % MESSAGE_TAGS
        others = [other for other in range(self.ranks.size) if other != rank]
        posts: list[tuple[Any, Tensor, int]] = [(dist.irecv, gathered[o], o) for o in others]
        posts += [(dist.isend, own, other) for other in others]
        works = [
            self._start(waiting, partial(op, buffer, whole[other], group, tag))
            for op, buffer, other in posts
        ]
        gathered[rank].copy_(own)
        for work in works:
            self._finish(work, own.device, waiting)

    def flush(self) -> None:
        """Wait until every posted send has been received and every header compared."""
        self._drain(0, 0)
        self.works.compare_headers(wait=True)

    def _look_back(self) -> None:
        """At what the device was given earlier, without waiting for it."""
        self.works.compare_headers(wait=False)
        self.works.forget_completed()

    def _post(
        self,
        kind: Kind,
        tag: Tag,
        sends: Iterable[tuple[int, Tensor]],
        receives: Iterable[tuple[int, Tensor]],
    ) -> None:
        group, ranks = self.ranks.group, self.ranks.global_ranks
        what = f"{kind.name.lower()} exchange ({tag})"
        posts: list[tuple[Any, Tensor, int]] = [(dist.irecv, t, rank) for rank, t in receives]
        posts += [(dist.isend, t, rank) for rank, t in sends]
        if posts and self._on_streams(posts[0][1].device):
            self._post_batch(what, posts)
            return
        started = []
        for op, buffer, rank in posts:
            waiting = Waiting(rank, what)
            message_tag = buffer.numel() % MESSAGE_TAGS
            work = self._start(waiting, partial(op, buffer, ranks[rank], group, message_tag))
            started.append((op is dist.irecv, work, buffer, waiting))
        for received, work, buffer, waiting in started:
            if received:
                self._finish(work, buffer.device, waiting)
            else:
                self._keep(work, buffer, waiting)

    def _post_batch(self, what: str, posts: Sequence[tuple[Any, Tensor, int]]) -> None:
        """One batch; the stream waits for it unless it only sends."""
        _, first, peer = posts[0]
        if first.device.type not in self._open:
            raise ExchangeError(
                f"{what}: messages on {first.device.type} were not opened; expected all ranks of "
                "the group to call Channel.open before one of them posts a message"
            )
        group, ranks = self.ranks.group, self.ranks.global_ranks
        ops = [dist.P2POp(op, t, ranks[rank], group) for op, t, rank in posts]
        waiting = Waiting(peer, what)
        with self.works.starting(waiting, first.device):
            works = self._start(waiting, partial(dist.batch_isend_irecv, ops))
        if any(op is dist.irecv for op, _, _ in posts):
            for work in works:
                self._finish(work, first.device, waiting)
            return
        for work in works:
            self.works.keep(work, waiting)
        for i, (_, buffer, rank) in enumerate(posts):
            self._keep(works[min(i, len(works) - 1)], buffer, Waiting(rank, what))

    def _on_streams(self, device: torch.device) -> bool:
        """Whether messages on `device` are work of a stream, carried by NCCL or its like."""
        return device.type != "cpu"

    def _start(self, waiting: Waiting, start: Callable[[], Any]) -> Any:
        try:
            return start()
        except RuntimeError as cause:
            self.watch.lost(waiting, cause)

    def _finish(self, work: dist.Work, device: torch.device, waiting: Waiting) -> None:
        if self._on_streams(device):
            self.works.wait(work, waiting)
        else:
            self.watch.wait(work, waiting)

    def _keep(self, work: dist.Work, buffer: Tensor, waiting: Waiting) -> None:
        self._sent.append((work, buffer, waiting))
        self._sent_bytes += buffer.numel()
        if len(self._sent) > PENDING_SENDS or self._sent_bytes > PENDING_BYTES:
            self._drain(PENDING_SENDS // 2, PENDING_BYTES // 2)

    def _drain(self, count: int, size: int) -> None:
        """Wait for the oldest sends until at most `count` of together `size` bytes remain."""
        while self._sent and (len(self._sent) > count or self._sent_bytes > size):
            work, buffer, waiting = self._sent.popleft()
            self._sent_bytes -= buffer.numel()
            self._finish(work, buffer.device, waiting)

    def _device(self, tensors: Sequence[Tensor]) -> torch.device:
        return self.ranks.device_for(tensors[0].device)

    def _packed(
        self, kind: Kind, tag: Tag, tensors: Sequence[Tensor], reset: bool | Tensor
    ) -> Tensor:
        header = Header(kind, tag, reset is True, packed_bytes(tensors))
        buffer = pack(header, tensors, self._device(tensors))
        if isinstance(reset, Tensor):
            header_words(buffer)[6] = reset
        return buffer

    def _opened(self, kind: Kind, tag: Tag, item: Incoming, buffer: Tensor) -> Message:
        expected = Header(kind, tag, False, packed_bytes(item.like))
        words = header_words(buffer)
        sender = self.ranks.name(item.rank)
        reset: bool | Tensor
        if buffer.device.type == "cpu":
            found = words.tolist()
            _compare(self.watch, self.ranks, expected, sender, found)
            reset = bool(found[6])
        else:
            reset = words[6] != 0
            compare = partial(_compare, self.watch, self.ranks, expected, sender)
            self.works.remember_header(words, compare)
        device = item.like[0].device
        tensors = views(buffer, item.like)
        return Message(tuple(t if t.device == device else t.to(device) for t in tensors), reset)


def _compare(
    watch: Watch, ranks: GroupRanks, expected: Header, sender: str, found: list[int]
) -> None:
    """Raise TagMismatch unless a header that arrived is the expected one."""
    if not same_message(found, expected.words()):
        watch.fail(
            TagMismatch(
                f"{ranks.name(ranks.rank)} expected {expected.describe()} from {sender} and got "
                f"{describe_words(found)}; every rank must exchange in the same order"
            ),
            expected.describe(),
        )


def _settle(sent: Sent, watch: Watch, at_exit: Callable[[], None]) -> None:
    """Keep what a discarded channel had sent alive until it has been received."""
    atexit.unregister(at_exit)
    if sent and not watch.failed:
        threading.Thread(target=_finish, args=(sent,), name="flexla-send", daemon=True).start()


def _finish(sent: Sent) -> None:
    with suppress(RuntimeError):
        while sent:
            sent[0][0].wait()
            sent.popleft()


def _leave(sent: Sent, watch: Watch) -> None:
    """At the end of the program, wait a little for what was sent to be received."""
    deadline = time.monotonic() + LEAVE_SECONDS
    with suppress(RuntimeError):
        while sent and not watch.failed:
            left = max(0.01, deadline - time.monotonic())
            sent.popleft()[0].wait(timedelta(seconds=left))
