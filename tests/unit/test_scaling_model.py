"""The discrete-event model: clock, links, programs, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs import report
from scaling_runs.model import __main__ as program
from scaling_runs.model.calibrate import fit
from scaling_runs.model.clusters import PRESETS, Cluster, Link, ModelProblem, get_cluster
from scaling_runs.model.events import Delay, Event, Resource, Simulation, Use
from scaling_runs.model.maps import strategy_map
from scaling_runs.model.predict import simulate
from scaling_runs.model.programs import PROGRAMS
from scaling_runs.model.validate import (
    Compared,
    Verdict,
    judge,
    keep_verdict,
    require_validation,
    sources_hash,
)
from scaling_runs.model.workload import (
    KERNEL_COLUMNS,
    KERNEL_KEY,
    PHASES,
    Bytes,
    Kernels,
    KernelTable,
    Workload,
)
from scaling_runs.rows import RowStore
from scaling_runs.weak_grid import Point

KINDS = ("message", "p2p", "gather", "all_to_all", "device")
QUICK = Cluster("quick", 64, {kind: Link(0.0, 1e30) for kind in KINDS}, {})
SLOW = Cluster("slow", 64, {kind: Link(1.0, 10.0) for kind in KINDS}, {})
KERNELS = Kernels(1.0, 2.0, 3.0, 4.0, 0.0, 0.0)


def load(ranks: int, kernels: Kernels = KERNELS, state: int = 10) -> Workload:
    return Workload(ranks, 1, Bytes(state, state, 0, 0), kernels, 4)


# -- the clock --------------------------------------------------------------------------------


def test_a_resource_serves_in_order() -> None:
    simulation, core, log = Simulation(), Resource(1), []

    def work(name: str, seconds: float):  # type: ignore[no-untyped-def]
        yield Use((core,), seconds)
        log.append((name, simulation.now))

    for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 3.0)):
        simulation.spawn(work(name, seconds))
    assert simulation.run() == 6.0
    assert log == [("a", 2.0), ("b", 3.0), ("c", 6.0)]


def test_turns_are_taken() -> None:
    simulation, core, log = Simulation(), Resource(1), []

    def work(name: str, seconds: float):  # type: ignore[no-untyped-def]
        yield Use((core,), seconds, 1.0)
        log.append((name, simulation.now))

    for name, seconds in (("long", 3.0), ("short", 1.5)):
        simulation.spawn(work(name, seconds))
    assert simulation.run() == 4.5
    assert log == [("short", 3.5), ("long", 4.5)]


def test_two_resources_are_held_together() -> None:
    simulation, left, right, log = Simulation(), Resource(), Resource(2), []

    def work(name: str, *resources: Resource):  # type: ignore[no-untyped-def]
        yield Use(resources, 1.0)
        log.append((name, simulation.now))

    simulation.spawn(work("both", left, right))
    simulation.spawn(work("again", left, right))
    simulation.spawn(work("right", right))
    simulation.run()
    assert log == [("both", 1.0), ("right", 1.0), ("again", 2.0)]


def test_events_wake_those_that_wait_and_those_that_come_late() -> None:
    simulation, event, log = Simulation(), Event(), []

    def wait(delay: float):  # type: ignore[no-untyped-def]
        yield Delay(delay)
        yield event
        log.append(simulation.now)

    def happen():  # type: ignore[no-untyped-def]
        yield Delay(2.0)
        simulation.trigger(event)

    for process in (wait(0.0), happen(), wait(5.0)):
        simulation.spawn(process)
    simulation.run()
    assert log == [2.0, 5.0]


# -- programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("system", PROGRAMS)
def test_programs_end_and_cost_local_work_over_quick_links(system: str, ranks: int) -> None:
    cluster = replace(QUICK, node_size=4) if ranks == 8 else QUICK
    cluster = replace(cluster, between=cluster.inside)
    found = simulate(system, load(ranks), cluster, "fwdbwd").seconds
    local = 2.0 + 4.0
    if system == "lasp":
        local *= ranks
    elif system not in ("ideal_best", "ulysses") and ranks > 1:
        assert local <= found <= local + 1.0 + 3.0
        return
    elif system == "lasp2_naive":
        local += 1.0 + 3.0
    if system in ("fused_hierarchical", "lasp2_naive") and ranks == 1:
        local = 2.0 + 4.0 + 1.0 + 3.0
    assert found == pytest.approx(local)


def test_a_chain_pays_a_message_a_hop() -> None:
    assert simulate("chain", load(4), SLOW, "fwd").seconds == pytest.approx(1 + 3 * 2 + 2)
    assert simulate("lasp", load(4), SLOW, "fwd").seconds == pytest.approx(4 * 2 + 3 * 2)


def test_a_gather_pays_every_element() -> None:
    naive = simulate("lasp2_naive", load(4), SLOW, "fwd").seconds
    assert naive == pytest.approx(1 + 3 * 2 + 2)
    strong = simulate("lasp2", load(4), SLOW, "fwd").seconds
    assert strong < 1 + 2 * 3 * 1.5 + 2


def test_panels_hide_a_chain_behind_summaries() -> None:
    kernels = Kernels(10.0, 20.0, 10.0, 20.0, 0.0, 0.0)
    many = Workload(8, 1, Bytes(64, 64, 0, 0), kernels, 64, groups=64)
    fast = replace(SLOW, inside={"device": Link(0.1, 1e9)})
    floor = simulate("ideal_same_plan", many, fast, "fwd").seconds
    assert simulate("fused_chain", many, fast, "fwd").seconds <= 1.01 * floor
    at_once = simulate("fused_chain", replace(many, groups=1), fast, "fwd").seconds
    assert at_once == pytest.approx(floor + 7 * 0.1, rel=1e-3)


def test_ranks_share_cores() -> None:
    shared = replace(QUICK, cores=2)
    assert simulate("ideal_best", load(4), shared, "fwd").seconds == pytest.approx(4.0)


def test_links_between_nodes_are_used() -> None:
    cluster = Cluster("two", 2, SLOW.inside, {"message": Link(100.0, 1e9)})
    assert simulate("chain", load(4), cluster, "fwd").seconds > 100
    with pytest.raises(ModelProblem, match="no 'gather' link between nodes"):
        simulate("lasp2", load(4), cluster, "fwd")


def test_what_has_no_program_is_refused() -> None:
    with pytest.raises(ModelProblem, match="no program for 'nothing'"):
        simulate("nothing", load(2), QUICK, "fwd")
    dense = replace(load(2), bytes=Bytes(10, 20, 0, 0))
    with pytest.raises(ModelProblem, match="dense M"):
        simulate("zeco", dense, QUICK, "fwd")
    with pytest.raises(ModelProblem, match="presets: h20_ib"):
        get_cluster("h100")


def test_large_clusters_take_seconds() -> None:
    for system in ("fused_chain", "fused_hierarchical", "hierarchical", "lasp2"):
        found = simulate(system, load(128, KERNELS, 8 << 20), PRESETS["h200_ib"], "fwd")
        assert found.seconds > 2.0


def test_every_preset_names_its_sources() -> None:
    for cluster in PRESETS.values():
        assert cluster.sources and cluster.assumptions


def test_a_map_of_strategies() -> None:
    names, best = strategy_map(PRESETS["h200_ib"], True, ranks=(2, 16), states=(1 << 19, 1 << 23))
    assert len(best) == 2 and all(len(row) == 2 for row in best)
    assert all(names[place] != "zeco" for row in best for place in row)


# -- numbers from measurements ----------------------------------------------------------------


def test_a_line_is_found_again() -> None:
    sizes = (1 << 12, 1 << 16, 1 << 20)
    alpha, bandwidth, worst = fit(sizes, [1e-4 + n / 2e9 for n in sizes])
    assert alpha == pytest.approx(1e-4) and bandwidth == pytest.approx(2e9) and worst < 1e-9
    alpha, bandwidth, _ = fit(sizes, [n / 2e9 for n in sizes])
    assert alpha == pytest.approx(0.0, abs=1e-12) and bandwidth == pytest.approx(2e9)


POINT = Point(
    system="chain",
    variant="gla",
    mode="weak",
    placement="barrier",
    direction="fwd",
    P=2,
    T=64,
    total=128,
    B=1,
    H=2,
    K=8,
    V=8,
    dtype="float32",
)


def kernel_rows(world: int, tokens: int, ms: float) -> list[dict[str, str]]:
    shared = {"variant": "gla", "B": "1", "H": "2", "K": "8", "V": "8", "dtype": "float32"}
    shared |= {"world": str(world), "T": str(tokens)}
    return [{**shared, "phase": phase, "median_ms": str(ms)} for phase in PHASES]


def test_kernel_times_are_looked_up() -> None:
    rows = kernel_rows(1, 64, 4.0) + kernel_rows(2, 64, 8.0) + kernel_rows(2, 1024, 100.0)
    assert KernelTable(rows, 2).kernels(POINT).forward == pytest.approx(8e-3)
    assert KernelTable(rows, 1).kernels(POINT).forward == pytest.approx(4e-3)
    longer = KernelTable(rows, 2).kernels(replace(POINT, T=2048))
    assert longer.forward == pytest.approx(0.2) and longer.apply == pytest.approx(0.1)
    with pytest.raises(ModelProblem, match="no kernel times of gla 1x4"):
        KernelTable(rows, 2).kernels(replace(POINT, H=4))


def compared(system: str, ranks: int, measured: float, modelled: float) -> Compared:
    point = replace(POINT, system=system, P=ranks)
    return Compared(point, measured, modelled, (0.95 * measured, 1.05 * measured))


def test_verdicts() -> None:
    good = [compared("chain", 2, 10.0, 11.0), compared("lasp", 2, 10.0, 9.0)]
    order = [compared("chain", 4, 10.0, 30.0), compared("lasp", 4, 20.0, 31.0)]
    assert judge(good + order, cores=2).passed
    assert not judge(order, cores=2).passed
    assert not judge([*good, compared("zeco", 2, 10.0, 13.0)], cores=2).passed
    turned = judge([*good, order[0], compared("lasp", 4, 20.0, 29.0)], cores=2)
    assert not turned.passed and turned.pairs == 1 and "lasp" in turned.wrong_pairs[0]
    close = judge([*good, order[0], compared("lasp", 4, 10.5, 29.0)], cores=2)
    assert close.passed and close.pairs == 0


def on_hosts(chain: float, lasp: float) -> Verdict:
    """A verdict of emulated hosts: modelled times, where the chain was measured quicker."""
    found = [compared("chain", 4, 10.0, chain), compared("lasp", 4, 20.0, lasp)]
    return replace(judge(found, cores=2), emulated=True)


def test_nothing_is_predicted_before_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--predict", "h200_ib", "--ranks", "128", "--results", str(tmp_path)]
    assert program.main(words) == 2
    assert "was not compared with measurements" in capsys.readouterr().err
    keep_verdict(judge([compared("chain", 2, 10.0, 20.0)], cores=2), tmp_path, "cpu")
    assert program.main(words) == 2
    assert "does not reproduce the measurements" in capsys.readouterr().err
    good = judge([compared("chain", 2, 10.0, 10.0)], cores=2)
    keep_verdict(good, tmp_path, "cpu")
    assert program.main(words) == 2
    assert "not compared with measurements on emulated hosts" in capsys.readouterr().err
    keep_verdict(good, tmp_path, "cpu", on_hosts(30.0, 10.0))
    assert program.main(words) == 2
    assert "does not reproduce the measurements (NOT passed" in capsys.readouterr().err
    path = keep_verdict(good, tmp_path, "cpu", on_hosts(10.0, 30.0))
    said = require_validation(tmp_path)
    assert "1 of 1 medians within 20%" in said and "emulated hosts passed" in said
    assert program.main(words) == 2
    assert "no rows of local parts on nvidia_h200" in capsys.readouterr().err
    content = json.loads(path.read_text())
    assert content["sources"] == sources_hash()
    path.write_text(json.dumps({**content, "sources": "older"}))
    with pytest.raises(ModelProblem, match="the model changed"):
        require_validation(tmp_path)


def test_predictions_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = judge([compared("chain", 2, 10.0, 10.0)], cores=2)
    keep_verdict(good, tmp_path, "cpu", on_hosts(10.0, 30.0))
    store = RowStore(tmp_path / "kernels_nvidia_h200.csv", KERNEL_COLUMNS, KERNEL_KEY)
    for row in kernel_rows(1, 64, 4.0):
        store.put({**row, "gpu": "NVIDIA H200", "host": "x"})
    words = ["--predict", "h20_ib", "--ranks", "8,128", "--variants", "gla", "--shapes", "1x2x8x8"]
    words += ["--tokens-per-rank", "64", "--dtype", "float32", "--results", str(tmp_path)]
    assert program.main(words) == 0
    text = capsys.readouterr().out
    assert "modelled, not measured" in text and "fused_hierarchical" in text
    assert report.main(["--results", str(tmp_path), "--no-plots"]) == 0
    page = (tmp_path / "scaling.md").read_text()
    assert "## Modelled" in page and "## Measured" not in page
    row = next(r for r in page.splitlines() if r.startswith("| `fused_chain` | *"))
    assert row.count("*") == 4
    assert "345.3 ms" in page
    lines = (tmp_path / "scaling_summary.csv").read_text().splitlines()[1:]
    places = {tuple(line.split(",")[:2]) for line in lines}
    assert places == {("modelled", "h20_ib"), ("modelled", "h20_ib_slow")}
    assert "## 128 GPUs of the published cluster" in page
    systems = {line.split(",")[2] for line in lines}
    assert "lasp2" in systems and "ulysses" not in systems  # 2 heads, 8 and 128 ranks


def test_a_report_wants_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--results", str(tmp_path)]) == 2
    assert "no rows" in capsys.readouterr().err
