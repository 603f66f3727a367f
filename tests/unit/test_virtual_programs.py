"""Programs that measure virtual ranks, with made-up times: order, rows, going on, time limits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flexla_dist.testing.budget import BOUNDS
from flexla_dist.testing.inputs import make_inputs
from scaling_runs import local_exchange, virtual_bits, virtual_ranks
from scaling_runs.machine import Machine
from scaling_runs.model.__main__ import main as model
from scaling_runs.model.local_heap import exchange_rows
from scaling_runs.virtual_judge import differs, first_heads, judge, reference
from scaling_runs.virtual_ranks import Point, Program, points
from scaling_runs.virtual_run import Outcome
from scaling_runs.weak_cases import compiled

from .test_local_heap import DEVICE

MACHINE = Machine("2026-01-02", "abc", "Some GPU", "2.0", "3.0")


class Exchanger:
    def __init__(self, delay_ns: int = 0, waits: bool = True) -> None:
        self.delay_ns, self.waits = delay_ns, waits

    def check(self) -> None:
        pass


class Measurement:
    """Double: a call takes 1 ms, what an exchange adds is half of its delays."""

    made: ClassVar[list[tuple[str, int, int]]] = []

    def __init__(self, options: argparse.Namespace, variant: str, ranks: int, tokens: int):
        self.made.append((variant, ranks, tokens))
        self.tokens, self.ranks = tokens, argparse.Namespace(ranks=ranks)

    def exchanger(self, strategy: str, **settings: Any) -> Exchanger:
        return Exchanger(**settings)

    def checks(self, strategy: str) -> dict[str, object]:
        return {"rel_err": 0.001, "used": 0.5, "same_bits": "same", "ok": "yes"}

    def timed(self, direction: str, exchanger: Exchanger | None) -> dict[str, object]:
        ms = 1.0
        if exchanger is not None and exchanger.waits:
            hops = (self.ranks.ranks - 1) * (1 if direction == "fwd" else 2)
            ms += 1e-3 * hops * (2.0 + 0.5e-3 * exchanger.delay_ns)
        return {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "launch": "graph"}


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    Measurement.made.clear()
    monkeypatch.setattr(virtual_ranks, "Measurement", Measurement)
    monkeypatch.setattr(virtual_ranks, "state_mib", lambda m: 2.0)


def options(folder: Path, *words: str) -> argparse.Namespace:
    return virtual_ranks.parse([*words, "--results", str(folder), "--variants", "gla"])


def test_the_most_important_comes_first(tmp_path: Path) -> None:
    found = points(options(tmp_path, "--ranks", "4,8", "--tokens", "64,32,128"))
    assert [(p.tokens, p.ranks) for p in found] == [
        (64, 4), (64, 8), (32, 4), (32, 8), (128, 4), (128, 8),
    ]  # fmt: skip
    assert found[0] == Point("gla", 4, 64)


def test_rows(tmp_path: Path) -> None:
    given = options(tmp_path, "--delays", "0,60", "--strategies", "chain")
    program = Program(given, MACHINE)
    assert program.run(Point("gla", 4, 64))
    rows = program.store.rows()
    assert [r["impl"] for r in rows[:4]] == ["ideal_best", "ideal_same_plan", "ours", "ours"]
    assert len(rows) == 8 and {r["groups"] for r in rows} == {"", "32"}
    first, late = rows[2:4]
    assert float(first["hop_us"]) == pytest.approx(2.0) and first["slope"] == ""
    assert float(late["slope"]) == pytest.approx(0.5) and late["ok"] == "yes"
    assert float(rows[7]["slope"]) == pytest.approx(0.5, rel=1e-2)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    given = options(tmp_path, "--delays", "0", "--strategies", "chain,all_gather")
    Program(given, MACHINE).run(Point("gla", 4, 64))
    given.delays = (0, 30)
    again = Program(given, MACHINE)
    again.run(Point("gla", 4, 64))
    assert Measurement.made == [("gla", 4, 64)] * 2 and len(again.store.rows()) == 14
    slopes = [r["slope"] for r in again.store.rows() if r["delay_us"] == "30"]
    assert all(float(slope) == pytest.approx(0.5, rel=1e-2) for slope in slopes)
    Program(given, MACHINE).run(Point("gla", 4, 64))
    assert len(Measurement.made) == 2  # all known
    given.seconds = 0.0
    assert not Program(given, MACHINE).run(Point("gla", 8, 64))


def test_the_model_reads_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of both programs, of the columns that they write, are what the comparison takes."""
    given = options(tmp_path, "--ranks", "2,4", "--strategies", "chain,all_gather")
    program = Program(given, MACHINE)
    for point in points(given):
        program.run(point)
    DEVICE.keep(tmp_path, "some_gpu")
    store = exchange_rows(tmp_path, "some_gpu")
    for case in local_exchange.cases(local_exchange.parse(["--heads", "1", "--kinds", "scalar"])):
        added = (
            1e6
            * DEVICE.estimate(
                case.strategy, case.ranks, local_exchange.Payload.of_heads(case.kind, case.heads)
            ).total
        )
        row = {**MACHINE.columns(), **case.columns, "K": 128, "apart_us": 5.0}
        store.put(row | {"median_us": 5.0 + added, "p20_us": 5.0, "p80_us": 9.0, "hop_us": 1.0})
    words = ["--local-heap", "--host", "some_gpu", "--results", str(tmp_path)]
    assert model(words) == 0
    said = capsys.readouterr().out
    assert "predicted against measured: 9 of 9 within 25%" in said and "whole calls" in said


def test_exchanges_by_importance() -> None:
    found = local_exchange.cases(local_exchange.parse([]))
    assert len(found) == len(set(found)) == 72
    assert found[0] == local_exchange.Case("scalar", 32, 4, "chain")
    assert {c.ranks for c in found[:12]} == {2, 4, 8}


def test_few_samples_are_enough_where_they_agree() -> None:
    assert local_exchange.steady([10.0, 10.1, 10.0, 10.2, 10.1])
    assert not local_exchange.steady([10.0, 12.0, 10.0, 13.0, 10.1])


def test_points_of_bits() -> None:
    assert virtual_bits.parse(["--points", "4x1000,2x64"]).points == [(4, 1000), (2, 64)]
    for words in (["--points", "4"], ["--rehearse"], ["--variants", "nothing"]):
        with pytest.raises(SystemExit):
            virtual_bits.parse(words)


@pytest.mark.parametrize("variant", ["gated_delta_rule", "mamba2"])
def test_results_are_judged(variant: str) -> None:
    """Heads that the reference has; a wrong chunk, NaN and one bit are seen."""
    op = compiled(variant)
    call = make_inputs(op.spec, batch=1, tokens=96, heads=4, value_heads=4, dtype=torch.float32)
    seed = torch.randn(call.inputs["v"].shape, generator=torch.Generator().manual_seed(1))
    output = op(**call.inputs, **call.params, **call.scalars)[0]
    leaves = {**call.inputs, **call.params}
    grads = torch.autograd.grad(output, list(leaves.values()), seed)
    found = Outcome(output.detach(), dict(zip(leaves, grads, strict=True)))
    want = reference(op, *first_heads(call, seed, 2))
    assert want["o"].shape[2] == 2
    errors = judge(found, want, call, torch.float32)
    assert errors.good and set(errors.ratios) >= {"o", "dq", "dk", "dv"}
    wrong = Outcome(found.output.clone(), found.gradients)
    assert not differs(found, wrong)
    wrong.output[:, 70:, 0] *= 1 + 20 * BOUNDS[torch.float32].output
    assert differs(found, wrong) and not judge(wrong, want, call, torch.float32).good
    wrong.output[0, 0, 0, 0] = torch.nan
    assert not judge(wrong, want, call, torch.float32).good and differs(found, wrong)
    assert not differs(wrong, wrong)
