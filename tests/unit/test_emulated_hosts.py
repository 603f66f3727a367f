"""Emulated hosts without making any: shapes, cables, refusals, the comparison."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs import namespaces
from scaling_runs.emulated import allowed, network
from scaling_runs.emulated.relay import DelayLine
from scaling_runs.emulated.shape import FRAME_BYTES, Shape, rate_of
from scaling_runs.model.calibrate import SIZES, fit_some
from scaling_runs.model.clusters import Cluster, Link, ModelProblem
from scaling_runs.model.emulated import (
    EmulatedRows,
    cluster_of,
    compare_emulated,
    judge_emulated,
    parts_of,
    parts_text,
)
from scaling_runs.model.events import Process, Simulation
from scaling_runs.model.network import Network
from scaling_runs.model.workload import Kernels

SHAPE = Shape(3, 2, 2e8, 1e-3)
PLACE = {
    "host": "x",
    "delay": "relay",
    "hosts": "2",
    "ranks_per_host": "1",
    "rate_mbit": "200",
    "latency_us": "1000",
}


# -- shapes and cables --------------------------------------------------------------------------


def test_ranks_are_told_what_torchrun_tells() -> None:
    told = SHAPE.variables(5, 29500)
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"]) == ("5", "6", "1")
    assert (told["LOCAL_WORLD_SIZE"], told["GROUP_RANK"]) == ("2", "2")
    assert told["MASTER_ADDR"] == SHAPE.address(0) == "10.77.0.1"
    assert SHAPE.name(1) == "host1-200mbit-1000us-3x2"
    assert Shape(2, 1, 2.5e6, 1e-7).name(0) == "host0-2-5mbit-0-1us-2x1"
    assert [SHAPE.host(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((1, 1, 1e9, 0.0), "2 to 64 hosts"),
        ((2, 0, 1e9, 0.0), "at least 1"),
        ((2, 1, 1.0, 0.0), "rate"),
    ],
)
def test_shapes_that_cannot_be(numbers: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Shape(*numbers)


def test_rates() -> None:
    assert rate_of("100mbit") == 1e8 and rate_of("2.5Gbit") == 2.5e9
    for wrong in ("fast", "100", "mbit"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a number with"):
            rate_of(wrong)


def test_a_burst_holds_a_frame() -> None:
    for rate in (1e5, 2e8, 1e10):
        assert Shape(2, 1, rate, 0.0).burst >= 2 * FRAME_BYTES
    assert Shape(2, 1, 1e10, 0.0).burst == 312500


def test_commands_of_cables() -> None:
    assert network.shaping("eth0", SHAPE) == (
        "tc qdisc add dev eth0 root handle 1: tbf rate 200000000bit burst 32000 limit 125000000"
    )
    first, below = network.delaying("eth0", SHAPE)
    assert first == "tc qdisc add dev eth0 root handle 1: netem delay 1000us limit 100000"
    assert below.startswith("tc qdisc add dev eth0 parent 1:1 handle 10: tbf rate 200000000bit ")


def test_frames_leave_in_order_after_the_latency() -> None:
    line = DelayLine(2.0)
    assert line.due is None and line.take(9.0) == []
    line.put(0.0, b"a")
    line.put(1.0, b"b")
    assert line.due == 2.0 and line.take(1.9) == []
    assert line.take(2.5) == [b"a"] and line.due == 3.0
    assert line.take(3.0) == [b"b"] and line.due is None


# -- what a machine refuses ---------------------------------------------------------------------


def stand_ins(folder: Path, **bodies: str) -> None:
    """Commands that are found before those of the system."""
    for name in ("unshare", "nsenter", "ip", "tc"):
        command = folder / name
        command.write_text(f"#!/bin/sh\n{bodies.get(name, 'exit 0')}\n")
        command.chmod(0o755)


def found_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_missing_tool_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allowed.shutil, "which", lambda name, path: None if name == "tc" else name)
    assert namespaces.main(["--check"]) == 2
    said = capsys.readouterr().err
    assert "the command tc is not installed" in said and "iproute2" in said


def test_no_right_to_make_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, unshare='echo "unshare: Operation not permitted" >&2; exit 1')
    found_in(tmp_path, monkeypatch)
    with pytest.raises(allowed.HostsRefused) as why:
        allowed.look()
    said = str(why.value)
    assert "`unshare -n -u` fails: unshare: Operation not permitted" in said
    assert "`unshare -U -r -n -u` fails" in said and "--cap-add NET_ADMIN" in said


def kernel_without(*words: str) -> str:
    """An unshare under which commands with one of these words fail."""
    tests = "".join(f"*{word}*) echo no {word} >&2; exit 2 ;; " for word in words)
    return f'case "$*" in {tests} *) exit 0 ;; esac'


def test_what_the_kernel_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_in(tmp_path, monkeypatch)
    stand_ins(tmp_path, unshare=kernel_without("tbf"))
    with pytest.raises(allowed.HostsRefused, match=r"tbf rate 1gbit .* fails: no tbf"):
        allowed.look()
    stand_ins(tmp_path, unshare=kernel_without("netem"))
    assert allowed.look() == allowed.Allowed(("-n", "-u"), "relay", "no netem")
    with pytest.raises(allowed.HostsRefused, match="netem was asked for and fails: no netem"):
        allowed.look("netem")
    stand_ins(tmp_path, unshare=kernel_without("netem", "tuntap"))
    with pytest.raises(
        allowed.HostsRefused, match=r"no netem.*relay needs /dev/net/tun.*no tuntap"
    ):
        allowed.look()
    stand_ins(tmp_path)
    assert allowed.look().delay == "netem" and allowed.look("relay").delay == "relay"


def test_options() -> None:
    options, own, program = namespaces.parse(["--hosts", "3", "--systems", "chain"])
    assert options.hosts == 3 and own == ["--systems", "chain"] and program == []
    _, own, program = namespaces.parse(["--rate", "1gbit", "--", "python", "x.py", "--hosts", "9"])
    assert own == [] and program == ["python", "x.py", "--hosts", "9"]
    with pytest.raises(SystemExit):
        namespaces.parse(["--systems", "chain", "--", "python", "x.py"])


def test_help_needs_nothing() -> None:
    script = Path(namespaces.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "relay between two TAP devices" in done.stdout


# -- the model ----------------------------------------------------------------------------------


def link_rows(where: str, alpha_us: float, gigabytes: float) -> list[dict[str, str]]:
    kinds = ("message", "p2p", "gather", "all_to_all")
    numbers = {"alpha_us": str(alpha_us), "gigabytes": str(gigabytes)}
    return [{**PLACE, "where": where, "link": kind, **numbers} for kind in kinds]


def system_row(system: str, median: float, **columns: str) -> dict[str, str]:
    spread = {"p20_ms": str(0.98 * median), "p80_ms": str(1.02 * median)}
    call = {"P": "2", "T": "64", "H": "4", "K": "16", "direction": "fwd"}
    parts = parts_text(Kernels(0.010, 0.020, 0.015, 0.030, 1e-4, 2e-4))
    row = {**PLACE, **call, "system": system, "parts_ms": parts, "median_ms": str(median)}
    return {**row, **spread, **columns}


def test_parts_survive_a_cell() -> None:
    parts = Kernels(0.010, 0.020, 0.015, 0.030, 1e-4, 2e-4)
    assert vars(parts_of(parts_text(parts))) == pytest.approx(vars(parts))


def test_a_cluster_has_the_links_of_its_own_network() -> None:
    other = [{**row, "rate_mbit": "1000", "alpha_us": "1"} for row in link_rows("between", 9, 9)]
    links = [*other, *link_rows("between", 2000, 0.025)]
    cluster = cluster_of(system_row("chain", 1.0), links)
    assert cluster.node_size == cluster.sharing == 1 and cluster.ring_waits
    assert cluster.link("message", 0, 1) == Link(pytest.approx(4e-3 / 3), pytest.approx(2.5e7))
    assert cluster.notice(0, 1) == pytest.approx(4e-3 / 3)
    with pytest.raises(ModelProblem, match="no links of 2 emulated hosts of 2 ranks"):
        cluster_of(system_row("chain", 1.0, ranks_per_host="2"), links)


def test_rows_beside_the_model() -> None:
    """A chain of two: 10 ms summary, the message, which has long been awaited, 20 ms local pass on
    the second rank."""
    links = link_rows("between", 2000, 0.025)
    [chain] = compare_emulated([system_row("chain", 32.0)], links)
    assert chain.modelled_ms == pytest.approx(10 + 4 / 3 + 4 * 4 * 16 * 16 / 2.5e7 * 1e3 + 20)
    good = [system_row("chain", 32.0), system_row("ideal_best", 20.0)]
    verdict = judge_emulated(compare_emulated(good, links), cores=2)
    assert verdict.passed and verdict.pairs == 1 and len(verdict.exact) == 2
    assert "on emulated hosts" in verdict.summary()
    crowded = judge_emulated(compare_emulated(good, links), cores=1)
    assert crowded.passed and not crowded.exact and "no median had a core" in crowded.summary()
    turned = [system_row("chain", 20.0), system_row("ideal_best", 32.0)]
    assert not judge_emulated(compare_emulated(turned, links), cores=1).passed
    assert not judge_emulated(compare_emulated(good[:1], links), cores=1).passed


def test_rows_come_back_from_their_files(tmp_path: Path) -> None:
    store = EmulatedRows.of(tmp_path, "cpu")
    assert store.verdict() is None
    for row in (system_row("chain", 32.0), system_row("ideal_best", 20.0)):
        store.systems.put({**row, "cores": "2"})
    for row in link_rows("between", 2000, 0.025):
        store.links.put(row)
    again = EmulatedRows.of(tmp_path, "cpu").verdict()
    assert again is not None and again.passed and again.pairs == 1


def gathered(cluster: Cluster, ranks: int, size: float) -> float:
    simulation = Simulation()
    there = Network(simulation, cluster, ranks)

    def rank() -> Process:
        yield there.gather("all", size)

    for _ in range(ranks):
        simulation.spawn(rank())
    return simulation.run()


def test_gathers_over_nodes() -> None:
    """Latencies count once a step; gloo's steps wait, and half a part waits for a latency."""
    inside, between = {"gather": Link(1.0, 10.0)}, {"gather": Link(5.0, 2.0)}
    ring = Cluster("ring", 2, inside, between)
    assert gathered(ring, 4, 8.0) == 2 * 1.0 + 1 * 5.0 + max(3 * 0.8, 1 * 4.0)
    assert gathered(Cluster("one", 8, inside, {}), 4, 8.0) == 3 * 1.0 + 3 * 0.8
    waits = Cluster("waits", 2, inside, between, ring_waits=True)
    assert gathered(waits, 4, 8.0) == 5.0 + 4.0 + 2 * (5.0 + 2.0)
    assert gathered(waits, 4, 80.0) == 5.0 + 40.0 + 2 * 40.0
    alone = Cluster("hosts", 1, {}, between, ring_waits=True)
    assert gathered(alone, 2, 8.0) == 5.0 + 4.0


def test_fits_by_some_sizes() -> None:
    times = [6e-3 if n < SIZES[-3] else n / 2.5e7 + 1e-3 for n in SIZES[:-1]]
    times.append(9.0)
    alpha, bandwidth, _ = fit_some(SIZES, times)
    assert alpha == 6e-3 and bandwidth == pytest.approx(2.5e7)
