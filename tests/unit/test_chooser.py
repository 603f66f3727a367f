"""Links, payloads, the formulas at places where they are known, and the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexla_dist.comm import Element
from flexla_dist.comm.chooser import choose as chooser
from flexla_dist.comm.chooser.choose import Choice, choose, engines_of
from flexla_dist.comm.chooser.cost import STRATEGIES, estimate
from flexla_dist.comm.chooser.links import (
    ASSUMED_LINKS,
    ASSUMED_RATES,
    DEVICE,
    HOST,
    Curve,
    Link,
    Rates,
    assumed_rates,
)
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.presets import PRESETS, described_settings, get_preset
from flexla_dist.comm.chooser.report import report
from flexla_dist.comm.chooser.setting import Setting
from flexla_dist.comm.element import element_bytes, zero_state
from flexla_dist.comm.topology import LINK_CLASSES, NETWORK, SHARED_MEMORY, Topology
from flexla_dist.errors import ShardingError
from flexla_dist.testing.elements import random_element

US = 1e-6
FAST = Rates(0.0, 1e30, 1e30, 64)
MIB = 1 << 20


def setting(
    runs: tuple[int, ...],
    payload: Payload,
    alpha: tuple[float, float] = (1.0, 10.0),
    beta: tuple[float, float] = (0.0, 0.0),
    **more: object,
) -> Setting:
    """Made-up links inside and between nodes, composing for nothing."""
    links = {
        name: Link(Curve.line(a, b), panel_beta=b)
        for name, a, b in zip((SHARED_MEMORY, NETWORK), alpha, beta, strict=True)
    }
    place = Topology(runs, adapters=4, cores=64)
    return Setting(place, payload, links, FAST, **more)  # type: ignore[arg-type]


# -- links and payloads ---------------------------------------------------------------------------


def test_a_curve_is_straight_between_points_and_beyond() -> None:
    curve = Curve(((1000, 2.0), (2000, 4.0), (4000, 5.0)))
    assert [curve.seconds(n) for n in (1000, 1500, 2000, 3000, 6000)] == [2, 3, 4, 4.5, 6]
    assert curve.alpha == 0.0 and curve.beta == 0.0005 and curve.wire(1500) == 3.0
    assert Curve.line(3.0, 0.5).seconds(10) == 8.0


@pytest.mark.parametrize("points", [((1, 1.0),), ((2, 1.0), (1, 1.0)), ((1, -1.0), (2, 1.0))])
def test_points_are_checked(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="bytes ascending"):
        Curve(points)


def test_messages_share_lanes_and_meet_others() -> None:
    link = Link(Curve.line(1.0, 2.0), Curve.line(1.5, 3.0), lanes=2)
    assert link.seconds(10) == 21.0
    assert link.seconds(10, 2) == 1.5 + 30.0
    assert link.seconds(10, 4) == 1.0 + 2 * 30.5


@pytest.mark.parametrize("kind", ["none", "scalar", "rows", "columns", "full", "dense"])
def test_payload_of_an_element(kind: str) -> None:
    element = random_element(kind, torch.Generator().manual_seed(1), torch.float32)
    payload = Payload.of_element(element, zero_state(element))
    assert payload.kind == ("rows" if kind == "columns" else kind)
    assert payload.element == element_bytes(element)
    assert payload.state == 4 * 6 * 20 and payload.panels == 6
    assert payload.apply_flops == (2 * 4 * 120 if kind == "dense" else 0)
    assert payload.compose_flops == (2 * 4 * 96 if kind == "dense" else 0)


def test_payloads_of_several_states_and_of_scaled_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    two: Element = random_element("two_states", generator)
    assert Payload.of_element(two, zero_state(two)).kind == "dense"
    scaled = random_element("log_scaled", generator)
    payload = Payload.of_element(scaled, zero_state(scaled))
    assert payload.kind == "scalar" and payload.transition == 8 * 6


def test_payload_of_heads() -> None:
    payload = Payload.of_heads("dense", 128)
    assert payload.state == payload.transition == 8 * MIB and payload.panels == 256
    assert payload.repeats == 2  # each of two panels of a head carries all of its M
    assert Payload.of_heads("rows", 2, 64, 32).transition == 2 * 64 * 4
    assert Payload.of_heads("rows", 2).panels == 2 * 4 and Payload.of_heads("rows", 2).repeats == 1
    assert Payload.of_heads("dense", 2, 512, 128).panels == 2 * 2  # by columns on the host alone
    with pytest.raises(ValueError, match="kind of M is 'sparse'"):
        Payload.of_heads("sparse", 1)


# -- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "chain", "log_scan", "hierarchical"),
    [
        ((8,), 7, 3, 3),
        ((2,), 1, 1, 1),
        ((3,), 2, 2, 2),
        ((1, 1, 1), 20, 20, 20),
        ((4, 4), 6 + 10, 30, 2 + 10 + 1),
        ((8, 8, 8, 8), 28 + 30, 50, 3 + 30 + 1),
        ((5, 1, 2), 5 + 20, 30, 3 + 20 + 1),
    ],
)
def test_latencies_count_hops(
    runs: tuple[int, ...], chain: int, log_scan: int, hierarchical: int
) -> None:
    """With free bytes and products only the latencies remain: 1 inside a node, 10 between."""
    here = setting(runs, Payload(1024, 4, "scalar"))
    for engine in (HOST, DEVICE):
        found = [estimate(name, engine, here).total for name in STRATEGIES[:3]]
        assert found == pytest.approx([chain, log_scan, hierarchical]), engine


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("engine", [HOST, DEVICE])
def test_one_rank_costs_nothing(strategy: str, engine: str) -> None:
    assert estimate(strategy, engine, setting((1,), Payload(8, 0, "none"))).total == 0.0


def test_bytes_of_the_host_engine() -> None:
    payload = Payload(1000, 500, "full")
    here = setting((4, 4), payload, (0.0, 0.0), (1.0, 10.0))
    found = {name: estimate(name, HOST, here).wire for name in STRATEGIES}
    assert found["chain"] == 6 * 1000 + 10000
    # rounds of distance 1, 2 and 4: 1, 2 and 4 elements leave a node over its 4 ports
    assert found["log_scan"] == 3 * 15000
    assert found["hierarchical"] == 2 * 1500 + 10000 + 3 * 1000
    assert found["all_gather"] == 16 * 15000 / 4
    ring = estimate("all_gather", HOST, replace(here, ring=True)).wire
    assert ring == 4 * 15000 / 4


def test_panels_follow_each_other() -> None:
    """A chain of P ranks and k panels takes P - 1 hops of one panel and k - 1 panels behind it."""
    whole = setting((5,), Payload(6400, 0, "none", panels=1), (0.0, 0.0), (1.0, 1.0))
    parts = replace(whole, payload=Payload(6400, 0, "none", panels=64))
    assert estimate("chain", DEVICE, whole).total == 4 * 6400
    assert estimate("chain", DEVICE, parts).total == 4 * 100 + 63 * 100
    few = replace(parts, rates=replace(FAST, programs=8))
    assert estimate("chain", DEVICE, few).total == 4 * 100 + 63 * 100


def test_products_of_the_host_engine() -> None:
    slow = Rates(0.0, 1e30, 1.0)
    payload = Payload(1, 1, "dense", apply_flops=3.0, compose_flops=5.0)
    here = replace(setting((8,), payload, (0.0, 0.0)), rates=slow)
    found = {name: estimate(name, HOST, here).combine for name in STRATEGIES}
    assert found["chain"] == 6 * 3
    assert found["log_scan"] == found["hierarchical"] == 2 * (3 + 5) + 3 * 3
    assert found["all_gather"] == 7 * 3


def test_ranks_of_a_host_share_its_cores() -> None:
    slow = Rates(0.0, 1e30, 1.0)
    payload = Payload(1, 0, "dense", apply_flops=3.0)
    here = replace(setting((8,), payload, (0.0, 0.0)), rates=slow)
    times = {}
    for cores in (1, 2, 8, 64):
        used = replace(here, topology=replace(here.topology, cores=cores))
        times[cores] = [estimate(name, HOST, used).combine for name in STRATEGIES]
    assert times[64] == times[8] == [18, 15, 15, 21]
    assert times[2] == [18, 60, 60, 42] and times[1] == [18, 120, 120, 84]
    split = replace(here.topology, runs=(4, 4), across=SHARED_MEMORY, cores=2)
    assert replace(here, topology=split).crowd(4) == 4.0


def test_work_hides_what_the_device_engine_waits_for() -> None:
    preset = get_preset("h200-nvlink-8")
    payload = Payload.of_heads("dense", 128)
    for work in (0.0, 2e-5, 1.0):
        here = described_settings(preset, preset.topology(32), payload, work)
        for name in STRATEGIES:
            device, host = estimate(name, DEVICE, here[DEVICE]), estimate(name, HOST, here[HOST])
            assert device.exposed == max(device.total - work, min(device.busy, device.total))
            assert host.exposed == host.total


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 7, 13, 64])
def test_more_state_and_more_ranks_cost_more(name: str, ranks: int) -> None:
    preset = get_preset(name)
    for strategy in STRATEGIES:
        last = 0.0
        for heads in (1, 8, 64, 512):
            here = described_settings(
                preset, preset.topology(ranks), Payload.of_heads("full", heads)
            )
            times = [estimate(strategy, engine, used).total for engine, used in here.items()]
            assert all(t >= 0 for t in times) and sum(times) >= last
            last = sum(times)


def test_unknown_names_have_no_estimate() -> None:
    with pytest.raises(ValueError, match="no estimate for strategy 'tree'"):
        estimate("tree", HOST, setting((2,), Payload(1, 0, "none")))


# -- the choice -----------------------------------------------------------------------------------


def test_what_is_forced_is_obeyed() -> None:
    preset = get_preset("h200-nvlink-8")
    here = described_settings(preset, preset.topology(32), Payload.of_heads("dense", 128))
    assert choose(here).strategy == "hierarchical"
    for name in STRATEGIES:
        for engine in (HOST, DEVICE):
            choice = choose(here, strategy=name, engine=engine)
            assert (choice.strategy, choice.engine) == (name, engine)
            assert "forced" in choice.reason and len(choice.table) == 8
    assert choose(here, strategy="all_gather").engine == HOST  # the cheaper of its two
    assert choose(here, engine=HOST).engine == HOST


def test_refusals_name_what_there_is() -> None:
    here = setting((4,), Payload(MIB, 0, "none"))
    with pytest.raises(ShardingError, match="strategy is 'ring', expected one of: auto, chain"):
        choose(here, strategy="ring")
    with pytest.raises(ShardingError, match="cannot run here, expected one of: chain"):
        choose(here, engine=DEVICE)
    refused = [("chain", HOST), ("log_scan", HOST), ("hierarchical", HOST)]
    assert choose(here, refused=refused).strategy == "all_gather"


def test_equals_go_to_the_one_that_sends_least() -> None:
    here = setting((4,), Payload(MIB, MIB, "full"), alpha=(0.0, 0.0))
    choice = choose(here)
    assert choice.strategy == "chain" and choice.seconds < 1e-20
    assert chooser.NEAR_SECONDS > 0


@pytest.mark.parametrize(("runs", "other"), [((8,), "log_scan"), ((1,) * 8, "chain")])
def test_hierarchical_is_not_chosen_where_it_is_another(runs: tuple[int, ...], other: str) -> None:
    here = setting(runs, Payload(MIB, 0, "none"), beta=(1e-3, 1e-3))
    costs = {e.strategy: e.total for e in choose(here).table}
    assert costs["hierarchical"] == pytest.approx(costs[other])
    assert choose(here).strategy != "hierarchical"
    assert choose(here, strategy="hierarchical").strategy == "hierarchical"


def test_engines_need_gpus_and_a_heap() -> None:
    place = Topology((2,), device="cuda", heap="torch_symm")
    assert engines_of(place) == (HOST, DEVICE)
    assert engines_of(replace(place, heap="none")) == (HOST,)
    assert engines_of(Topology((2,), heap="posix_shm")) == (HOST,)


# -- assumptions and text -------------------------------------------------------------------------


def test_everything_assumed_has_a_source() -> None:
    for carrier in ("gloo", "nccl", DEVICE):
        for name in LINK_CLASSES:
            link = ASSUMED_LINKS[carrier, name]
            assert link.source and not link.measured and link.alpha > 0 and link.beta > 0
    assert all(rates.source and not rates.measured for rates in ASSUMED_RATES.values())
    assert assumed_rates("cuda", "NVIDIA H200") is ASSUMED_RATES["H200"]
    assert assumed_rates("cuda", "NVIDIA H20") is ASSUMED_RATES["H20"]
    assert assumed_rates("cuda", "something new") is ASSUMED_RATES["A100"]


def test_report_shows_everything() -> None:
    preset = get_preset("efa")
    here = described_settings(preset, preset.topology(20), Payload.of_heads("dense", 32), 1e-3)
    choice: Choice = choose(here)
    text = report(here, choice)
    for words in (
        "20 ranks on 3 nodes: 8 + 8 + 4",
        "8 efa ports a node",
        "state 2 MiB, M 2 MiB (dense), 64 panels",
        "work that needs no entering state: 1 ms",
        "assumed: AWS P5",
        f"chosen: {choice.strategy} with the {choice.engine} engine",
    ):
        assert words in text
    assert all(sum(name in line for line in text.splitlines()) >= 2 for name in STRATEGIES)
    assert text.count("\n  *  ") == 1


def test_presets_are_known_by_name() -> None:
    with pytest.raises(ShardingError, match=r"preset is .b200.*of: h200-nvlink-8, h20"):
        get_preset("b200")
    with pytest.raises(ShardingError, match="got 0 ranks"):
        get_preset("efa").topology(0)
