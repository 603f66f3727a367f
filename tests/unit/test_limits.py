"""Launches of a call beside the plan, what Nsight Compute prints, rows of limits."""

from __future__ import annotations

import stat
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flexla_dist.compiler.aot import CompileTask, record_launches
from scaling_runs import limits, limits_ncu
from scaling_runs.bench import Shape, compile_task
from scaling_runs.implementations import Unavailable
from scaling_runs.limits_calls import MARKER, Ready
from scaling_runs.limits_kernels import (
    Launch,
    counted_launches,
    launches_of,
    matched,
    plan_steps,
    short_name,
)
from scaling_runs.limits_rows import COLUMNS, KEY, LimitRows
from scaling_runs.machine import Machine
from scaling_runs.rows import RowStore

MACHINE = Machine("2026-01-02", "abc", "Some GPU", "2.0", "3.0")
SHAPE = Shape("gla", "fwdbwd", 1, 4096, 16, 128, 128, "bfloat16")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("gla_scan", "gla_scan"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::F<float> >(int)",
         "vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
        ("Memset (Device)", "Memset"),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_launches_are_told_apart_by_their_order() -> None:
    names = ["a", "scan", "scan"]
    events = [(10.0 * i, 1.0 + i % 3 + i // 3, names[i % 3]) for i in range(9)]
    found = launches_of(events[::-1], 3)
    assert found == [Launch("a", 0, 2.0), Launch("scan", 0, 3.0), Launch("scan", 1, 4.0)]
    uneven = launches_of(events[:-1], 3)  # one is missing: means by name
    assert [(x.kernel, x.at) for x in uneven] == [("a", 0), ("scan", 0)]
    assert uneven[0].us == pytest.approx(2.0)


@pytest.mark.parametrize("variant", limits.VARIANTS)
def test_the_plan_has_the_kernels_that_a_call_launches(variant: str) -> None:
    shape = Shape(variant, "fwdbwd", 1, 4096, 16, 128, 128, "bfloat16")
    steps, floor = plan_steps(shape)
    counted = counted_launches(variant, steps)
    task = compile_task({shape: ["ours"]})
    assert isinstance(task, CompileTask)
    launched = {r.kernel for way in ("forward", "backward") for r in record_launches(task, way)}
    assert {name for name, _ in counted} == launched
    assert all(c.bytes > 0 and c.bound in ("memory", "products") for c in counted.values())
    assert sum(c.bytes for c in counted.values()) > floor.bytes > 0
    forward, small = plan_steps(Shape(variant, "fwd", 1, 4096, 16, 128, 128, "bfloat16"))
    assert len(forward) < len(steps) and small.bytes < floor.bytes


def test_names_that_the_plan_has_in_another_number_are_not_counted() -> None:
    counted = counted_launches("gla", plan_steps(SHAPE)[0])
    ran = [Launch(name, at, 1.0) for name, at in counted]
    assert matched(ran, counted) == (counted, "")
    kept, note = matched([x for x in ran if x.kernel != "gla_scan"], counted)
    assert ("gla_scan", 0) not in kept and ("gla_decays", 0) in kept
    assert note == "launches that the plan does not have: gla_scan 0 not 2"


# -- counters -------------------------------------------------------------------------------------

TABLE = f"""\
==PROF== Connected to process 7
"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum","{{tensor}}","dram__bytes.sum"
"","","","","ns","%","byte"
"0","{MARKER}","(128, 1, 1)","(2, 1, 1)","1,000","0","10"
"1","gla_scan","(128, 1, 1)","(8, 32, 1)","100,000","25.5","2,000,000"
"2","gla_scan","(128, 1, 1)","(8, 32, 1)","300,000","5.5","4,000,000"
"3","{MARKER}","(128, 1, 1)","(1, 1, 1)","1,000","0","10"
"4","other","(128, 1, 1)","(8, 32, 1)","n/a","1","1"
"""
TENSOR = f"sm__pipe_tensor_cycles_active.{limits_ncu.ELAPSED}"
METRICS = {"ncu_us": "gpu__time_duration.sum", "tensor_pct": TENSOR, "dram_mb": "dram__bytes.sum"}


def test_the_table_of_the_tool() -> None:
    seen = limits_ncu.parse(TABLE.replace("{tensor}", TENSOR), METRICS)
    cases = ["gla:fwd:ours", "gla:fwdbwd:ours"]
    found = limits_ncu.by_case(seen, cases)
    first, second = found["gla:fwdbwd:ours"]
    assert (first.kernel, first.at, second.at) == ("gla_scan", 0, 1)
    assert first.values == {"ncu_us": 100.0, "tensor_pct": 25.5, "dram_mb": 2.0}
    assert [x.kernel for x in found["gla:fwd:ours"]] == ["other"]
    assert "ncu_us" not in found["gla:fwd:ours"][0].values
    assert limits_ncu.parse("==ERROR== no", METRICS) == []
    launches = [Launch("Memset", 0, 1.0), Launch("gla_scan", 0, 9.0), Launch("gla_scan", 1, 9.0)]
    assert limits_ncu.aligned(launches, [first, second])["gla_scan", 1] is second
    assert limits_ncu.aligned(launches[:2], [first, second]) == {}
    other = [Launch("reverse", 0, 1.0), Launch("gla_scan", 0, 1.0)]
    assert limits_ncu.aligned(other, [first, second]) == {}
    spelled = [limits_ncu.Seen("other_spelling", 0, {}), second]
    assert set(limits_ncu.aligned(other, spelled)) == {("reverse", 0), ("gla_scan", 0)}


def test_metrics_are_those_that_the_tool_knows() -> None:
    chosen = limits_ncu.choose_metrics({"gpu__time_duration", "sm__inst_executed_pipe_tensor"})
    assert set(chosen) == {"ncu_us", "tensor_pct"}
    assert chosen["tensor_pct"].startswith("sm__inst_executed_pipe_tensor.")
    assert limits_ncu.choose_metrics(set())["tensor_pct"] == TENSOR


def tool(folder: Path, text: str) -> str:
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_why_there_are_no_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_ncu, "PLACES", ())
    monkeypatch.setattr(limits_ncu.shutil, "which", lambda name: None)
    assert limits_ncu.find_tool().why_not == "ncu is not installed"
    path = tool(tmp_path, 'echo "==ERROR== Failed to initialize the profiler"; exit 9')
    monkeypatch.setattr(limits_ncu.shutil, "which", lambda name: path)
    said = limits_ncu.find_tool().why_not
    assert said == ("ncu gave no counters (status 9): ==ERROR== Failed to initialize the profiler")
    monkeypatch.setattr(limits_ncu, "GRACE", 0.0)
    slow = limits_ncu.Tool(tool(tmp_path, "sleep 30"), METRICS)
    found, why = limits_ncu.counters(slow, ["gla:fwd:ours"], [], 0.3)
    assert found == {} and "took too long" in why


def test_counters_of_a_tool(tmp_path: Path) -> None:
    text = TABLE.replace("{tensor}", TENSOR)
    (tmp_path / "table").write_text(text)
    works = limits_ncu.Tool(tool(tmp_path, f"cat {tmp_path}/table; echo $* > {tmp_path}/words"),
                            METRICS)  # fmt: skip
    found, why = limits_ncu.counters(works, ["gla:fwd:ours", "gla:fwdbwd:ours"], ["--size=8"], 5)
    assert why == "" and len(found["gla:fwdbwd:ours"]) == 2
    words = (tmp_path / "words").read_text()
    assert "--clock-control none" in words and "--profile-from-start off" in words
    assert "--cases gla:fwd:ours,gla:fwdbwd:ours --seconds 5 --size=8" in words


# -- rows -----------------------------------------------------------------------------------------


def limit_rows(folder: Path) -> LimitRows:
    return LimitRows(RowStore(folder / "limits.csv", COLUMNS, KEY), MACHINE)


def ours() -> list[Launch]:
    counted = counted_launches("gla", plan_steps(SHAPE)[0])
    return [Launch("FillFunctor", 0, 1.0), *(Launch(n, at, 10.0) for n, at in counted)]


def test_rows_of_a_case(tmp_path: Path) -> None:
    rows = limit_rows(tmp_path)
    assert not rows.is_new(SHAPE, "ours")
    launches = ours()
    whole = rows.write(SHAPE, "ours", "0.1", "kernels=fused", launches, 0.25)
    assert rows.is_new(SHAPE, "ours") and not rows.is_counted(SHAPE, "ours")
    every = rows.of(SHAPE, "ours")
    assert [r["at"] for r in every] == [*map(str, range(len(launches))), "all"]
    assert every[0]["moved_mb"] == "" and float(every[1]["moved_mb"]) > 0
    assert float(whole["us"]) == 10.0 * (len(launches) - 1) + 1
    total = sum(float(r["moved_mb"] or 0) for r in every[:-1])
    assert float(whole["moved_mb"]) == pytest.approx(total, abs=1.0)
    assert float(whole["tbs"]) == pytest.approx(total / float(whole["us"]), rel=0.01)
    assert float(whole["moved_mb"]) > float(whole["floor_mb"]) > 0
    rows.write(SHAPE, "ours", "0.1", "", launches[:3], 0.25)
    fewer = rows.of(SHAPE, "ours")
    assert len(fewer) == 4 and "plan does not have" in fewer[-1]["note"]
    assert fewer[-1]["moved_mb"] == ""


def test_counters_go_into_the_rows(tmp_path: Path) -> None:
    rows = limit_rows(tmp_path)
    rows.write(SHAPE, "fla", "0.6", "", [Launch("a", 0, 5.0), Launch("a", 1, 5.0)], 0.1)
    rows.note(SHAPE, "fla", "no counters: not asked for")
    assert rows.whole(SHAPE, "fla")["note"] == "no counters: not asked for"  # type: ignore[index]
    seen = [
        limits_ncu.Seen("a", 0, {"ncu_us": 10.0, "tensor_pct": 40.0, "dram_mb": 1.0}),
        limits_ncu.Seen("a", 1, {"ncu_us": 30.0, "tensor_pct": 20.0, "dram_mb": 2.0}),
    ]
    assert not rows.count(SHAPE, "fla", seen[:1], "")
    assert "launched other kernels" in rows.whole(SHAPE, "fla")["note"]  # type: ignore[index]
    assert rows.count(SHAPE, "fla", seen, "")
    first, _, whole = rows.of(SHAPE, "fla")
    assert first["tensor_pct"] == "40" and first["moved_mb"] == ""
    assert (whole["tensor_pct"], whole["dram_mb"], whole["note"]) == ("25", "3", "")
    assert whole["dram_pct"] == "" and rows.is_counted(SHAPE, "fla")


# -- a whole run ----------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def make_case(shape: Shape, name: str, lift_guard: bool) -> Ready:
        if shape.variant == "kda":
            raise Unavailable("no such function")
        made.append(f"{shape.variant}:{shape.direction}:{name}")
        return Ready(None, nullcontext(), "0.1", str)  # type: ignore[arg-type]

    def counters(tool, names, words, seconds):  # type: ignore[no-untyped-def]
        seen = limits_ncu.Seen("other", 0, {"ncu_us": 4.0, "tensor_pct": 30.0})
        return {names[0]: [seen]}, ""

    monkeypatch.setattr(limits.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(limits.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(limits, "describe_machine", lambda commit: MACHINE)
    monkeypatch.setattr(limits, "make_case", make_case)
    monkeypatch.setattr(limits, "profile_call", lambda call, calls: [Launch("other", 0, 5.0)])
    monkeypatch.setattr(limits.triton.testing, "do_bench", lambda call, **options: 0.01)
    monkeypatch.setattr(limits, "find_tool", lambda: limits_ncu.Tool("ncu", METRICS))
    monkeypatch.setattr(limits, "counters", counters)
    words = ["--results", str(tmp_path), "--variants", "gla,kda", "--directions", "fwd"]
    assert limits.main(words) == 0
    assert made == ["gla:fwd:ours", "gla:fwd:fla"]
    out = capsys.readouterr().out
    assert "kda fwd ours: no such function" in out and "gla:fwd:fla: counted" in out
    assert limits.main([*words, "--no-counters"]) == 0 and len(made) == 2
    store = RowStore(tmp_path / "limits_some_gpu.csv", COLUMNS, KEY)
    assert {(r["impl"], r["at"], r["tensor_pct"]) for r in store.rows()} == {
        (impl, at, "30") for impl in ("ours", "fla") for at in ("0", "all")
    }
    capsys.readouterr()
    assert limits.main([*words, "--again", "--seconds", "0"]) == 0 and len(made) == 2
    assert "4 calls left" in capsys.readouterr().out
