"""Predictions for virtual ranks of one device beside measured rows: the arithmetic."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flexla_dist.comm.chooser.links import ASSUMED_RATES, Curve, Link, Rates
from flexla_dist.comm.chooser.payload import Payload
from scaling_runs import local_exchange
from scaling_runs.model import __main__ as program
from scaling_runs.model.clusters import ModelProblem
from scaling_runs.model.local_heap import (
    Device,
    compare_alone,
    compare_whole,
    exchange_rows,
    kind_of,
)
from scaling_runs.rows import RowStore
from scaling_runs.virtual_ranks import COLUMNS, KEY

# A hop of a panel is 2 us, a credit 0.5 us, and nothing else takes time: no wire, no products, no
# waves.
ALPHA = Curve.line(2e-6, 0.0)
LINK = Link(ALPHA, ALPHA, measured=True, source="here", credit=0.5e-6)
RATES = Rates(1e-6, 1e30, 1e30, 1 << 20, True, "here", 1e-15)
DEVICE = Device(LINK, RATES)


def exchange(strategy: str, W: int, median: float, apart: float) -> dict[str, str]:
    row = {"kind": "scalar", "heads": "1", "K": "64", "W": str(W), "strategy": strategy}
    return {**row, "median_us": str(median), "apart_us": str(apart)}


def call(impl: str, ms: float, delay: float = 0, direction: str = "fwd") -> dict[str, str]:
    shape = {"B": "1", "T": "64", "H": "1", "K": "64", "V": "64", "dtype": "bfloat16", "W": "4"}
    names = {"gpu": "x", "variant": "simple_gla", "direction": direction, "strategy": "chain"}
    return {**names, **shape, "impl": impl, "delay_us": str(delay), "median_ms": str(ms)}


def test_what_exchanges_add_is_compared() -> None:
    rows = [exchange("chain", 4, 13.0, 6.0), exchange("chain", 8, 21.0, 6.0)]
    first, second = compare_alone(rows, DEVICE)
    assert first["added_us"] == 7.0 and first["predicted_us"] == pytest.approx(3 * 2.0 + 2 * 0.5)
    assert first["ratio"] == pytest.approx(1.0) and first["whole_ratio"] == pytest.approx(1.0)
    assert second["predicted_us"] == pytest.approx(15.0) and second["ratio"] == pytest.approx(1.0)
    [nothing] = compare_alone([exchange("chain", 4, 5.0, 6.0)], DEVICE)
    assert nothing["ratio"] is None


def test_whole_calls_lie_in_a_range() -> None:
    """Three hops of 2 us and two credits, hidden or not; with a delay hops of 32 us and the same
    credits, twice there and back."""
    rows = [call("ideal_same_plan", 1.0), call("ours", 1.003), call("ours", 1.2, 30)]
    rows += [call("ideal_best", 0.5)]
    rows += [call("ideal_same_plan", 2.0, 0, "fwdbwd"), call("ours", 1.5, 0, "fwdbwd")]
    inside, beyond, below = compare_whole(rows, DEVICE)
    assert inside["exposed_us"] == pytest.approx(7.0) and inside["ratio"] == 1.0
    assert inside["hidden_us"] == pytest.approx(0.0) and inside["added_us"] == pytest.approx(3.0)
    assert beyond["exposed_us"] == pytest.approx(97.0)
    assert beyond["ratio"] == pytest.approx(1.097 / 1.2)
    assert below["exposed_us"] == pytest.approx(14.0) and below["ratio"] == pytest.approx(2.0 / 1.5)


def test_ranks_share_memory_and_programs() -> None:
    """Every message is written to and read from one memory; programs are those of the device."""
    link = Link(Curve.line(0.0, 1e-9), panel_beta=1e-9)
    slow = Device(link, replace(RATES, stream=1e9))
    payload = Payload.of_heads("none", 4, 64, 64)
    one = slow.estimate("chain", 2, payload)
    assert one.total == pytest.approx((16384 + 2 * 3 / 4 * 65536) * 1e-9)
    three = slow.estimate("chain", 4, payload)
    assert three.total == pytest.approx(3 * (16384 + 2 * 3 / 4 * 65536) * 1e-9)
    few = Device(link, replace(RATES, programs=8))  # 2 for each of 4 ranks: 2 waves
    assert few.estimate("chain", 4, payload).total == pytest.approx((3 + 1) * 16384e-9)
    none = few.estimate("all_gather", 4, payload)  # 3 messages, then the ends of 3 more
    assert none.total == pytest.approx((3 + 1.5) * 16384e-9)


def test_what_begins_the_line_is_multiplied_by_nothing() -> None:
    """Two ranks make no product. Eight: a chain 6; log_scan takes states through M 4 times and
    composes M once, in every one of two panels whole; all_gather folds 6. M is brought to memory
    once, and copied from there but in the first rank's messages."""
    payload = Payload.of_heads("dense", 1)
    product = 2.0 * 128 * 128 * 64
    slow = Device(replace(LINK, one=Curve.line(0.0, 0.0), credit=1e-30), replace(RATES, step=1e-30))
    slow = replace(slow, rates=replace(slow.rates, flops=slow.rates.programs * 1.0))
    names = ("chain", "log_scan", "all_gather")
    made = {n: [slow.estimate(n, W, payload).total / product for W in (2, 4, 8)] for n in names}
    assert made["chain"] == pytest.approx([0, 2, 6])
    assert made["log_scan"] == pytest.approx([0, 2, 4 + 2])
    assert made["all_gather"] == pytest.approx([0, 2, 6])
    steps = Device(replace(slow.link), replace(RATES, step=1.0))
    copied = {n: [steps.estimate(n, W, payload).total for W in (2, 8)] for n in names}
    assert copied["chain"] == pytest.approx([0, 0])
    assert copied["log_scan"] == pytest.approx([32, 2 * 96 + 32])
    assert copied["all_gather"] == pytest.approx([32, 6 * 96])


def test_a_file_without_steps_assumes_them(tmp_path: Path) -> None:
    Device(LINK, replace(RATES, step=0.0)).keep(tmp_path, "nvidia_h200")
    assert Device.read(tmp_path, "nvidia_h200").rates.step == ASSUMED_RATES["H200"].step > 0
    written = json.loads((tmp_path / "local_links_nvidia_h200.json").read_text())
    del written["rates"]["step"], written["links"]["same_process"]["credit"]
    (tmp_path / "local_links_nvidia_h200.json").write_text(json.dumps(written))
    old = Device.read(tmp_path, "nvidia_h200")
    payload = Payload.of_heads("scalar", 1)
    assert old.link.credit == 0.0
    assert old.estimate("chain", 2, payload, 3e-5).latency == pytest.approx(3 * 2e-6 + 3e-5)


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("simple_gla", "scalar"),
        ("gla", "rows"),
        ("gated_delta_rule", "dense"),
        ("linear_attn", "none"),
    ],
)
def test_kinds_of_variants(variant: str, kind: str) -> None:
    assert kind_of(variant) == kind


def test_a_command_reads_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--local-heap", "--host", "gpu", "--results", str(tmp_path)]
    assert program.main(words) == 2
    assert "run scaling_runs/local_exchange.py" in capsys.readouterr().err
    DEVICE.keep(tmp_path, "gpu")
    assert Device.read(tmp_path, "gpu") == DEVICE
    assert program.main(words) == 2
    assert "no rows of virtual ranks on gpu" in capsys.readouterr().err
    store = exchange_rows(tmp_path, "gpu")
    store.put({**exchange("chain", 4, 13.0, 6.0), "gpu": "x"})
    whole = RowStore(tmp_path / "virtual_ranks_gpu.csv", COLUMNS, KEY)
    for row in (call("ideal_same_plan", 1.0), call("ours", 1.003)):
        whole.put(row)
    assert program.main(words) == 0
    said = capsys.readouterr().out
    assert "predicted against measured: 1 of 1 within 25%" in said
    assert "whole calls, nearest end of the predicted range: 1 of 1 within 25%" in said
    store.put({**exchange("log_scan", 4, 99.0, 6.0), "gpu": "x"})
    assert program.main(words) == 1
    (tmp_path / "local_links_gpu.json").write_text('{"links": {}, "rates": null}')
    with pytest.raises(ModelProblem, match="holds no link"):
        Device.read(tmp_path, "gpu")


def test_a_rehearsal_wants_a_folder() -> None:
    with pytest.raises(SystemExit):
        local_exchange.parse(["--rehearse"])
    with pytest.raises(SystemExit):
        local_exchange.parse(["--kinds", "sparse"])
