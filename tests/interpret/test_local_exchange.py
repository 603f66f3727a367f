"""The program that compares predictions for virtual ranks with measurements, rehearsed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scaling_runs import local_exchange
from scaling_runs.model.local_heap import Device, exchange_rows


def test_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rehearse", "--ranks", "2", "--heads", "1", "--size", "16", "--commit", "x"]
    words += ["--strategies", "chain,all_gather", "--results", str(tmp_path)]
    assert local_exchange.main(words) == 0
    said = capsys.readouterr().out
    assert "processes and the interpreter" in said and "of 4 within 25%" in said
    rows = exchange_rows(tmp_path, "cpu").rows()
    assert [(r["kind"], r["strategy"]) for r in rows] == [
        (kind, strategy) for kind in ("scalar", "dense") for strategy in ("chain", "all_gather")
    ]
    assert all(float(r["median_us"]) > 0 and float(r["apart_us"]) > 0 for r in rows)
    assert Device.read(tmp_path, "cpu").link.measured
