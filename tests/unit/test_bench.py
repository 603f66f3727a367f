"""`flexla-dist bench` without a GPU: candidates, what is compiled, tables, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexla_dist.bench import program, report
from flexla_dist.bench.calls import BenchCall
from flexla_dist.bench.candidates import Subject, subjects
from flexla_dist.bench.outcomes import Outcome, Provenance, compile_tasks
from flexla_dist.bench.report import HEAD, Report, joined
from flexla_dist.bench.search_state import SearchState
from flexla_dist.bench.timing import StepTime, changed
from flexla_dist.bench.tune import Tuner
from flexla_dist.compiler.aot import LaunchRecord, describe_call, record_launches
from flexla_dist.compiler.executor.choosing import Tuned, fixed_tile
from flexla_dist.compiler.executor.planned_launches import Arguments
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.explain.triton_plan import triton_plan
from flexla_dist.compiler.tuned.database import Database, Key, read
from flexla_dist.errors import TuningError

from .compiled import graphs_of
from .launch_doubles import OneCall, replace_launches

SIZES = {"K": 128, "V": 128, "D": 4096}
BOTH = ("forward", "backward")


def found_of(name: str, grid: str = "near") -> tuple[TritonExecutor, Any, list[Subject]]:
    executor = TritonExecutor(graphs_of(name), Tuned(measured=False))
    heads = 1 if name == "hgrn" else 32
    problem = describe_call(executor.graphs, tokens=16384, heads=heads, sizes=SIZES)
    return executor, problem, subjects(executor, problem, BOTH, grid, "sm_90")


@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "kda", "hgrn"])
def test_candidates_are_few_and_begin_with_the_present_choice(name: str) -> None:
    executor, _, found = found_of(name)
    for subject in found:
        assert subject.candidates[0] == subject.current.launch
        assert len(set(subject.candidates)) == len(subject.candidates)
        assert 4 <= len(subject.candidates) <= 20
        schedule = executor.forward_schedule
        if subject.direction == "backward":
            schedule = executor.backward_schedule
        if fixed_tile(schedule, subject.kernel):
            assert {c.column_tile for c in subject.candidates} == {
                subject.current.launch.column_tile
            }
    wide = {s.name: set(s.candidates) for s in found_of(name, "wide")[2]}
    assert all(len(wide[s.name]) >= len(s.candidates) for s in found)


def test_what_is_compiled_is_every_candidate() -> None:
    executor, problem, found = found_of("simple_gla")
    [scan] = [s for s in found if s.name == ("forward", "scan")]
    [task] = compile_tasks(executor.graphs, problem, executor.tuned, [scan])
    records = [x for x in record_launches(task, "forward") if x.kernel == scan.emitted.name]
    compiled = {configuration_of(x) for x in records}
    wanted = {(c.column_tile, c.num_warps, c.num_stages, c.registers) for c in scan.candidates}
    assert compiled == wanted


def configuration_of(x: LaunchRecord) -> tuple[Any, ...]:
    words = x.keywords
    return words["tile_V"], words["num_warps"], words["num_stages"], words.get("maxnreg")


@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "hgrn"])
def test_described_launches_are_those_of_the_plan(name: str) -> None:
    """Bytes of one list stand beside times of the other."""
    executor, problem, _ = found_of(name)
    shown = triton_plan(executor.graphs, problem, tuned=executor.tuned)
    described = {plan.direction: plan for plan in shown.directions}
    for direction in BOTH:
        plan, _ = executor.prepared(problem, direction, arguments_of(executor, problem, direction))
        launched = [x.function.__name__ for x in plan.launches]
        steps = [step for step in described[direction].steps if step.kind != "torch"]
        named = [n.removeprefix(f"{name}_") for n in launched]
        assert named == [step.name for step in steps], direction
        times = [StepTime((), n, 10.0) for n in ("torch sum", *launched)]
        rows = joined(direction, times, steps)
        assert rows[0].bytes is None and all(row.bytes for row in rows[1:])
        own = [row for row in rows[1:] if row.kernel not in ("fold_segments", "segment_products")]
        assert {row.configuration for row in own} == {"estimate"}


def arguments_of(executor: TritonExecutor, problem: Any, direction: str) -> Arguments:
    entry = problem.zero_state()
    if direction == "forward":
        return Arguments(entry)
    shapes = executor.saved_shapes(problem)
    saved = tuple(torch.empty(s.shape, dtype=s.dtype, device="meta") for s in shapes)
    gradient = torch.empty(
        problem.output_shape(), dtype=problem.output_dtype, device=problem.device
    )
    return Arguments(entry, (gradient,), entry, saved)


def test_a_report_is_a_table_and_json() -> None:
    step = SimpleNamespace(
        name="scan", bytes_read=3_000_000, bytes_written=1_000_000, tiles={"C": 64},
        warps=4, stages=2, registers=None, configuration="tuned",
    )  # fmt: skip
    times = [StepTime((), "gla_scan", 2.0), StepTime((), "torch sum", 2.0)]
    rows = tuple(joined("forward", times, [step]))
    shown = Report("gla", "a GPU", {"forward": "fused"}, 0.01, 0.009, 0.011, 4.0, rows)
    text = str(shown)
    assert "whole call: median 0.0100 ms, p20 0.0090, p80 0.0110" in text
    assert "kernels: 4.0 us, 4.0 MB at 1.00 TB/s, 25% of a copy" in text
    table = text.splitlines()[-3:]
    assert table[0].split()[: len(HEAD) - 1] == list(HEAD)[: len(HEAD) - 1]
    words = ["forward", "scan", "2.0", "50.0%", "4.0", "2.00", "C64", "4", "2", "tuned"]
    assert table[1].split() == words
    data = shown.data()
    assert data["kernels"][0]["tbs"] == 2.0 and data["kernels"][1]["bytes"] is None


def doubled() -> BenchCall:
    """A call whose kernels are doubles."""
    one = OneCall("gla", tokens=4096)
    inputs = {name: one.arguments[name] for name in one.op.spec.inputs}
    given = SimpleNamespace(inputs=inputs, params={}, scalars={"scale": 1.0})
    return BenchCall(one.op, given, BOTH)  # type: ignore[arg-type]


def test_segments_are_tuned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_launches(monkeypatch)
    call, file, said = doubled(), tmp_path / "own.json", list[str]()
    noted = Provenance("2026-01-01", "abc", "no GPU")
    tuner = Tuner(call, file, Database("sm_90"), noted, say=said.append)
    times = lambda tuned: 100.0 - 10 * (tuned.programs or 2)  # noqa: E731
    monkeypatch.setattr(tuner, "_whole", times)
    state = SearchState(tmp_path / "state.jsonl")
    tuner.tune_segments(state)
    [entry] = read(file, "sm_90").scans.values()
    assert (entry.programs, entry.measured.us, entry.measured.before_us) == (4, 60.0, 80.0)
    assert call.executor.programs(call.problem) == 4 and len(said) == 1
    tuner.tune_segments(state)
    assert len(said) == 1
    assert TritonExecutor(call.op.graphs, Tuned(file)).programs(call.problem) == 4


def test_candidates_differ_in_one_kernel_from_what_they_are_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_launches(monkeypatch)
    call, file = doubled(), tmp_path / "own.json"
    call.executor.tuned = Tuned(file)
    tuner = Tuner(call, file, Database("sm_90"), Provenance("2026-01-01", "abc", "no GPU"))
    found = subjects(call.executor, call.problem, BOTH, "wide", "sm_90")
    first, second, *_ = [s for s in found if s.direction == "forward"]

    def configurations(tuned: Tuned) -> dict[str, str]:
        executor = TritonExecutor(call.op.graphs, tuned)
        return {k: str(v) for k, v in executor.configurations(call.problem, "forward").items()}

    before, [task] = (
        configurations(tuner.base),
        compile_tasks(call.op.graphs, call.problem, tuner.base, [second]),
    )
    planned = [record.key for record in record_launches(task, "forward")]
    tuner.accept(tuner.entry(first, first.candidates[1], Outcome(None, 1.0, 2.0, ())))
    changed_ones = {k for k, v in configurations(tuner.base).items() if v != before[k]}
    assert changed_ones == {first.kernel.name}  # later kernels run beside it
    tried = configurations(tuner._with(second, second.candidates[1]))
    assert {k for k, v in configurations(tuner.base).items() if v != tried[k]} == {
        second.kernel.name
    }
    # What a process without a cache plans later is the same, whatever the file says by then.
    anew = dataclasses.replace(task, tuned=tuple(map(dataclasses.replace, task.tuned)))
    assert [record.key for record in record_launches(anew, "forward")] == planned
    assert configurations(Tuned(file)) == configurations(tuner.base)


def test_a_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the device and its clocks: kernels are doubles."""
    replace_launches(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "no GPU")
    monkeypatch.setattr(report, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr("triton.testing.do_bench", lambda f, **_: (f(), (2.0, 1.0, 3.0))[1])
    call = doubled()
    found = report.report(call, runs=2)
    assert (found.median_ms, found.p20_ms, found.p80_ms) == (2.0, 1.0, 3.0)
    assert found.plans == {"forward": "fused", "backward": "unfused"}
    kernels = [row for row in found.kernels if row.bytes is not None]
    assert {row.direction for row in kernels} == set(BOTH)
    assert {row.configuration for row in kernels} == {"estimate", "fixed"}
    assert "from" in str(found) and len(found.data()["kernels"]) == len(found.kernels)


def test_what_counts_is_what_a_candidate_changes() -> None:
    before = [StepTime(("a",), "a", 5.0), StepTime(("b", 1), "b", 7.0), StepTime(("a",), "a", 5.0)]
    after = [StepTime(("a",), "a", 9.0), StepTime(("b", 2), "b", 4.0), StepTime(("c",), "c", 1.0)]
    assert changed(before, after) == (12.0, 5.0)  # one of the two launches of a is gone
    assert changed(before, before) == (0.0, 0.0)


def test_the_state_of_a_search_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "state.jsonl"
    key = Key("ff", "bfloat16", "C=64", "few", "long")
    SearchState(file).note(key, "gla_scan", 2.0, 1.0, [["a", "1.0 us"]])
    assert SearchState(file).knows(key) and not SearchState(file, again=True).knows(key)
    file.write_text("{}\n")
    with pytest.raises(TuningError, match=r"line 1 of .* remove the file"):
        SearchState(file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gla"], "needs a CUDA device"),
        (["gla", "--compile-only"], "give --tune as well"),
        (["gla", "--tune", "--json"], "--json is of timings"),
        (["gla", "--tune", "--compile-only", "--shape", "1,a"], "'a' in --shape"),
        (["gal", "--tune", "--compile-only"], "gla"),
    ],
)
def test_what_does_not_fit_is_refused(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("flexla-dist bench: ") and said in error


def test_a_plan_can_be_chosen() -> None:
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    program.choose_plan(executor, "unfused")
    assert executor.plan == "unfused"
    program.choose_plan(executor, "fused")
    assert executor.plan == "fused"
