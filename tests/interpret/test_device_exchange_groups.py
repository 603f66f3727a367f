"""An exchange in parts, group of heads by group of heads, has the bits of one of all heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.comm.device_exchange import DeviceExchanger, Heads, Span, tag_bits
from flexla_dist.comm.errors import ExchangeTimeout, TagMismatch
from flexla_dist.comm.heaps import LocalHeap, make_heap
from flexla_dist.comm.tag import Tag
from flexla_dist.errors import ShardingError
from flexla_dist.testing.ranks import run_ranks

from .device_exchange_cases import Sizes, random_span

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

GROUPS: tuple[tuple[Heads, ...], ...] = (((0, 2), (2, 2)), ((1, 1), (0, 1), (2, 2)))
CROSSING = [True, True]


def ranks(strategy: str, **settings: int) -> DeviceExchanger:
    return DeviceExchanger(LocalHeap(3, "cpu"), strategy, (0, 0, 1), timeout=5.0, **settings)


def only(span: Span, groups: tuple[Heads, ...]) -> Span:
    """The span before heads of other groups were computed: they are NaN."""

    def one(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        x = x.clone()
        for head in range(x.shape[2]):
            if not any(first <= head < first + count for first, count in groups):
                x[:, :, head] = torch.nan
        return x

    states = tuple(replace(s, local=one(s.local), decay=one(s.decay), matrix=one(s.matrix))
                   for s in span.states)  # fmt: skip
    return replace(span, states=states)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("chain", "scalar"), ("chain", "dense"), ("all_gather", "rows"), ("all_gather", "two_states")],
)
def test_groups_have_the_bits_of_one(strategy: str, kind: str) -> None:
    """Also with rows of a batch, a reset inside a span, and programs that serve several panels."""
    g = torch.Generator().manual_seed(len(kind))
    sizes = Sizes(G=2 if kind == "scalar" else 1, H=4, K=4, V=3)
    spans = [random_span(kind, 3, sizes, g) for _ in range(3)]
    for reset in (False, True):
        spans[1] = replace(spans[1], reset=reset, live=1 if reset else None)
        for reverse in (False, True):
            whole = ranks(strategy)
            scan = whole.suffix_all if reverse else whole.prefix_all
            wanted = scan(spans, CROSSING)
            whole.check()
            for number, groups in enumerate(GROUPS):
                group = ranks(strategy, programs=2 - number)
                scan = group.suffix_all if reverse else group.prefix_all
                for _ in range(2):  # both parities of the slots
                    found = None
                    for heads in groups:
                        early = [only(span, (heads,)) for span in spans]
                        found = scan(early, CROSSING, heads=heads, into=found)
                    group.check()
                    assert found is not None
                    for a, b in zip(found, wanted, strict=True):
                        for x, y in zip(a, b, strict=True):
                            assert torch.equal(x, y)


def test_a_state_given_for_the_start() -> None:
    g = torch.Generator().manual_seed(2)
    spans = [random_span("columns", 2, Sizes(H=3), g) for _ in range(3)]
    entry = tuple(torch.randn(s.local.shape[1:], generator=g) for s in spans[0].states)
    wanted = ranks("log_scan").prefix_all(spans, CROSSING, entry=entry)
    group = ranks("log_scan")
    found = group.prefix_all(spans, CROSSING, entry=entry, heads=(0, 1))
    found = group.prefix_all(spans, CROSSING, entry=entry, heads=(1, 2), into=found)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, wanted, strict=True))


def test_heads_that_are_not_there_and_other_memory() -> None:
    g = torch.Generator().manual_seed(3)
    spans = [random_span("scalar", 1, Sizes(H=2), g) for _ in range(3)]
    group = ranks("chain")
    for heads in ((-1, 2), (0, 0), (1, 2)):
        with pytest.raises(ShardingError, match=r"expected \(first, count\) within them"):
            group.prefix_all(spans, CROSSING, heads=heads)
    found = group.prefix_all(spans, CROSSING, heads=(0, 1))
    with pytest.raises(ShardingError, match="as it was returned"):
        group.prefix_all(spans, CROSSING, heads=(1, 1), into=found[::-1])


def test_tags_tell_groups_apart() -> None:
    tag = Tag(step=3)
    bits = {tag_bits(None), *(tag_bits(t, h) for t in (None, tag) for h in ((0, 1), (1, 1)))}
    assert len(bits | {tag_bits(tag)}) == 6


# -- between processes ------------------------------------------------------------------------


def in_groups(rank: int, size: int, strategy: str, kind: str) -> bool:
    """Several exchanges in groups behind each other, compared with whole ones."""
    group = DeviceExchanger(make_heap(None, "cpu", "posix_shm"), strategy, timeout=60.0)
    g = torch.Generator().manual_seed(4)
    spans = [random_span(kind, 1 + at, Sizes(H=3, K=3, V=2), g) for at in range(size)]
    crossing, same = [True] * (size - 1), True
    for number in range(4):
        scan = group.suffix if number % 2 else group.prefix
        wanted = scan(spans[rank], crossing, Tag(step=number))
        found = None
        for heads in ((0, 1), (1, 2)):
            found = scan(spans[rank], crossing, Tag(step=number), heads=heads, into=found)
        assert found is not None
        same &= all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    group.check()
    group.heap.close()
    return same


@pytest.mark.parametrize(("strategy", "kind"), [("chain", "dense"), ("all_gather", "rows")])
def test_processes(strategy: str, kind: str) -> None:
    assert all(run_ranks(in_groups, 3, strategy, kind))


def other_groups(rank: int, size: int) -> str:
    group = DeviceExchanger(make_heap(None, "cpu", "posix_shm"), "chain", timeout=0.5)
    g = torch.Generator().manual_seed(5)
    span = random_span("rows", 1, Sizes(H=2), g)
    group.prepare(span)
    group.prefix(span, [True], Tag(), heads=(0, 2) if rank else (0, 1))
    text = ""
    try:
        group.check(together=True)
    except (TagMismatch, ExchangeTimeout) as error:
        text = f"{type(error).__name__}: {error}"
    group.heap.barrier()
    group.heap.close()
    return text


def test_ranks_with_other_groups_are_told() -> None:
    for text in run_ranks(other_groups, 2):
        assert text.startswith("TagMismatch: ranks are in different exchanges"), text
