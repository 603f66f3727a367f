"""Presets of `single_gpu.py`, calls that do not fit or take long, groups of heads."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from scaling_runs import bench, implementations, measure, single_gpu, single_presets
from scaling_runs.machine import Machine
from scaling_runs.rows import RowStore

MACHINE = Machine("2026-01-02", "abc", "Some GPU", "2.0", "3.0")


def test_the_sweep_has_ours_and_softmax_attention_first() -> None:
    options = single_gpu.parse(["--preset", "sweep"])
    points = single_gpu.points(options)
    first = points[0].shapes[0]
    assert (first.variant, first.B, first.T, first.H) == ("gla", 16, 4096, 16)
    order = [name for point in points for name in point.impls]
    assert set(order[: order.index("fla")]) == {"ours", "sdpa"}
    assert set(order[order.index("fla") :]) == {"fla"}
    timed = {
        (s.direction, s.B, s.T, name)
        for point in points
        for s in point.shapes
        for name in point.impls
        if bench.fits(s, name)
    }
    assert timed == {
        (way, batch, tokens, name)
        for way in ("fwd", "fwdbwd")
        for batch in (1, 4, 16)
        for tokens in (2048, 4096, 8192, 16384)
        for name in ("ours", "fla", "sdpa")
    }


def test_shapes() -> None:
    options = single_gpu.parse(["--preset", "shapes", "--variants", "gated_delta_rule"])
    shapes = [(p, s) for p in single_gpu.points(options) for s in p.shapes]
    assert {p.impls for p, _ in shapes} == {("ours",), ("fla", "flashqla")}
    ours = [(s.B, s.T, s.H, s.HV, s.V, s.direction) for p, s in shapes if p.impls == ("ours",)]
    assert (1, 131072, 4, 0, 128, "fwdbwd") in ours and (8, 4096, 16, 0, 128, "fwd") in ours
    assert (1, 16384, 16, 32, 128, "fwdbwd") in ours
    assert {size for *_, size, _ in ours} == {64, 128, 256}
    assert [way for _, tokens, *_, way in ours if tokens == 262144] == ["fwd"]
    some = single_gpu.parse(["--preset", "shapes", "--impl", "fla", "--directions", "fwd"])
    points = single_gpu.points(some)
    assert {p.impls for p in points} == {("fla",)}
    assert {s.direction for p in points for s in p.shapes} == {"fwd"}
    with pytest.raises(ValueError, match="no preset 'all'; expected one of sweep, shapes"):
        single_presets.points("all", (), (), (), "bfloat16")


def test_groups_of_heads_are_compared_whole(tmp_path: Path) -> None:
    shape = bench.Shape("gated_delta_rule", "fwdbwd", 1, 64, 2, 8, 8, "float64", 8)
    call = bench.make_call(shape, "cpu")
    assert call.inputs["q"].shape[2] == 2 and call.inputs["v"].shape[2] == 8
    assert implementations.group_sizes(call.inputs) == {"q": 4, "k": 4}
    seed = bench.gradient_seed(shape, call)
    op = compile(get_variant("gated_delta_rule"), executor="torch")
    arguments = {**call.inputs, **call.scalars}
    case = bench.Case(lambda: op(**arguments)[0], call, seed)
    error = bench.Reference(shape, call, seed).error(shape, case.results())
    assert error is not None and error < 1e-12
    task = bench.compile_task({shape: ["ours"]})
    assert task is not None and task.problem.heads == 8


def test_what_does_not_fit_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full:
        def prepare(self, variant, call, direction):  # type: ignore[no-untyped-def]
            raise torch.cuda.OutOfMemoryError("Tried to allocate 4 GiB. GPU 0 has little")

    store = RowStore(tmp_path / "rows.csv", bench.COLUMNS, bench.KEY)
    runs = bench.Bench({"ours": Full()}, store, MACHINE, "cpu")
    shape = bench.Shape("gla", "fwd", 1, 64, 2, 8, 8, "float32")
    runs.run({shape: ["ours"]}, errors=False)
    (row,) = store.rows()
    assert row["note"] == "out of memory: Tried to allocate 4 GiB." and row["median_ms"] == ""
    assert runs.missing(shape, ["ours"]) == []
    assert "gla fwd B=1 T=64 H=2 D=8 ours: out of memory" in capsys.readouterr().out


def test_old_files_have_no_groups(tmp_path: Path) -> None:
    old = RowStore(tmp_path / "rows.csv", bench.COLUMNS[:-2], bench.KEY[:-1])
    shape = bench.Shape("gla", "fwd", 1, 64, 2, 8, 8, "float32")
    sizes = {name: value for name, value in vars(shape).items() if name != "HV"}
    old.put({**MACHINE.columns(), **sizes, "impl": "ours"})
    store = RowStore(tmp_path / "rows.csv", bench.COLUMNS, bench.KEY)
    assert bench.Bench({}, store, MACHINE, "cpu").missing(shape, ["ours", "fla"]) == ["fla"]


def test_long_calls_are_repeated_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [measure.repetitions(s, 3.0) for s in (0.05, 0.5, 1.0, 2.0, 9.0)] == [5, 5, 2, 1, 1]

    class Event:
        def __init__(self, enable_timing: bool):
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    fake = SimpleNamespace(Event=Event, synchronize=lambda: None)
    monkeypatch.setattr(measure.torch, "cuda", fake)
    monkeypatch.setattr(measure, "peak_mib", lambda call: call() or 7.0)
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.05)

    timing = measure.measure_call(call, limit_s=0.15)
    assert len(calls) == 2 + 1 + 1 and timing.peak_mib == 7.0
    assert timing.median_ms == timing.p20_ms >= 50.0 and timing.host_us >= 50e3


def test_flashqla_says_what_is_missing() -> None:
    shape = bench.Shape("gated_delta_rule", "fwd", 1, 64, 2, 8, 8, "float32")
    call = bench.make_call(shape, "cpu")
    library = implementations.FlashQla()
    with pytest.raises(implementations.Unavailable, match="gated delta rule only"):
        library.prepare("gla", call, "fwd")
    with pytest.raises(implementations.Unavailable, match=r"not installed: .*flash_qla"):
        library.prepare("gated_delta_rule", call, "fwd")
    assert bench.fits(shape, "flashqla")
    assert not bench.fits(bench.Shape("gla", "fwd", 1, 64, 2, 8, 8, "float32"), "flashqla")
