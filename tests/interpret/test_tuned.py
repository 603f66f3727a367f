"""Measured configurations with other tiles give the same results; the search, rehearsed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexla_dist.bench import program, search, tune
from flexla_dist.bench.calls import BenchCall
from flexla_dist.bench.candidates import subjects
from flexla_dist.bench.outcomes import Provenance
from flexla_dist.bench.search_state import SearchState
from flexla_dist.bench.tune import Tuner
from flexla_dist.compiler.tuned.database import Database, KernelEntry, Measured, read, write
from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import make_inputs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
SCAN = ("forward", "scan")
NOTED = Measured(1.0, 2.0, "2026-01-01", "abc", "the interpreter")


def call_of(name: str, file: Path, tokens: int = 33) -> BenchCall:
    op = compile(get_variant(name), executor="triton", chunk_size=32, tuned=file)
    sizes = {"K": 16, "V": 64, "D": 64}
    given = make_inputs(
        op.spec, batch=1, tokens=tokens, heads=1, value_heads=1, sizes=sizes, dtype=torch.float32
    )
    return BenchCall(op, given, ("forward", "backward"))


def results(call: BenchCall) -> dict[str, Any]:
    call()
    plan = call.op.last_plan
    assert plan is not None and call.op.last_backward_plan is not None
    return {
        "gradients": call(),
        "forward": dict(plan.configurations),
        "backward": dict(call.op.last_backward_plan.configurations),
    }


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "hgrn"])
def test_entries_with_other_tiles_give_the_same_results(name: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    call = call_of(name, file)
    found = subjects(call.executor, call.problem, call.directions, "wide", "sm_90")
    database, tiled = Database("sm_90"), []
    for subject in found:
        tile = subject.current.launch.column_tile
        other = [c for c in subject.candidates if c.column_tile < tile]
        if other:
            tiled.append(subject.name)
            database.add(
                KernelEntry(
                    subject.key, subject.emitted.name, other[0].column_tile, 4, 1, None, 0, NOTED
                )
            )
    assert {direction for direction, _ in tiled} == {"forward", "backward"}
    want = results(call)
    write(database, file)
    got = results(call_of(name, file))
    for direction, kernel in tiled:
        assert want[direction][kernel] == "estimate" and got[direction][kernel] == "tuned"
    for mine, theirs in zip(got["gradients"], want["gradients"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    call = call_of("simple_gla", file)
    found = subjects(call.executor, call.problem, call.directions, "near", "sm_90")
    found = [replace(subject, candidates=subject.candidates[:2]) for subject in found[1:4]]
    said: list[str] = []
    provenance = Provenance("2026-01-01", "abc", "the interpreter")
    tuner = Tuner(call, file, read(file, "sm_90"), provenance, runs=1, say=said.append)
    state = SearchState(tmp_path / "state.jsonl")
    assert tuner.run(found, state, None, seconds=0.0) == 3 and not said
    assert tuner.run(found, SearchState(tmp_path / "state.jsonl"), None) == 0
    rows = [json.loads(x) for x in (tmp_path / "state.jsonl").read_text().splitlines()]
    tried = [result for row in rows for _, result in row["tried"]]
    tried = [x for x in tried if not x.startswith("not confirmed")]
    assert len(tried) == 6 and all(x.endswith((" us", "present")) for x in tried), tried
    assert len(said) == len(found) == len((tmp_path / "state.jsonl").read_text().splitlines())
    assert "all kernels" in tuner.verify()
    assert len(read(file, "sm_90").kernels) == len(tuner.written)
    again: list[str] = []
    tuner = Tuner(call, file, read(file, "sm_90"), provenance, runs=1, say=again.append)
    assert tuner.run(found, SearchState(tmp_path / "state.jsonl"), None) == 0 and not again


def test_the_program_searches_and_takes_up_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but the device: every candidate of one kernel is much faster than it was."""
    monkeypatch.setattr(program, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "the interpreter")
    monkeypatch.setattr(
        search, "subjects", lambda *words: [s for s in subjects(*words) if s.name == SCAN]
    )
    monkeypatch.setattr(tune, "changed", lambda before, after: (before[0].us, 0.5 * before[0].us))
    file = tmp_path / "own.json"
    words = ["simple_gla", "--shape", "1,33,1,16,64", "--chunk-size", "32", "--dtype", "fp32"]
    words += ["--tune", "--jobs", "0", "--runs", "1", "--database", str(file), "--commit", "abc"]
    assert program.main(words) == 0
    out = capsys.readouterr().out
    assert "1 of 1 kernels to tune" in out and "1 entries written" in out
    [entry] = read(file, "sm_90").kernels.values()
    assert (entry.name, entry.measured.commit) == ("simple_gla_scan", "abc")
    assert program.main(words) == 0
    assert "0 of 1 kernels to tune" in capsys.readouterr().out
    again = call_of("simple_gla", file)
    assert results(again)["forward"]["scan"] in ("tuned", "nearest bucket")


def test_results_out_of_bounds_are_no_candidates(tmp_path: Path) -> None:
    call = call_of("simple_gla", tmp_path / "own.json")
    provenance = Provenance("2026-01-01", "abc", "the interpreter")
    tuner = Tuner(call, tmp_path / "own.json", Database("sm_90"), provenance, runs=1)
    right = [x.clone() for x in tuner.wanted("forward")]
    assert tuner.difference("forward", right) == ""
    right[0][0, 20] += 0.1
    assert "result 0 differs" in tuner.difference("forward", right)
