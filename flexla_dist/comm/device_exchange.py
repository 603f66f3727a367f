"""`DeviceExchanger`: the scan over ranks as one kernel that computes, puts, signals and waits.

Every (head, tile) panel goes its own way through the ranks: a rank composes its segments, takes in
the state of the ranks before it, sends what leaves, and then writes the state that enters each of
its segments. No host step is inside; nothing but the result is allocated.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from flexla_dist.comm.device.layout import Layout, Signature
from flexla_dist.comm.device.panels import StateForm
from flexla_dist.comm.device.plan import Place, SpanPlace
from flexla_dist.comm.device.record import OTHER_EXCHANGE, Record, describe, late_rank
from flexla_dist.comm.device.source import DIALECTS, Dialect
from flexla_dist.comm.device.workspace import INTERPRETED, Memory, Workspace, looks_per_second
from flexla_dist.comm.element import Element
from flexla_dist.comm.errors import ExchangeTimeout, TagMismatch
from flexla_dist.comm.heaps import Block, LocalHeap, SymmetricHeap
from flexla_dist.comm.strategies import STRATEGIES
from flexla_dist.comm.tag import Tag
from flexla_dist.errors import ExecutorError, ShardingError

State = tuple[Tensor, ...]
Heads = tuple[int, int]  # the first one of a group of heads, and how many

COMPOSE_FROM = 3  # segments: fewer products wait for the state than composing would take
SETTLE_SECONDS = 0.3  # how long records of other ranks are waited for, once there is one


@dataclass(frozen=True)
class SpanState:
    """Effect of every segment of a span on one state.

    local:  [S, G, HV, *dims] fp32, what each segment leaves behind when zero enters it.
    decay:  [S, G, HV, *ones_or_dims] fp32, elementwise M; None means 1.
    matrix: [S, G, HV, K, K] fp32, dense M on the first state dim; no decay then.
    """

    local: Tensor
    decay: Tensor | None = None
    matrix: Tensor | None = None

    def form(self) -> StateForm:
        """Shape and kind, which all ranks have in common."""
        decay = None if self.decay is None else tuple(self.decay.shape[3:])
        return StateForm(tuple(self.local.shape[3:]), decay, self.matrix is not None)


@dataclass(frozen=True)
class Span:
    """A rank's shard as S segments in order; for a suffix M is transposed, the order stays.

    reset: a document starts inside, so what enters has no effect on what leaves.
    live: how many leading segments (trailing ones in a suffix) see what enters, S if None. With a
        reset, segment `live` starts the document that leaves; if there is none, it starts inside
        the last segment, whose `local` is all that leaves.
    starts: further segments at which documents start, counted like `live`, ascending, after it; the
        last one starts the document that leaves.
    """

    states: tuple[SpanState, ...]
    reset: bool = False
    live: int | None = None
    starts: tuple[int, ...] = ()

    @classmethod
    def of(cls, element: Element) -> Span:
        """An element as a span of one segment; ShardingError for what only the host engine does."""
        if element.log_scaled:
            raise ShardingError(
                "a log-scaled element (its states carry a scale m): the device engine exchanges "
                "affine states only; use the host engine"
            )
        if not isinstance(element.reset, bool):
            raise ShardingError(
                f"the element's reset is a tensor on {element.reset.device}; expected a bool, "
                "which every rank has from the global plan"
            )

        def one(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.contiguous()[None]

        states = tuple(
            SpanState(s.local.contiguous()[None], one(s.decay), one(s.matrix))
            for s in element.states
        )
        return cls(states, element.reset)

    @property
    def segments(self) -> int:
        """S."""
        return self.states[0].local.shape[0]

    def place(self) -> SpanPlace:
        """(reset, live, segments, starts); ShardingError if they do not fit."""
        live = self.segments if self.live is None else self.live
        if not 0 <= live <= self.segments or (not self.reset and live != self.segments):
            raise ShardingError(
                f"a span of {self.segments} segments, reset {self.reset}, has live {live}; "
                "expected 0 to S, and S where no document starts inside"
            )
        bounds = (live, *self.starts, self.segments)
        if self.starts and not all(a < b for a, b in pairwise(bounds)):
            raise ShardingError(
                f"a span of {self.segments} segments has live {live} and starts {self.starts}; "
                "expected ascending numbers between them, and a reset"
            )
        return self.reset, live, self.segments, self.starts


@dataclass
class DeviceExchanger:
    """Exclusive scans over the ranks of a heap.

    heap: symmetric memory; a LocalHeap plays all its virtual ranks in one launch (`prefix_all`).
    strategy: "chain", "log_scan", "hierarchical" or "all_gather".
    nodes: node number of every rank, for "hierarchical"; None: one node.
    timeout: seconds that a program waits for another rank, about.
    dialect: of the verbs; None: the heap's. programs: how many serve a rank; None: one a panel, as
        far as the device holds them. delay_ns: what is added to the way of every message.
    waits: False takes every wait as over, for measurements: results are then wrong.

    An exchange may serve a group of heads alone: the panels of other heads are neither read nor
    written, and the exchanges of the groups together are one of all heads.

    Every method is called by all ranks in the same order, with the same heads, `check` at will.
    Errors of a wait come from `check`, until then results may be NaN. Kernels go to the current
    stream, which the caller orders with others; exchanges of one shape and direction follow each
    other. Nothing here is recorded by autograd.
    """

    heap: SymmetricHeap | LocalHeap
    strategy: str = "chain"
    nodes: tuple[int, ...] | None = None
    timeout: float = 60.0
    dialect: Dialect | None = None
    programs: int | None = None
    delay_ns: int = 0
    waits: bool = True
    workspaces: dict[Signature, Workspace] = field(default_factory=dict, init=False)
    _failed: bool = field(default=False, init=False)
    _looks: float = field(default=0.0, init=False)
    _tags: dict[bool, Tag | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ShardingError(
                f"strategy is {self.strategy!r}, expected one of: {', '.join(STRATEGIES)}"
            )
        self.nodes = (0,) * self.heap.size if self.nodes is None else tuple(self.nodes)
        if len(self.nodes) != self.heap.size:
            raise ShardingError(f"{len(self.nodes)} node numbers for {self.heap.size} ranks")
        if self.dialect is None:
            self.dialect = self.heap.dialect
        if self.dialect not in DIALECTS:
            raise ShardingError(f"dialect is {self.dialect!r}, expected one of {DIALECTS}")
        if (self.heap.device.type == "cuda") == INTERPRETED:
            raise ExecutorError(
                f"a heap on {self.heap.device} with Triton's interpreter "
                f"{'on' if INTERPRETED else 'off'}: kernels run on a GPU, or on the CPU where "
                "TRITON_INTERPRET=1 was set before Triton was imported"
            )

    def prepare(self, span: Span, entry: State | None = None) -> Workspace:
        """Memory and kernel for spans like this one, compiled; all ranks call it together.

        Raises HeapMismatch if ranks prepare different shapes.
        """
        return self._workspace(signature_of(span, entry is not None))

    def prefix(
        self,
        span: Span,
        crossing: Sequence[bool],
        tag: Tag | None = None,
        entry: State | None = None,
        heads: Heads | None = None,
        into: State | None = None,
    ) -> State:
        """The states that enter every segment, [S, G, HV, *dims], from the ranks before.

        crossing: [P - 1], whether a document crosses the cut after each rank; same on all ranks.
        entry: [G, HV, *dims] states that enter where no rank is before; given on all ranks or on
            none. tag: compared with that of the ranks before, TagMismatch from `check`.
        heads: (first, count) of those to exchange, None: all. into: the result of the exchanges of
            other heads, which gets these too and is returned.
        """
        back = None if into is None else [into]
        return self._exchange([span], crossing, tag, entry, False, heads, back)[0]

    def suffix(
        self,
        span: Span,
        crossing: Sequence[bool],
        tag: Tag | None = None,
        entry: State | None = None,
        heads: Heads | None = None,
        into: State | None = None,
    ) -> State:
        """The gradients that leave every segment's end, from the ranks after.

        As `prefix` in reversed order of ranks and segments; the caller transposes M. The result is
        in the span's own order.
        """
        back = None if into is None else [into]
        return self._exchange([span], crossing, tag, entry, True, heads, back)[0]

    def prefix_all(
        self,
        spans: Sequence[Span],
        crossing: Sequence[bool],
        tag: Tag | None = None,
        entry: State | None = None,
        heads: Heads | None = None,
        into: list[State] | None = None,
    ) -> list[State]:
        """`prefix` of all virtual ranks of a LocalHeap in one launch.

        Spans have the same number of segments; where their tensors lie behind each other they are
        used in place, else copied together. entry: the same for every line of ranks.
        """
        return self._exchange(spans, crossing, tag, entry, False, heads, into)

    def suffix_all(
        self,
        spans: Sequence[Span],
        crossing: Sequence[bool],
        tag: Tag | None = None,
        entry: State | None = None,
        heads: Heads | None = None,
        into: list[State] | None = None,
    ) -> list[State]:
        """`suffix` of all virtual ranks of a LocalHeap in one launch."""
        return self._exchange(spans, crossing, tag, entry, True, heads, into)

    def check(self, together: bool = False) -> None:
        """Wait for this device's exchanges; raise on every rank what went wrong on one.

        ExchangeTimeout: a wait expired; TagMismatch: ranks were in different exchanges. The next
        exchange then starts anew: all ranks meet in the heap's barrier first.
        together: all ranks call it, it waits for all, and all raise or none. Otherwise a rank that
            waits for nobody may come here before another one's wait expires, and hear of it later.
        """
        if together:
            self.heap.barrier()
        found = [(w, w.alarms()) for w in self.workspaces.values()]
        words = [word for _, pair in found for word in pair]
        if not words or not torch.cat(words).any().item():
            return
        self._failed = True
        for workspace, pair in found:
            for reverse, word in enumerate(pair):
                if word.item():
                    raise self._error(workspace, bool(reverse))

    def restart(self) -> None:
        """Forget an exchange that failed; all ranks call it, and `prefix` does where it must."""
        self.heap.barrier()
        for workspace in self.workspaces.values():
            workspace.clear()
        self.heap.barrier()
        self._failed = False

    @torch.no_grad()
    def _exchange(
        self,
        spans: Sequence[Span],
        crossing: Sequence[bool],
        tag: Tag | None,
        entry: State | None,
        reverse: bool,
        heads: Heads | None,
        into: list[State] | None,
    ) -> list[State]:
        self._check_spans(spans, crossing)
        width = spans[0].states[0].local.shape[2]
        first, count = check_heads(heads, width)
        signature = signature_of(spans[0], entry is not None)
        check_entry(signature, spans[0], entry)
        for span in spans[1:]:
            if signature_of(span, entry is not None) != signature:
                raise ShardingError("spans of virtual ranks differ in shape or in the kind of M")
        if self._failed:
            self.restart()
        workspace = self._workspace(signature)
        self._tags[reverse] = tag
        cuts, own = tuple(crossing), tuple(span.place() for span in spans)
        plan = workspace.plan((reverse, cuts, own), partial(self._places, cuts, own, reverse))
        given = [
            _arguments(spans, i, entry, (first, count), into) for i in range(len(signature.states))
        ]
        chained = self.strategy == "chain" and any(form.dense for form in signature.states)
        composed = chained and spans[0].segments >= COMPOSE_FROM
        part = None if count == width else (first, count)
        bits = tag_bits(tag, part)
        workspace.launch(plan, given, reverse, composed, bits, (width, first, count))
        out = [arguments["entering"] for arguments in given]
        if len(spans) == 1:
            return [tuple(out)]
        return [tuple(whole[home] for whole in out) for home in range(len(spans))]

    def _places(
        self, crossing: tuple[bool, ...], spans: tuple[SpanPlace, ...], reverse: bool
    ) -> list[Place]:
        """The places of the ranks that this process plays, in scan order."""
        assert self.nodes is not None
        ranks = range(self.heap.size) if isinstance(self.heap, LocalHeap) else [self.heap.rank]
        places = [
            Place.of(rank, home, crossing, self.nodes, span, reverse)
            for home, (rank, span) in enumerate(zip(ranks, spans, strict=True))
        ]
        return places[::-1] if reverse else places

    def _check_spans(self, spans: Sequence[Span], crossing: Sequence[bool]) -> None:
        expected = self.heap.size if isinstance(self.heap, LocalHeap) else 1
        if len(spans) != expected:
            raise ShardingError(
                f"{len(spans)} spans for a heap that plays {expected} rank(s): a LocalHeap wants "
                "prefix_all with a span for every virtual rank, other heaps prefix with one"
            )
        if len(crossing) != self.heap.size - 1:
            raise ShardingError(
                f"crossing has {len(crossing)} entries, expected {self.heap.size - 1}, one for "
                f"every cut between the {self.heap.size} ranks"
            )
        if len({span.segments for span in spans}) > 1:
            raise ShardingError("virtual ranks have different numbers of segments; expected one")
        for span in spans:
            check_span(span, self.heap.device)

    def _workspace(self, signature: Signature) -> Workspace:
        found = self.workspaces.get(signature)
        if found is None:
            found = self.workspaces[signature] = self._make(signature)
        return found

    def _make(self, signature: Signature) -> Workspace:
        assert self.nodes is not None and self.dialect is not None
        staging = self.dialect != "p2p"
        first = Layout.of(signature, self.strategy, self.heap.size, self.nodes, staging)
        layouts = (first, first.moved_by(first.nbytes))
        label = f"exchange by {self.strategy} ({self.dialect}) of {signature}"
        block = self.heap.allocate(label, 2 * first.nbytes)
        blocks = (block,) if isinstance(block, Block) else block.parts
        memory = Memory(tuple(part.local for part in blocks), block.bases)
        if not self._looks:
            self._looks = looks_per_second(self.heap.device)
        looks = min(max(64, int(self.timeout * self._looks)), 2**31 - 1)
        limit = looks if self.waits else -1
        programs = self._programs(sum(first.panels), len(blocks))
        workspace = Workspace.make(
            signature, layouts, memory, self.dialect, programs, limit, self.delay_ns
        )
        if not INTERPRETED:
            apart, one = (False,) * (self.heap.size - 1), ((False, 1, 1, ()),) * len(blocks)
            workspace.warm(workspace.plan("apart", partial(self._places, apart, one, False)))
            self.heap.barrier()
        return workspace

    def _programs(self, panels: int, homes: int) -> int:
        if self.programs is not None:
            return max(1, min(panels, self.programs))
        if self.heap.device.type != "cuda":
            return min(panels, 8)
        processors = torch.cuda.get_device_properties(self.heap.device).multi_processor_count
        return min(panels, max(1, processors // homes))

    def _error(self, workspace: Workspace, reverse: bool) -> ExchangeTimeout | TagMismatch:
        records = _settled(workspace, reverse)
        ranks = getattr(getattr(self.heap, "meeting", None), "ranks", None)
        name = ranks.name if ranks is not None else "rank {}".format
        said = describe(records, self.strategy, "suffix" if reverse else "prefix", name)
        tag = self._tags.get(reverse)
        own = f" (this rank's last one: {tag})" if tag is not None else ""
        if any(record.what == OTHER_EXCHANGE for record in records):
            return TagMismatch(
                f"ranks are in different exchanges{own}:\n{said}\n"
                "all ranks must make the same calls in the same order"
            )
        late = name(late_rank(records))
        return ExchangeTimeout(
            f"{late} did not come in time ({self.timeout:g} s) to an exchange{own}:\n{said}\n"
            f"all ranks must make the same calls; if {late} only computed longer, raise timeout="
        )


def tag_bits(tag: Tag | None, heads: Heads | None = None) -> int:
    """31 bits of a tag and of the heads that are exchanged, the same on all ranks; 0 without."""
    if tag is None and heads is None:
        return 0
    text = str(tag) if heads is None else f"{tag}, heads {heads}"
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def signature_of(span: Span, entry: bool) -> Signature:
    """What a workspace is made for."""
    lanes = prod(span.states[0].local.shape[1:3])
    return Signature(lanes, tuple(state.form() for state in span.states), entry)


def check_span(span: Span, device: torch.device) -> None:
    """ShardingError unless all tensors of a span are fp32, contiguous, here, and fit together."""
    first = span.states[0].local
    for number, state in enumerate(span.states):
        expected: dict[str, tuple[int, ...]] = {"local": (*first.shape[:3], *state.local.shape[3:])}
        if state.decay is not None:
            expected["decay"] = (*first.shape[:3], *state.decay.shape[3:])
        if state.matrix is not None:
            rows = state.local.shape[3]
            expected["matrix"] = (*first.shape[:3], rows, rows)
        for name, shape in expected.items():
            tensor: Tensor = getattr(state, name)
            fine = tensor.dtype == torch.float32 and tensor.is_contiguous()
            if not fine or tensor.device != device or tuple(tensor.shape) != shape:
                raise ShardingError(
                    f"state {number}: {name} is {tensor.dtype} {list(tensor.shape)} on "
                    f"{tensor.device}, contiguous: {tensor.is_contiguous()}; expected contiguous "
                    f"float32 {list(shape)} on {device}"
                )
    if first.shape[0] < 1:
        raise ShardingError("a span has no segments; an empty shard is one identity segment")


def check_heads(heads: Heads | None, width: int) -> Heads:
    """The heads to exchange of `width`; ShardingError if there are no such heads."""
    if heads is None:
        return 0, width
    first, count = heads
    if first < 0 or count < 1 or first + count > width:
        raise ShardingError(
            f"heads are {count} from {first} on, of {width}; expected (first, count) within them"
        )
    return first, count


def check_entry(signature: Signature, span: Span, entry: State | None) -> None:
    """ShardingError unless the entry states fit the span's."""
    if entry is None:
        return
    expected = [(state.local.shape[1:], torch.float32) for state in span.states]
    if [(t.shape, t.dtype) for t in entry] != expected:
        got = [(list(t.shape), t.dtype) for t in entry]
        raise ShardingError(
            f"entry states are {got}, expected {[(list(s), d) for s, d in expected]}"
        )


def _arguments(
    spans: Sequence[Span],
    index: int,
    entry: State | None,
    heads: Heads,
    into: list[State] | None,
) -> dict[str, Tensor]:
    """Tensors of one state by the kernel's names, stacked by rank; the result among them."""
    states = [span.states[index] for span in spans]
    given = {"local": stacked([state.local for state in states], heads)}
    if states[0].decay is not None:
        given["decay"] = stacked([_present(state.decay) for state in states], heads)
    if states[0].matrix is not None:
        given["matrix"] = stacked([_present(state.matrix) for state in states], heads)
    if entry is not None:
        given["entry"] = stacked([entry[index].contiguous()] * len(spans))
    if into is None:
        given["entering"] = torch.empty_like(given["local"])
    else:
        given["entering"] = _again([state[index] for state in into], given["local"])
    return given


def _again(found: list[Tensor], like: Tensor) -> Tensor:
    """The memory of an earlier result, for the exchange of further heads."""
    whole = stacked(found)
    if whole.data_ptr() != found[0].data_ptr() or whole.shape != like.shape:
        raise ShardingError(
            f"into has tensors of shape {list(found[0].shape)}; expected what the exchange of the "
            "heads before returned, as it was returned"
        )
    return whole


def stacked(tensors: Sequence[Tensor], heads: Heads | None = None) -> Tensor:
    """The tensors behind each other in memory: in place if they lie so, else a copy.

    heads: those of dim 2 that matter; others are not copied.
    """
    if len(tensors) == 1:
        return tensors[0]
    first, each = tensors[0], tensors[0].numel() * tensors[0].element_size()
    start, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    in_place = all(
        t.data_ptr() == start + i * each and t.untyped_storage().data_ptr() == storage
        for i, t in enumerate(tensors)
    )
    if in_place:
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    if heads is None or heads[1] == first.shape[2]:
        return torch.stack(list(tensors))
    whole = first.new_empty(len(tensors), *first.shape)
    for target, source in zip(whole, tensors, strict=True):
        target.narrow(2, *heads).copy_(source.narrow(2, *heads))
    return whole


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ShardingError("spans of virtual ranks differ in the kind of M")
    return tensor


def _settled(workspace: Workspace, reverse: bool) -> list[Record]:
    """The records, once no new ones have come for a moment."""
    records: list[Record] = []
    changed = time.monotonic()
    while time.monotonic() - changed < SETTLE_SECONDS:
        found: Any = workspace.records(reverse)
        if found != records:
            records, changed = found, time.monotonic()
        time.sleep(0.01)
    return records
