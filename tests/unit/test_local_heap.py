"""Predictions for virtual ranks of one device beside measured rows: the arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flexla_dist.comm.chooser.links import Curve, Link, Rates
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

# A hop of a panel is 2 us and nothing else takes time: no wire, no products, no waves.
LINK = Link(Curve.line(2e-6, 0.0), Curve.line(2e-6, 0.0), measured=True, source="here")
RATES = Rates(1e-6, 1e30, 1e30, 1 << 20, True, "here")
DEVICE = Device(LINK, RATES)


def exchange(strategy: str, W: int, median: float, apart: float) -> dict[str, str]:
    row = {"kind": "scalar", "heads": "1", "K": "64", "W": str(W), "strategy": strategy}
    return {**row, "median_us": str(median), "apart_us": str(apart)}


def call(impl: str, ms: float, delay: float = 0, direction: str = "fwd") -> dict[str, str]:
    shape = {"B": "1", "T": "64", "H": "1", "K": "64", "V": "64", "dtype": "bfloat16", "W": "4"}
    names = {"gpu": "x", "variant": "simple_gla", "direction": direction, "strategy": "chain"}
    return {**names, **shape, "impl": impl, "delay_us": str(delay), "median_ms": str(ms)}


def test_what_exchanges_add_is_compared() -> None:
    rows = [exchange("chain", 4, 12.0, 6.0), exchange("chain", 8, 20.0, 6.0)]
    first, second = compare_alone(rows, DEVICE)
    assert first["added_us"] == 6.0 and first["predicted_us"] == pytest.approx(3 * 2.0)
    assert first["ratio"] == pytest.approx(1.0) and first["whole_ratio"] == pytest.approx(1.0)
    assert second["predicted_us"] == pytest.approx(14.0) and second["ratio"] == pytest.approx(1.0)
    [nothing] = compare_alone([exchange("chain", 4, 5.0, 6.0)], DEVICE)
    assert nothing["ratio"] is None


def test_whole_calls_lie_in_a_range() -> None:
    """Three hops of 2 us, hidden or not; with a delay three hops of 32 us, twice there and back."""
    rows = [call("ideal_same_plan", 1.0), call("ours", 1.003), call("ours", 1.2, 30)]
    rows += [call("ideal_best", 0.5)]
    rows += [call("ideal_same_plan", 2.0, 0, "fwdbwd"), call("ours", 1.5, 0, "fwdbwd")]
    inside, beyond, below = compare_whole(rows, DEVICE)
    assert inside["exposed_us"] == pytest.approx(6.0) and inside["ratio"] == 1.0
    assert inside["hidden_us"] == pytest.approx(0.0) and inside["added_us"] == pytest.approx(3.0)
    assert beyond["exposed_us"] == pytest.approx(96.0)
    assert beyond["ratio"] == pytest.approx(1.096 / 1.2)
    assert below["exposed_us"] == pytest.approx(12.0) and below["ratio"] == pytest.approx(2.0 / 1.5)


def test_wire_and_lanes_count() -> None:
    slow = Device(Link(Curve.line(0.0, 1e-9), panel_beta=1e-9), RATES)
    payload = Payload.of_heads("none", 4, 64, 64)
    one = slow.estimate("chain", 2, payload)
    assert one.total == pytest.approx(4 * 64 * 64 * 4 * 1e-9)
    three = slow.estimate("chain", 4, payload)  # three messages share the one lane of a device
    assert three.total == pytest.approx((3 * 16384 + 3 / 4 * 3 * 65536) * 1e-9)


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
    store.put({**exchange("chain", 4, 12.0, 6.0), "gpu": "x"})
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
