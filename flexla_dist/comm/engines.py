"""The device engine of one group: a symmetric heap, an exchanger for every strategy, and checks.

Contract: heap and workspaces are made together by all ranks, at the first exchange and at the first
one of new shapes; a later exchange allocates its result alone. On a GPU all exchanges of a group
follow each other on one stream of their own, in the order of the calls, which is the same on every
rank: so layers that run side by side share a workspace, and kernels that wait never fill the GPUs
of two ranks in different orders. That stream goes first where kernels compete for the GPU: other
ranks wait for what it sends. An exchange may come in parts, group of heads by group of heads, each
of which starts after what the current stream has done by then and is waited for by itself. Results
of a wait that expired are NaN until `check` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexla_dist.comm.after_backward import AfterBackward
from flexla_dist.comm.chooser.choose import Choice, choose
from flexla_dist.comm.chooser.links import DEVICE
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.element import Element, State, StateElement
from flexla_dist.comm.errors import ExchangeError, ExchangeTimeout
from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.heaps import SymmetricHeap
from flexla_dist.comm.lookout import Lookout, Waits
from flexla_dist.comm.tag import Tag
from flexla_dist.errors import ShardingError

if TYPE_CHECKING:
    from flexla_dist.comm.device_exchange import DeviceExchanger, Heads, Span

MOST_LOOKS = 2**31 - 1
FIRST = -1  # priority of a stream whose kernels go before others


@dataclass
class Arriving:
    """A state on its way to this rank.

    state: for streams that come after the exchange. waits: for each group of heads, in order, what
    orders the current stream after its exchange; empty where that is over. whole: the states that
    enter every segment.
    """

    state: State
    waits: list[Callable[[], None] | None] = field(default_factory=list)
    whole: State = ()

    def take(self) -> State:
        """The state, for the current stream."""
        self.join()
        return self.state

    def arrive(self, group: int) -> None:
        """Let the current stream go on only after the exchange of a group of heads."""
        if group < len(self.waits):
            wait, self.waits[group] = self.waits[group], None
            if wait is not None:
                wait()

    def join(self) -> None:
        """Let the current stream go on only after the exchange."""
        for group in range(len(self.waits)):
            self.arrive(group)


class KernelWaits(Waits):
    """The waits of this rank's kernels. stop: ends them."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def end(self, error: ExchangeError) -> None:
        """See `Waits`."""
        self._stop()


@dataclass
class DeviceEngine:
    """Exchanges of one rank by kernels; `open_engine.open_engine` makes it.

    heap: of the group. lookout: notices ranks that fail or end, and ends the waits. timeout:
    seconds of a wait. after_backward: checks at the end of a backward pass.
    unchecked: exchanges happened since the last `check`; no_backward: some of them in calls that no
    backward pass follows.
    """

    heap: SymmetricHeap
    timeout: float
    lookout: Lookout = field(init=False)
    waits: KernelWaits = field(init=False)
    after_backward: AfterBackward = field(init=False)
    unchecked: bool = field(default=False, init=False)
    no_backward: bool = field(default=False, init=False)
    _last_tag: Tag | None = field(default=None, init=False)
    _exchangers: dict[tuple, DeviceExchanger] = field(default_factory=dict, init=False)
    _choices: dict[tuple, Choice] = field(default_factory=dict, init=False)
    _side: Any = field(default=None, init=False)
    _rescue: Any = field(default=None, init=False)
    _one: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.waits = KernelWaits(self.stop_waits)
        self.after_backward = AfterBackward(self.check)
        if self.heap.device.type == "cuda":
            self._side = torch.cuda.Stream(self.heap.device, priority=FIRST)
            self._rescue = torch.cuda.Stream(self.heap.device)
            self._one = torch.ones(1, dtype=torch.int64, pin_memory=True)

    def choice(
        self, exchanger: StateExchanger, span: Span, template: State, strategy: str
    ) -> Choice:
        """The strategy for such spans and its predicted seconds.

        exchanger: of the group, with the nodes that count; the first call is collective.
        """
        survey = exchanger.heap_survey(self.heap.device, self.heap.name)
        runs = survey.topology.runs
        forms = tuple((state.local.shape[1:], state.form()) for state in span.states)
        key = (runs, strategy, forms)
        found = self._choices.get(key)
        if found is None:
            setting = survey.setting(Payload.of_element(_one_segment(span), template))
            found = choose({DEVICE: setting}, strategy=strategy, engine=DEVICE)
            self._choices[key] = found
        return found

    def begin(
        self,
        span: Span,
        crossing: Sequence[bool],
        tag: Tag,
        strategy: str,
        runs: Sequence[int],
        *,
        reverse: bool,
        heads: Heads | None = None,
        earlier: Arriving | None = None,
    ) -> Arriving:
        """Start a scan over the ranks; see `DeviceExchanger.prefix` and `suffix`.

        runs: ranks of every node. heads: (first, count) of those to exchange, None: all. earlier:
        what the exchange of the heads before gave; it is completed and returned. The current stream
        is not kept waiting before `Arriving.take` or `arrive`.
        """
        self.lookout.raise_error()
        self._last_tag = tag
        exchanger = self._exchanger(strategy, tuple(runs))
        scan = partial(
            exchanger.suffix if reverse else exchanger.prefix,
            span,
            tuple(crossing),
            tag,
            heads=heads,
            into=None if earlier is None else earlier.whole,
        )
        capturing = self.capturing()
        if capturing:
            _check_known(exchanger, span)
        else:
            self.unchecked = True
            self.lookout.start(self.waits)
        if self._side is None:
            whole = scan()
            self.lookout.raise_error()
            return earlier or Arriving(_first(whole, reverse), whole=whole)
        whole, wait = self._beside(scan, span)
        arriving = earlier or Arriving(_first(whole, reverse), whole=whole)
        arriving.waits.append(wait)
        return arriving

    def _beside(self, scan: Callable[[], State], span: Span) -> tuple[State, Callable[[], None]]:
        """Run a scan on the engine's stream, after what the current stream has done so far; its
        result, and what waits for it."""
        main, side = torch.cuda.current_stream(self.heap.device), self._side
        side.wait_event(main.record_event())
        with torch.cuda.stream(side):
            found = scan()
            done = side.record_event()
        for state in span.states:
            for tensor in (state.local, state.decay, state.matrix):
                if tensor is not None:
                    tensor.record_stream(side)

        def wait() -> None:
            here = torch.cuda.current_stream(self.heap.device)
            here.wait_event(done)
            for tensor in found:
                tensor.record_stream(here)

        return found, wait

    def check(self, *, always: bool = False) -> None:
        """Raise on every rank what went wrong in any exchange since the last check; collective.

        always: even if this process knows of no exchange, as where CUDA graphs were replayed.
        Raises ExchangeTimeout, TagMismatch, after which the next exchange starts anew, and
        RemoteRankError. It waits for the device.
        """
        if not (self.unchecked or always) or self.capturing():
            return
        try:
            self.heap.barrier()
        except ExchangeError:
            self.lookout.raise_error()
            raise
        self.lookout.rest(self.waits)
        self.unchecked = self.no_backward = False
        self.lookout.raise_error()
        failed = []
        for exchanger in self._exchangers.values():
            try:
                exchanger.check()
            except ExchangeError as error:
                failed.append((exchanger, error))
        if not failed:
            return
        cause = self._first_cause(failed)
        for exchanger, _ in failed:
            exchanger.restart()  # all ranks are here: they were told the same
        raise cause

    def _first_cause(self, failed: list[tuple[DeviceExchanger, ExchangeError]]) -> ExchangeError:
        """Of waits that expired in several exchanges: who was late for all that followed."""
        from flexla_dist.comm.device.record import describe, late_rank

        said, records = [], []
        name = self.lookout.name_of
        for exchanger, error in failed:
            if not isinstance(error, ExchangeTimeout):
                return error
            for workspace in exchanger.workspaces.values():
                for reverse, direction in ((False, "prefix"), (True, "suffix")):
                    if found := workspace.records(reverse):
                        records += found
                        said.append(describe(found, exchanger.strategy, direction, name))
        if len(said) < 2:
            return failed[0][1]
        waiting = {record.rank for record in records}
        blamed = [record.peer for record in records if record.peer not in waiting]
        late = name(blamed[0] if blamed else late_rank(records))
        return ExchangeTimeout(
            f"{late} did not come in time ({self.timeout:g} s) to several exchanges (this rank's "
            f"last one: {self._last_tag}):\n" + "\n".join(said) + "\nall ranks must make the same "
            f"calls; if {late} only computed longer, raise timeout="
        )

    def check_after_backward(self) -> None:
        """Check once, when the backward pass that runs now has ended."""
        if not self.capturing():
            self.after_backward.ask()

    def set_timeout(self, seconds: float) -> None:
        """Seconds of a wait, from now on."""
        for exchanger in self._exchangers.values():
            exchanger.timeout = seconds
            for workspace in exchanger.workspaces.values():
                looks = int(workspace.limit * seconds / self.timeout)
                workspace.limit = min(max(64, looks), MOST_LOOKS)
        self.timeout = seconds
        meeting = getattr(self.heap, "meeting", None)
        if meeting is not None:
            meeting.timeout = max(meeting.timeout, seconds_to_meet(seconds))

    def capturing(self) -> bool:
        """Whether the current stream is captured into a CUDA graph."""
        return self._side is not None and torch.cuda.is_current_stream_capturing()

    def stop_waits(self) -> None:
        """End all waits of this rank's kernels; from any thread.

        By copies from pinned memory, on a stream that waits for no kernel.
        """
        device = self.heap.device
        # Else a thread makes a context on the first GPU when its stream is put back.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._set_alarms()

    def _set_alarms(self) -> None:
        for exchanger in list(self._exchangers.values()):
            for workspace in list(exchanger.workspaces.values()):
                for word in workspace.alarms():
                    if self._rescue is None or self._one is None:
                        word.fill_(1)
                        continue
                    with torch.cuda.stream(self._rescue):
                        word.copy_(self._one, non_blocking=True)

    def _exchanger(self, strategy: str, runs: tuple[int, ...]) -> DeviceExchanger:
        from flexla_dist.comm.device_exchange import DeviceExchanger

        key = (strategy, runs if strategy == "hierarchical" else None)
        found = self._exchangers.get(key)
        if found is None:
            nodes = tuple(node for node, run in enumerate(runs) for _ in range(run))
            found = DeviceExchanger(self.heap, strategy, nodes, self.timeout)
            self._exchangers[key] = found
        return found


def seconds_to_meet(timeout: float) -> float:
    """Seconds that ranks wait for each other to check: one may come as late as a wait lasts."""
    return 2 * timeout + 10.0


def span_of(element: Element) -> Span:
    """An element as a span of one segment, its M given for every head."""
    from flexla_dist.comm.device_exchange import Span

    states = tuple(
        s
        if s.decay is None
        else replace(s, decay=s.decay.expand(*s.local.shape[:2], *s.decay.shape[2:]))
        for s in element.states
    )
    return Span.of(replace(element, states=states))


def _one_segment(span: Span) -> Element:
    """An element of the span's shapes."""
    return Element(
        tuple(
            StateElement(
                s.local[0],
                None if s.decay is None else s.decay[0],
                None if s.matrix is None else s.matrix[0],
            )
            for s in span.states
        )
    )


def _first(states: State, reverse: bool) -> State:
    """What enters the segment that is first in the order of the scan."""
    return tuple(t[-1 if reverse else 0] for t in states)


def _check_known(exchanger: DeviceExchanger, span: Span) -> None:
    """ShardingError in a capture if workspace and kernel are still to be made."""
    from flexla_dist.comm.device_exchange import signature_of

    signature = signature_of(span, False)
    if signature not in exchanger.workspaces:
        raise ShardingError(
            f"a CUDA graph is being captured, and no exchange of {signature} has run before: run "
            "the same step once or twice outside of the capture first, on all ranks"
        )
