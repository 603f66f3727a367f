"""A small form of the run over a long sequence."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.ranks import run_ranks
from scaling_runs.long_context import main
from scaling_runs.long_run import LongRun, RunProblem, by_tokens, run_long, run_shard

SHORT: dict[str, Any] = {"tokens": 2048, "ranks": 4, "block": 128, "memory": 512}


@pytest.mark.parametrize("variant", ["simple_gla", "gated_delta_rule"])
def test_run_equals_the_streams(variant: str) -> None:
    found = run_long(LongRun(variant, dtype="float64", **SHORT))
    names = ["o", "state", *(f"d{name}" for name in get_variant(variant).inputs)]
    assert sorted(found.errors) == sorted(names)
    assert found.within(torch.float64), found.errors


def test_a_shard_without_the_state_before_it_is_seen(tmp_path: Path) -> None:
    case = LongRun("gated_delta_rule", dtype="float64", **SHORT)
    run_ranks(run_shard, 4, case, str(tmp_path))
    assert by_tokens(case, str(tmp_path))["o"][0] < 1e-12
    blocks = [case.inputs(index) for index in range(2 * case.blocks, 3 * case.blocks)]
    inputs = {name: torch.cat([block[name] for block in blocks], 1) for name in blocks[0]}
    path = tmp_path / "rank2.pt"
    found = torch.load(path)
    found["o"] = compile(get_variant(case.variant))(**inputs, **case.scalars)[0]
    torch.save(found, path)
    ratio, worst = by_tokens(case, str(tmp_path))["o"]
    assert ratio > 1e-2 and worst > 1e-1


def test_rows_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run", "--tokens", "1024", "--ranks", "2", "--block", "128"]
    words += ["--variants", "simple_gla", "--memory-tokens", "256", "--results", str(tmp_path)]
    assert main(words) == 0
    [row] = csv.DictReader((tmp_path / "long_context_cpu.csv").open())
    assert row["status"] == "ok" and row["T"] == "1024" and row["P"] == "2"
    assert 0 < float(row["err_dk"]) < 1e-5 and row["err_dbeta"] == ""
    assert main([*words, "--block", "100"]) == 2
    assert "whole blocks" in capsys.readouterr().err
    with pytest.raises(RunProblem, match="gla"):
        LongRun("gla", 1024, 2)
