"""The exchange kernel of W virtual ranks in one interpreted launch, against a float64 walk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.comm.device_exchange import DeviceExchanger, Span, SpanState
from flexla_dist.comm.errors import ExchangeTimeout
from flexla_dist.comm.heaps import LocalHeap
from flexla_dist.errors import ShardingError
from flexla_dist.testing.elements import ELEMENT_KINDS, random_element, serial_scan

from .device_exchange_cases import (
    KINDS,
    STRATEGIES,
    TOLERANCE,
    Sizes,
    error_of,
    expected,
    identity_span,
    random_span,
)

# Loop bounds are read from memory; the interpreter makes Python integers of them its own way.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def exchanger(size: int, strategy: str, **settings: Any) -> DeviceExchanger:
    nodes = tuple((rank + 1) // 2 for rank in range(size))  # of one, two, two ... ranks
    return DeviceExchanger(LocalHeap(size, "cpu"), strategy, nodes, timeout=5.0, **settings)


def compare(
    group: DeviceExchanger,
    spans: list[Span],
    crossing: list[bool],
    reverse: bool,
    entry: tuple[torch.Tensor, ...] | None = None,
) -> None:
    scan = group.suffix_all if reverse else group.prefix_all
    found = scan(spans, crossing, entry=entry)
    group.check()
    wanted = expected(spans, crossing, reverse, entry)
    errors = [error_of(a, b) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) <= TOLERANCE, errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_directions(strategy: str, kind: str) -> None:
    g = torch.Generator().manual_seed(len(kind))
    sizes = Sizes(H=1 if kind in ("dense", "two_states") else 2)
    size = 3 if kind == "two_states" else 5
    group = exchanger(size, strategy)
    spans = [random_span(kind, 3, sizes, g) for _ in range(size)]
    spans[1] = identity_span(spans[1])
    compare(group, spans, [True] * (size - 1), reverse=False)
    compare(group, spans, [True] * (size - 1), reverse=True)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*((name, "rows") for name in STRATEGIES), ("chain", "dense"), ("hierarchical", "dense")],
)
def test_documents(strategy: str, kind: str) -> None:
    """Uncrossed cuts, documents that start inside, and NaN that a start must hide."""
    g = torch.Generator().manual_seed(3)
    sizes = Sizes(H=1)
    group = exchanger(4, strategy)
    for reverse in (False, True):
        spans = [random_span(kind, 2, sizes, g) for _ in range(4)]
        compare(group, spans, [True, False, True], reverse)
        for live in (1,) if reverse else (0, 1, 2):
            spans[2] = replace(spans[2], reset=True, live=live)
            compare(group, spans, [True, True, True], reverse)
        hidden = random_span(kind, 2, sizes, g)
        hidden.states[0].local[1 if reverse else 0] = torch.nan
        spans[1 if not reverse else 3] = replace(hidden, reset=True, live=1)
        compare(group, spans, [True, True, True], reverse)
        compare(group, [replace(s, reset=True, live=1) for s in spans], [True] * 3, reverse)


@pytest.mark.parametrize(("strategy", "kind"), [("chain", "dense"), ("log_scan", "rows")])
def test_several_documents_in_a_shard(strategy: str, kind: str) -> None:
    """Documents that lie inside a shard as a whole neither hear of others nor are heard of."""
    g = torch.Generator().manual_seed(12)
    group = exchanger(3, strategy)
    spans = [random_span(kind, 6, Sizes(H=1), g) for _ in range(3)]
    spans[1] = replace(spans[1], reset=True, live=1, starts=(3, 5))
    for reverse in (False, True):
        compare(group, spans, [True, True], reverse)
    spans = [replace(s, reset=True, live=0, starts=(1, 4)) for s in spans]
    compare(group, spans, [True, True], False)
    with pytest.raises(ShardingError, match="ascending numbers"):
        group.prefix_all([replace(s, starts=(4, 1)) for s in spans], [True, True])


@pytest.mark.parametrize("kind", ["columns", "two_states"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_entry(strategy: str, kind: str) -> None:
    """A state given for the start of every line of ranks."""
    g = torch.Generator().manual_seed(4)
    for size in (1, 2):
        group = exchanger(size, strategy)
        spans = [random_span(kind, 2, Sizes(H=1), g) for _ in range(size)]
        entry = tuple(torch.randn(s.local.shape[1:], generator=g) for s in spans[0].states)
        for reverse in (False, True):
            compare(group, spans, [True] * (size - 1), reverse, entry)
        spans[0] = replace(spans[0], reset=True, live=1)
        compare(group, spans, [True] * (size - 1), False, entry)


@pytest.mark.parametrize(
    ("kind", "sizes", "strategy"),
    [
        ("rows", Sizes(G=2, H=1, K=70, V=130), "chain"),
        ("full", Sizes(H=1, K=130, V=3), "log_scan"),
        ("vector", Sizes(H=1, K=2500), "hierarchical"),
        ("dense", Sizes(H=1, K=200, V=40), "chain"),
        ("dense", Sizes(H=1, K=256, V=3), "log_scan"),
    ],
)
def test_sizes(kind: str, sizes: Sizes, strategy: str) -> None:
    """Several tiles in both dims, none of them whole; K up to 256."""
    g = torch.Generator().manual_seed(5)
    group = exchanger(3, strategy)
    compare(group, [random_span(kind, 3, sizes, g) for _ in range(3)], [True, True], False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_crossing_and_segments_may_change(strategy: str) -> None:
    """Slots and credits of an exchange do not depend on who took part in the one before."""
    g = torch.Generator().manual_seed(6)
    group = exchanger(4, strategy, programs=1)
    for number in range(8):
        spans = [random_span("scalar", 1 + number % 3, Sizes(H=2, K=2, V=2), g) for _ in range(4)]
        crossing = (torch.rand(3, generator=g) < 0.6).tolist()
        compare(group, spans, crossing, reverse=number % 4 == 3)


def test_stacked_spans_are_used_in_place() -> None:
    from flexla_dist.comm.device_exchange import stacked

    whole = torch.randn(3, 2, 1, 1, 4, 4)
    assert stacked(list(whole)).data_ptr() == whole.data_ptr()
    copied = stacked([whole[0], whole[2], whole[1]])
    assert torch.equal(copied, whole[[0, 2, 1]])


def test_delay_of_every_message() -> None:
    import time

    g = torch.Generator().manual_seed(7)
    spans = [random_span("scalar", 1, Sizes(H=1), g) for _ in range(3)]
    delay = 0.1
    group = exchanger(3, "chain", delay_ns=int(delay * 1e9))
    group.prepare(spans[0])
    start = time.monotonic()
    compare(group, spans, [True, True], reverse=False)
    assert time.monotonic() - start >= 2 * delay


def test_wait_that_expires_is_told_and_forgotten() -> None:
    """A flag that a rank loses: the launch ends, `check` names the ranks, the next one is right."""
    g = torch.Generator().manual_seed(8)
    spans = [random_span("rows", 2, Sizes(H=1), g) for _ in range(3)]
    group = exchanger(3, "chain")
    group.timeout = 0.2
    workspace = group.prepare(spans[0])
    # The sender believes that epoch 5 lies unread in the slot, so it waits for that to be read.
    word = workspace.layouts[0].sent + 8
    workspace.memory.parts[0][word : word + 8].view(torch.int64).fill_(5)
    group.prefix_all(spans, [True, True])
    with pytest.raises(ExchangeTimeout) as caught:
        group.check()
    assert "rank 0 waited for rank 1 and it to read an earlier message" in str(caught.value)
    assert "panel 0, epoch 1, strategy chain, prefix" in str(caught.value)
    for _ in range(3):
        compare(group, spans, [True, True], reverse=False)


def test_measurements_without_waits() -> None:
    """Nobody waits, and nothing is reported, even where a slot is never given back."""
    g = torch.Generator().manual_seed(11)
    spans = [random_span("rows", 2, Sizes(H=1), g) for _ in range(3)]
    group = exchanger(3, "chain", waits=False)
    workspace = group.prepare(spans[0])
    word = workspace.layouts[0].sent + 8
    workspace.memory.parts[0][word : word + 8].view(torch.int64).fill_(5)
    group.prefix_all(spans, [True, True])
    group.check()


def test_elements_of_the_host_engine() -> None:
    """An element is a span of one segment; what the engine cannot exchange it names."""
    g = torch.Generator().manual_seed(10)
    kinds = [kind for kind in ELEMENT_KINDS if kind != "log_scaled"]
    group = exchanger(3, "log_scan")
    for kind in kinds[-3:]:
        elements = [random_element(kind, g, torch.float32) for _ in range(3)]
        elements[1] = replace(elements[1], reset=True)
        found = group.prefix_all([Span.of(e) for e in elements], [True, True])
        group.check()
        for a, b in zip(found, serial_scan(elements, [True, True]), strict=True):
            assert error_of(tuple(t[0] for t in a), tuple(t.double() for t in b)) <= TOLERANCE
    with pytest.raises(ShardingError, match="log-scaled"):
        Span.of(random_element("log_scaled", g, torch.float32))
    with pytest.raises(ShardingError, match="reset is a tensor"):
        Span.of(replace(elements[0], reset=torch.tensor(True)))
    with pytest.raises(ShardingError, match=r"torch\.float64"):
        doubles = Span.of(random_element("scalar", g))
        group.prefix_all([doubles] * 3, [True, True])


def test_refusals() -> None:
    g = torch.Generator().manual_seed(9)
    group = exchanger(2, "chain")
    span = random_span("rows", 2, Sizes(), g)
    with pytest.raises(ShardingError, match="crossing has 3 entries, expected 1"):
        group.prefix_all([span, span], [True] * 3)
    with pytest.raises(ShardingError, match="prefix_all with a span for every virtual rank"):
        group.prefix(span, [True])
    with pytest.raises(ShardingError, match="expected contiguous float32"):
        wrong = Span((SpanState(span.states[0].local.double(), span.states[0].decay),))
        group.prefix_all([wrong, wrong], [True])
    with pytest.raises(ShardingError, match="has live 1"):
        group.prefix_all([span, replace(span, live=1)], [True])
    with pytest.raises(ShardingError, match="different numbers of segments"):
        group.prefix_all([span, random_span("rows", 3, Sizes(), g)], [True])
    with pytest.raises(ShardingError, match="entry states are"):
        group.prefix_all([span, span], [True], entry=(torch.zeros(1),))
    with pytest.raises(ShardingError, match="at most 256"):
        large = random_span("dense", 1, Sizes(H=1, K=300, V=1), g)
        group.prefix_all([large, large], [True])
    with pytest.raises(ShardingError, match="strategy is 'ring'"):
        exchanger(2, "ring")
