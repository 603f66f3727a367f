"""Messages by kernels over a symmetric heap, timed: the device engine's links and rates.

A `LocalHeap` plays all its ranks in one launch, so its pair needs no second process; the ranks of
another heap each launch their own part. What a launch costs is left out: a call plays many rounds,
and a second one more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexla_dist.comm.chooser.links import CREDIT, Link, Rates
from flexla_dist.comm.chooser.measure import REPEATS, SIZES, measure_link, today
from flexla_dist.comm.errors import ExchangeTimeout
from flexla_dist.comm.heaps import Block, LocalHeap, SymmetricHeap
from flexla_dist.errors import ShardingError

if TYPE_CHECKING:
    from flexla_dist.comm.heaps.local import LocalBlock

COLUMNS, ROWS = 64, 128  # of a tile: 32 KiB, a panel of heads of 128 x 128
LONG_ROUNDS, SHORT_ROUNDS = 24, 4
STREAMED_BYTES = 1 << 28
STEP_WORDS = 256
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class Pattern:
    """Messages of `size` bytes between some ranks; see `heap_kernels.rounds_of_messages`."""

    size: int
    ranks: int
    count: int = 1
    in_turn: bool = True
    programs: int | None = None

    @property
    def rows(self) -> int:
        """Rows of a tile: a whole one, or a power of two for what is smaller."""
        least = -(-self.size // (4 * COLUMNS))
        return min(ROWS, 1 << max(0, least - 1).bit_length())

    @property
    def panels(self) -> int:
        """Tiles of a message."""
        return -(-self.size // (4 * COLUMNS * self.rows))

    @property
    def flags_bytes(self) -> int:
        """Bytes of an alarm word and of all flags of a part, rounded up."""
        words = 64 + 8 * self.ranks * self.count * 2 * self.panels
        return -(-words // 256) * 256

    @property
    def nbytes(self) -> int:
        """Bytes of a part."""
        tiles = self.ranks * self.count * 2 * self.panels
        return self.flags_bytes + tiles * self.rows * COLUMNS * 4


@dataclass
class HeapTransport:
    """A `Transport` between ranks of a heap; with a LocalHeap one process makes each call.

    programs: of a rank, None for as many as the device holds. rounds: of the shorter and of the
    longer launch. limit: looks at a flag before a wait is given up. Every call makes kernels and
    memory on its first pattern; all ranks of the heap that take part make the same calls.
    """

    heap: SymmetricHeap | LocalHeap
    programs: int | None = None
    rounds: tuple[int, int] = (SHORT_ROUNDS, LONG_ROUNDS)
    limit: int = 1 << 28
    name: str = ""
    _parts: dict[Pattern, _Part] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.heap.dialect != "p2p":
            raise ShardingError(
                f"links of heap {self.heap.name!r} cannot be timed: its peers are not addressed "
                "directly; expected a heap of the p2p dialect"
            )
        if not 0 < self.rounds[0] < self.rounds[1]:
            raise ShardingError(f"rounds is {self.rounds}, expected two ascending numbers")
        self.name = self.name or self.heap.name

    def gather(self, size: int) -> float:
        """See `Transport`: every rank writes to every other one."""
        return self._seconds(Pattern(size, self.heap.size, in_turn=False))

    def there_and_back(self, peer: int, size: int, first: bool) -> float:
        """See `Transport`; rank 0 of the pattern is the first of the pair."""
        return self._seconds(Pattern(size, 2))

    def both_ways(self, peer: int, size: int) -> float:
        """See `Transport`."""
        return self._seconds(Pattern(size, 2, in_turn=False))

    def burst(self, peer: int, size: int, count: int, first: bool) -> float:
        """See `Transport`; the one message back has the size of the others."""
        return self._seconds(Pattern(size, 2, count))

    def panel(self, peer: int, size: int, first: bool) -> float | None:
        """See `Transport`."""
        return self._seconds(Pattern(size, 2, programs=1))

    def _seconds(self, pattern: Pattern) -> float:
        """Of one round: what more rounds take longer."""
        if pattern.programs is None:
            pattern = replace(pattern, programs=self._programs(pattern))
        part = self._parts.get(pattern)
        if part is None:
            part = self._parts[pattern] = _Part.make(self.heap, pattern)
            part.play(self.rounds[0], self.limit)  # compiles
        few, many = (part.play(n, self.limit) for n in self.rounds)
        return max(_LEAST_SECONDS, (many - few) / (self.rounds[1] - self.rounds[0]))

    def _programs(self, pattern: Pattern) -> int:
        """As many as the device engine takes: one a panel, as far as all ranks fit at once."""
        if self.programs is not None:
            return max(1, min(pattern.panels, self.programs))
        played = pattern.ranks if isinstance(self.heap, LocalHeap) else 1
        return min(pattern.panels, max(1, processors(self.heap.device) // played))


@dataclass
class _Part:
    """Memory of one pattern and its launches."""

    heap: SymmetricHeap | LocalHeap
    pattern: Pattern
    block: Block | LocalBlock
    sums: torch.Tensor
    played: int = 0

    @classmethod
    def make(cls, heap: SymmetricHeap | LocalHeap, pattern: Pattern) -> _Part:
        block = heap.allocate(f"timed messages {pattern}", pattern.nbytes)
        if not (block.bases != 0).all():
            raise ShardingError(
                f"links of heap {heap.name!r} cannot be timed: this rank addresses only some of "
                "its peers"
            )
        sums = torch.zeros(pattern.ranks * (pattern.programs or 1), device=heap.device)
        return cls(heap, pattern, block, sums)

    def play(self, rounds: int, limit: int) -> float:
        """Seconds of a launch of so many rounds. Raises ExchangeTimeout where a message did not
        come."""
        from flexla_dist.comm.chooser.heap_kernels import rounds_of_messages
        from flexla_dist.comm.device.workspace import INTERPRETED

        pattern, device = self.pattern, self.heap.device
        alone = isinstance(self.heap, LocalHeap)
        played, first = (pattern.ranks, 0) if alone else (1, getattr(self.heap, "rank", 0))
        programs = pattern.programs or 1
        options: dict[str, Any] = {}
        if not INTERPRETED and alone:
            options["launch_cooperative_grid"] = True

        def launch() -> None:
            rounds_of_messages[(played * programs,)](
                self.block.bases, self.sums, first, pattern.ranks, programs,
                pattern.panels, self.played, rounds, limit, pattern.flags_bytes,
                COUNT=pattern.count, IN_TURN=pattern.in_turn, BR=pattern.rows, BC=COLUMNS,
                **options,
            )  # fmt: skip

        self.heap.barrier()
        seconds = timed(launch, device)
        self.played += rounds
        local = self.block.local if isinstance(self.block, Block) else self.block.parts[0].local
        if local[:8].view(torch.int64).item():
            raise ExchangeTimeout(
                f"a message of {pattern} did not come within {limit} looks; ranks that measure "
                "links of a heap make the same calls"
            )
        return seconds


def measure_heap_link(
    transport: HeapTransport, sizes: Sequence[int] = SIZES, repeats: int = REPEATS
) -> Link:
    """The link between the first two ranks of a heap; both call it, of a LocalHeap its process.

    A credit is a word of the memory that a program sees fastest. Virtual ranks have no other: it
    costs them what an empty message does.
    """
    rank = getattr(transport.heap, "rank", 0)
    found = measure_link(transport, 1 - rank, rank == 0, sizes, repeats)
    alone = isinstance(transport.heap, LocalHeap)
    return replace(found, credit=found.alpha if alone else min(found.alpha, CREDIT))


def measure_kernel_rates(device: torch.device, rounds: tuple[int, int] = (8, 64)) -> Rates:
    """What applying elements costs inside kernels: products of panels in float32 accuracy, one
    program a processor; bytes that all programs read and write; steps in which one copies."""
    from flexla_dist.comm.chooser.heap_kernels import products
    from flexla_dist.comm.device.workspace import INTERPRETED

    count = processors(device)
    width, columns = (16, 16) if INTERPRETED else (ROWS, COLUMNS)
    matrices = torch.eye(width, device=device).expand(count, width, width).contiguous()
    states = torch.ones(count, width, columns, device=device)
    copies = torch.empty_like(states)
    precision = "ieee" if INTERPRETED else "tf32x3"
    options = {} if INTERPRETED else {"num_warps": 8}

    def multiply(number: int, words: int = 0) -> Callable[[], object]:
        return lambda: products[(count,)](
            matrices,
            states,
            copies,
            number,
            words,
            K=width,
            COLUMNS=columns,
            SLICE=min(32, width),
            PREC=precision,
            **options,
        )

    multiply(rounds[0])()  # compiles
    words = width * columns
    each, copied = (_of_a_round(partial(multiply, words=n), rounds, device) for n in (0, words))
    source = torch.zeros((1 << 20) if INTERPRETED else STREAMED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    moved = min(timed(lambda: target.copy_(source), device) for _ in range(4))
    return Rates(
        launch=min(timed(multiply(1), device) for _ in range(3)),
        stream=2.0 * source.nbytes / max(_LEAST_SECONDS, moved),
        flops=2.0 * width * width * columns * count / each,
        programs=count,
        measured=True,
        source=today(),
        step=max(_LEAST_SECONDS, (copied - each) * STEP_WORDS / words),
    )


def _of_a_round(
    call: Callable[[int], Callable[[], object]], rounds: tuple[int, int], device: torch.device
) -> float:
    """Seconds of one round, from calls that play few and many."""
    few, many = (min(timed(call(n), device) for _ in range(3)) for n in rounds)
    return max(_LEAST_SECONDS, (many - few) / (rounds[1] - rounds[0]))


def processors(device: torch.device) -> int:
    """Programs that run at once: multiprocessors of a GPU; 8 in the interpreter, one by one."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call on the device: by events on a GPU, else by the clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return 1e-3 * begin_event.elapsed_time(end_event)
