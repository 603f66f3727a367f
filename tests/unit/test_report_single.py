"""The page of one GPU says what the rows say, and is the one that they give."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flexla_dist.compiler.explain import explain
from scaling_runs import bench, report_single
from scaling_runs.limits_rows import COLUMNS, KEY
from scaling_runs.machine import RESULTS
from scaling_runs.report_single_answer import answer
from scaling_runs.report_single_data import (
    SOFTMAX,
    VARIANTS,
    Call,
    floor_bytes,
    floor_ms,
    limit_words,
    read_single,
)
from scaling_runs.report_single_text import page, speed_tables
from scaling_runs.rows import RowStore

MADE = {"date": "2026-01-02", "gpu": "X", "torch": "2", "triton": "3", "dtype": "bfloat16"}
SWEPT = Call("gla", "fwd", B=16, T=4096, H=16)


def timed(folder: Path, call: Call, impl: str, ms: str, mib: str = "9", **more: str) -> None:
    store = RowStore(folder / "single_gpu_x.csv", bench.COLUMNS, bench.KEY)
    sizes = {"B": call.B, "T": call.T, "H": call.H, "K": call.D, "V": call.D}
    row = {**MADE, **sizes, "commit": "abc", "variant": call.variant, "direction": call.direction}
    numbers = {"impl": impl, "median_ms": ms, "peak_mib": mib, "HV": str(call.HV or "")}
    store.put({**row, **numbers, **more})


def limited(folder: Path, call: Call, impl: str, at: str, **columns: str) -> None:
    store = RowStore(folder / "limits_x.csv", COLUMNS, KEY)
    sizes = {"B": call.B, "T": call.T, "H": call.H, "K": call.D, "V": call.D, "at": at}
    row = {**MADE, **sizes, "commit": "abc", "variant": call.variant, "direction": call.direction}
    store.put({**row, "impl": impl, "kernel": f"{call.variant}_{at}", **columns})


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# -- the page of the repository -------------------------------------------------------------------


def test_the_page_is_the_one_that_the_rows_give() -> None:
    found = read_single(RESULTS, report_single.GPU)
    names = report_single.plot_names(found)
    assert (RESULTS / report_single.PAGE).read_text() == page(found, names), (
        "single_gpu.md is older than its rows: python scaling_runs/report_single.py"
    )
    assert all((RESULTS / name).is_file() for name in names)


# -- what it says ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_floor_is_that_of_the_compiler(variant: str) -> None:
    heads, sizes = (1, {"D": 4096}) if variant == "hgrn" else (32, None)
    plans = explain(variant, heads=heads, sizes=sizes).triton.directions  # type: ignore[union-attr]
    moved = [plan.floor.bytes_read + plan.floor.bytes_written for plan in plans]
    assert floor_bytes(Call(variant, "fwd")) == moved[0]
    assert floor_bytes(Call(variant, "fwdbwd")) == sum(moved)


def test_floors() -> None:
    assert floor_ms(Call("linear_attn", "fwd")) == pytest.approx(0.125, abs=1e-3)
    assert floor_bytes(Call(SOFTMAX, "fwd")) == floor_bytes(Call("linear_attn", "fwd"))
    grouped = floor_bytes(Call("gated_delta_rule", "fwd", H=16, HV=32))
    assert floor_bytes(Call("gated_delta_rule", "fwd", H=16)) < grouped
    assert grouped < floor_bytes(Call("gated_delta_rule", "fwd", H=32))


def test_speed(tmp_path: Path) -> None:
    timed(tmp_path, Call("gla", "fwd"), "ours", "0.5")
    timed(tmp_path, Call("gla", "fwd"), "fla", "1.5", commit="old", impl_version="6 guard lifted")
    timed(tmp_path, Call(SOFTMAX, "fwd"), "sdpa", "4.0")
    (table,) = speed_tables(read_single(tmp_path, "x"))
    assert "rows of commits: ours abc; FLA old" in table
    assert cells(table, "gla") == ["gla", "0.500", "1.500*", "3.00", "0.156", "3.20", "0.6"]
    assert cells(table, "kda") == ["kda", "missing", "missing", "", "0.156", "", "0.9"]
    assert "Softmax attention of the same sizes: 4.000 ms." in table
    timed(tmp_path, Call("gated_delta_rule", "fwd"), "flashqla", "0.6")
    timed(tmp_path, Call("gla", "fwd", T=4096), "ours", "0.2", commit="new")
    text = page(read_single(tmp_path, "x"), [])
    assert "| ms | ours | FLA | FlashQLA | FLA / ours |" in text
    assert "Rows of ours are of 2 commits" in text


def test_sweep_and_shapes(tmp_path: Path) -> None:
    softmax = replace(SWEPT, variant=SOFTMAX)
    timed(tmp_path, SWEPT, "ours", "2.0", "100")
    timed(tmp_path, softmax, "sdpa", "3.0", "50")
    timed(tmp_path, SWEPT, "fla", "", "", note="out of memory: 4 GiB")
    timed(tmp_path, Call("gated_delta_rule", "fwd", H=16, HV=32), "ours", "1.0")
    found = read_single(tmp_path, "x")
    text = page(found, report_single.plot_names(found))
    assert cells(text, "fwd | 16 | 4096") == [
        "fwd", "16", "4096", "2.000", "out of memory", "3.000", "", "1.50", "100",
        "out of memory", "50", "2.00", "",
    ]  # fmt: skip
    assert (
        "- ours fwd: slower than softmax attention nowhere (of 1 calls); at most 2.00x its memory"
    ) in text
    grouped = cells(text, "gated_delta_rule fwd, B=1 T=16384 H=16/32 D=128")
    assert grouped[1:4] == ["1.000", "missing", "missing"]
    assert "![single gpu sweep](single_gpu_sweep.png)" in text
    assert report_single.main(["--results", str(tmp_path / "none")]) == 2


def test_the_answer_comes_from_counters(tmp_path: Path) -> None:
    call = Call("gla", "fwd")
    assert "there is no `limits_x.csv`" in answer(read_single(tmp_path, "x"))
    for impl in ("ours", "fla"):
        limited(tmp_path, call, impl, "0", us="10", share="0.25", tensor_pct="40", dram_pct="20")
        limited(tmp_path, call, impl, "1", us="30", share="0.75", tensor_pct="20", dram_pct="80")
        limited(tmp_path, call, impl, "all", us="40", tensor_pct="25", dram_pct="65", call_ms="0.1",
                dram_mb="80", ncu_us="50")  # fmt: skip
    found = read_single(tmp_path, "x")
    said = answer(found)
    assert said.startswith("**No.** In 1 call of ours the tensor pipes are active 25% of")
    assert "at most 40% (`gla_0`, gla fwd); memory runs at 65% of its peak, and 75% of" in said
    assert "In 1 call of FLA" in said
    whole = found.whole(call, "ours")
    assert whole is not None
    assert limit_words(whole) == "memory (memory 65%, tensor cores 25%; counters); launches"
    table = page(found, [])
    line = cells(table, "gla fwd, ours")
    assert line[-1].startswith("memory (") and "1.600" in line
    assert len(line) == len(cells(table, "kda fwd, FLA"))
    assert cells(table, "kda fwd, FLA")[1] == "missing"
    assert table.count("| `gla_1` | 75% | 30 |") == 2
    limited(tmp_path, call, "ours", "1", us="30", share="0.75", tensor_pct="70", dram_pct="20")
    assert answer(read_single(tmp_path, "x")).startswith("**Yes.**")


def test_without_counters_it_comes_from_counts(tmp_path: Path) -> None:
    call = Call("gla", "fwd")
    limited(tmp_path, call, "ours", "0", us="10", share="1", tbs="2.15", tflops="79")
    why = "no counters: ncu is not installed"
    limited(tmp_path, call, "ours", "all", us="10", tbs="2.15", tflops="79", note=why)
    limited(tmp_path, call, "fla", "all", us="10", floor_tbs="1.075")
    found = read_single(tmp_path, "x")
    said = answer(found)
    assert said.startswith("**No.** By counts, our kernels compute at 10% of 790 TFLOP/s")
    assert "move 50% of 4.3 TB/s" in said and "ncu is not installed" in said
    ours, fla = found.whole(call, "ours"), found.whole(call, "fla")
    assert ours is not None and fla is not None
    assert limit_words(ours) == "latency (memory 50%, products 10%; counted)"
    assert limit_words(fla) == "not known: no counters (memory at least 25%, by the floor)"


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    call = Call("gla", "fwd")
    limited(tmp_path, call, "ours", "0", us="10", share="0.5", tensor_pct="40")
    limited(tmp_path, call, "ours", "1", us="10", share="0.5")
    limited(tmp_path, call, "ours", "all", us="20")
    timed(tmp_path, SWEPT, "ours", "2.0", "100")
    timed(tmp_path, replace(SWEPT, T=8192), "ours", "4.0", "200")
    assert report_single.main(["--results", str(tmp_path), "--gpu", "x"]) == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {report_single.SHARES, report_single.SWEEP}
