"""Every kernel that the steps of `multi_gpu.sh` launch, as calls and launches to compile.

Contract: a rank stops where states cross ranks (`opened`), once with its own shard and once with a
blank token, from which a rank that has nothing to say learns the shapes; floors and the ring of
LASP do not stop. Of T it matters how it is cut into chunks and segments: short lengths are all
here, and of the long ones the least, as kernels of the others are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexla_dist.comm import nodes_of_size
from flexla_dist.comm.device.layout import Layout, Signature
from flexla_dist.comm.device.panels import StateForm
from flexla_dist.comm.device.plan import Place
from flexla_dist.comm.device.source import Dialect, exchange_source
from flexla_dist.comm.device.workspace import Memory, Workspace
from flexla_dist.comm.device_exchange import Span, SpanState, signature_of
from flexla_dist.compiler.aot import CompileTask, LaunchRecord, describe_call
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from scaling_runs.multi_gpu_sizes import Sizes
from scaling_runs.weak_cases import CHECKED_TOKENS, compiled
from scaling_runs.weak_grid import CallShape

BLANK = 1  # token


@dataclass(frozen=True)
class Call:
    """A call of a variant on one rank; opened: it stops where states cross ranks."""

    variant: str
    shape: CallShape
    dtype: str
    tokens: int
    opened: bool

    def task(self) -> CompileTask:
        """As the compiler takes it."""
        shape, one = self.shape, self.variant == "hgrn"  # its one head is H * V wide
        graphs = compiled(self.variant).graphs
        problem = describe_call(
            graphs,
            batch=shape.B,
            tokens=self.tokens,
            heads=1 if one else shape.H,
            sizes={"K": shape.K, "V": shape.V, "D": shape.H * shape.V},
            dtype=getattr(torch, self.dtype),
        )
        groups = ((0, problem.heads),) if self.opened else ()
        return CompileTask(graphs, problem, groups=groups)

    def signature(self) -> Signature:
        """What the device engine exchanges of it."""
        task = replace(self, opened=True).task()
        executor = Unlaunched(task.graphs)
        opened = executor.open_forward(task.problem, task.problem.zero_state())
        states = []
        for s in opened.spans(-1):
            decay = s.decay
            if decay is not None:
                decay = decay.expand(*s.local.shape[:3], *decay.shape[3:])
            states.append(SpanState(s.local, decay, s.matrix))
        return signature_of(Span(tuple(states)), False)


class Unlaunched(TritonExecutor):
    """Plans calls on tensors without memory; its kernels do nothing."""

    def built(self, direction: str, uneven: frozenset[str]) -> Any:  # type: ignore[override]
        """See `TritonExecutor`."""
        return tuple(
            replace(b, function=_Nothing()) for b in TritonExecutor.built(self, direction, uneven)
        )

    def helper(self, direction: str, name: str, subject: str) -> Any:
        """See `TritonExecutor`."""
        return _Nothing()


class _Nothing:
    def __getitem__(self, grid: Sequence[int]) -> Any:
        return lambda *arguments, **keywords: None


def calls(sizes: Sizes, ranks: int) -> list[Call]:
    """All of them, in the order in which the steps need them."""
    found: dict[Call, None] = {}

    def add(variants: Iterable[str], shape: CallShape, tokens: Iterable[int], *opened: bool):
        for variant in variants:
            for count in tokens:
                for flag in opened:
                    if variant in sizes.compiled:
                        found[Call(variant, shape, sizes.dtype, count, flag)] = None

    one, wide = CallShape.parse(sizes.shape), CallShape.parse(sizes.wide)
    timed, more = sizes.timed, sizes.more_timed
    whole = (min(*sizes.tokens, -(-sizes.long_tokens // ranks)),)
    small = replace(wide, B=min(wide.B, 2))
    short = [CHECKED_TOKENS + 3 * rank for rank in range(ranks)]
    for shape in (wide, one):
        add(timed, shape, (BLANK, *whole), True, False)
    for shape in (small, one):
        add(timed, shape, (BLANK, *short), True, False)
    lengths = [sizes.check_tokens + 3 * rank for rank in range(ranks)]
    checked = (*sizes.leading, *sizes.checked)
    add(checked, one, (BLANK, *lengths), True, False)
    for call in list(_trained(sizes, ranks)):
        found[call] = None
    if one.H % ranks == 0 and "ulysses" in sizes.systems:
        for shape in (wide, one, small):
            fewer = replace(shape, H=shape.H // ranks)
            add(timed, fewer, (sum(short), *whole), False)
    for shape in (wide, one):
        add(more, shape, (BLANK, *whole), True, False)
    add(more, small, (BLANK, *short), True, False)
    return list(found)


def _trained(sizes: Sizes, ranks: int) -> Iterator[Call]:
    shape = CallShape(1, sizes.train_heads, sizes.train_dim, sizes.train_dim)
    for variant in sizes.trained:
        if variant not in sizes.compiled:
            continue
        for tokens, flags in (
            (-(-sizes.train_tokens // ranks), (True,)),
            (BLANK, (True, False)),
            (sizes.train_tokens, (False,)),
        ):
            for opened in flags:
                yield Call(variant, shape, "float32", tokens, opened)


# -- exchanges ------------------------------------------------------------------------------------


class _Noted:
    """Stands for a kernel: notes launches instead of running them."""

    def __init__(self, function: Any, records: dict[str, LaunchRecord], name: str, source: str):
        self.function, self.records, self.name, self.source = function, records, name, source

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return self._note

    def _note(self, *arguments: Any, **keywords: Any) -> None:
        kinds = [str(x.dtype) if hasattr(x, "dtype") else type(x).__name__ for x in arguments]
        key = f"{self.source} {kinds} {sorted(map(str, keywords.items()))}"
        self.records.setdefault(
            key, LaunchRecord("exchange", self.name, self.function, arguments, keywords, key)
        )


def exchange_launches(sizes: Sizes, ranks: int, dialect: Dialect) -> list[LaunchRecord]:
    """The launches by which exchangers of so many ranks warm their kernels, equal ones once."""
    seen: dict[tuple[StateForm, ...], Signature] = {}  # a kernel takes any number of heads
    for call in calls(sizes, ranks):
        if call.opened and call.tokens == BLANK:
            signature = call.signature()
            seen.setdefault(signature.states, signature)
    nodes = nodes_of_size(ranks, sizes.node_size(ranks) or ranks)
    records: dict[str, LaunchRecord] = {}
    for strategy in sizes.strategies:
        for signature in seen.values():
            _note_exchange(signature, strategy, nodes, dialect, records)
    return list(records.values())


def _note_exchange(
    signature: Signature,
    strategy: str,
    nodes: Sequence[int],
    dialect: Dialect,
    records: dict[str, LaunchRecord],
) -> None:
    ranks = len(nodes)
    first = Layout.of(signature, strategy, ranks, nodes, dialect != "p2p")
    memory = Memory((torch.zeros(64, dtype=torch.uint8),), torch.zeros(ranks).long())
    layouts = (first, first.moved_by(first.nbytes))
    programs = min(sum(first.panels), 132)
    space = Workspace.make(signature, layouts, memory, dialect, programs, 1000, 0)
    source = exchange_source(signature, first, dialect)
    space.kernel = _Noted(space.kernel, records, f"{strategy} of {signature}, {dialect}", source)
    place = Place.of(0, 0, (False,) * (ranks - 1), nodes, (False, 1, 1, ()), False)
    space.warm(torch.tensor([place.row()], dtype=torch.int64))
