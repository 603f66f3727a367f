"""`flexla-dist bench` on a GPU: timings, and a search of one small shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexla_dist.bench.program import main
from flexla_dist.compiler.tuned.database import read

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
CALL = ["simple_gla", "--shape", "1,2048,4,64,64"]


def test_timings_of_every_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*CALL, "--json", "--database", str(tmp_path / "none.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["p20_ms"] <= found["median_ms"] <= found["p80_ms"]
    assert {row["direction"] for row in found["kernels"]} == {"forward", "backward"}
    kernels = [row for row in found["kernels"] if not row["kernel"].startswith("torch ")]
    assert all(row["us"] > 0 and row["bytes"] > 0 and row["tbs"] > 0 for row in kernels)
    assert all(row["configuration"] for row in kernels)
    assert sum(row["us"] for row in found["kernels"]) < 2e3 * found["p80_ms"]


def test_a_search_of_one_small_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    from flexla_dist.compiler.executor.choosing import USUAL_ARCH, arch_of

    arch = arch_of(torch.device("cuda", 0))
    if arch != USUAL_ARCH:
        pytest.skip(f"written for {USUAL_ARCH}, this is {arch}")
    file, state = tmp_path / "own.json", tmp_path / "state.jsonl"
    words = [*CALL, "--database", str(file), "--state", str(state), "--commit", "test"]
    assert main([*words, "--tune", "--jobs", "8"]) == 0
    out = capsys.readouterr().out
    assert "all kernels:" in out and "0 kernels left" in out, out
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    tried = [result for row in rows for _, result in row["tried"]]
    assert not [x for x in tried if x.startswith("failed") and "OutOfResources" not in x], tried
    found = read(file, arch)
    assert all(e.measured.us < 0.97 * e.measured.before_us for e in found.kernels.values())
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tuned = {row["kernel"] for row in report["kernels"] if row["configuration"] == "tuned"}
    names = {e.name.removeprefix("simple_gla_") for e in found.kernels.values()}
    assert names <= tuned or not names
