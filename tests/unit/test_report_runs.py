"""What the report says of every system: measured, modelled, not run; and of commits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs import report
from scaling_runs.model.__main__ import PREDICTED, PREDICTED_KEY
from scaling_runs.model.emulated import ROW_COLUMNS, ROW_KEY
from scaling_runs.report_data import read_report
from scaling_runs.report_runs import commit_words, system_runs, unrun_words, without_run
from scaling_runs.rows import RowStore
from scaling_runs.virtual_ranks import COLUMNS as VIRTUAL_COLUMNS
from scaling_runs.virtual_ranks import KEY as VIRTUAL_KEY
from scaling_runs.weak_rows import COLUMNS, KEY

CALL = {
    "variant": "gla", "T": 64, "B": 1, "H": 2, "K": 8, "V": 8, "dtype": "float32",
    "direction": "fwd", "state_bytes": 512, "date": "2026-01-02",
}  # fmt: skip


def measured(folder: Path, system: str, P: int, status: str = "ok", **columns: object) -> None:
    times = {"median_ms": "2.0", "p20_ms": "1.9", "p80_ms": "2.1"} if status == "ok" else {}
    row = {"kind": "measured", "gpu": "x", "nodes": 1, "mode": "weak", "placement": "barrier"}
    row |= {"commit": "abc", "system": system, "P": P, "total": 64 * P, "status": status}
    store = RowStore(folder / "weak_scaling_x.csv", COLUMNS, KEY)
    store.put({**row, **CALL, **times, **columns})


def modelled(folder: Path, system: str, P: int) -> None:
    row = {"kind": "modelled", "cluster": "h20_ib", "system": system, "P": P, "ms": "3.0"}
    store = RowStore(folder / "predicted_h20_ib.csv", PREDICTED, PREDICTED_KEY)
    store.put({**row, **CALL, "commit": "abc"})


def virtual(folder: Path, strategy: str) -> None:
    store = RowStore(folder / "virtual_ranks_h200.csv", VIRTUAL_COLUMNS, VIRTUAL_KEY)
    store.put({"gpu": "H200", "impl": "ours", "strategy": strategy, "W": 4})


def test_states_come_from_rows(tmp_path: Path) -> None:
    measured(tmp_path, "chain", 2)
    measured(tmp_path, "chain", 4)
    measured(tmp_path, "fla_cp", 2, "refused", note="no FLA here")
    measured(tmp_path, "lasp", 2, "failed")
    modelled(tmp_path, "chain", 128)
    modelled(tmp_path, "fused_chain", 128)
    virtual(tmp_path, "chain")
    emulated = RowStore(tmp_path / "emulated_hosts_cpu.csv", ROW_COLUMNS, ROW_KEY)
    emulated.put({"system": "hierarchical"})
    runs = system_runs(tmp_path, read_report(tmp_path).lines)
    assert runs["chain"].state == "measured and modelled"
    assert runs["chain"].cells() == ("x, P = 2, 4", "h20_ib, P = 128", "")
    assert runs["fused_chain"].state == "modelled"
    assert runs["fused_chain"].cells()[2] == "virtual ranks of one device: h200"
    assert runs["fused_hierarchical"].cells() == ("", "", "not run")
    assert runs["fla_cp"].cells()[2] == "x: refused (no FLA here)"
    assert runs["lasp"].cells()[2] == "x: failed"
    assert runs["zeco"].state == runs["hierarchical"].state == "not run"
    assert runs["hierarchical"].cells()[2] == "paced ranks on emulated hosts: cpu"
    names = ["chain", "fused_chain", "fused_hierarchical", "fused_chain"]
    assert without_run(names, runs) == ["fused_chain", "fused_hierarchical"]
    said = unrun_words(names, runs)
    assert "`fused_chain`, `fused_hierarchical` (fused_chain: on virtual ranks" in said
    assert unrun_words(["chain"], runs) == ""


def test_a_device_run_stands_behind_a_fused_program(tmp_path: Path) -> None:
    measured(tmp_path, "chain_device", 8)
    modelled(tmp_path, "fused_chain", 128)
    runs = system_runs(tmp_path, read_report(tmp_path).lines)
    assert runs["fused_chain"].run and runs["fused_chain"].state == "measured and modelled"
    assert not runs["fused_hierarchical"].run


def test_commits(tmp_path: Path) -> None:
    measured(tmp_path, "chain", 2)
    lines = read_report(tmp_path).measured()
    assert commit_words(lines) == "All 1 measured times are of committed code."
    assert commit_words([]) == "Nothing was measured."
    measured(tmp_path, "zeco", 2, commit="abc+")
    measured(tmp_path, "lasp2", 2, commit="unknown")
    said = commit_words(read_report(tmp_path).measured())
    assert "1 of 3 measured times are of code with changes that were not committed (abc+)" in said
    assert "1 of 3 measured times are of an unknown commit" in said


def test_the_page_says_it(tmp_path: Path) -> None:
    measured(tmp_path, "chain", 2, commit="abc+")
    modelled(tmp_path, "chain", 128)
    modelled(tmp_path, "fused_chain", 128)
    assert report.main(["--results", str(tmp_path), "--no-plots"]) == 0
    page = (tmp_path / "scaling.md").read_text()
    assert "1 of 1 measured times are of code with changes" in page
    assert "2026-01-02, abc+ (+: changes that were not committed)" in page
    assert "| `chain` | measured and modelled | x, P = 2 | *h20_ib, P = 128* |  |" in page
    assert "| `fused_chain` | modelled |  | *h20_ib, P = 128* | not run |" in page
    after = page.split("## Modelled")[1]
    assert "Modelled without a measured run of ranks with a device each: `fused_chain`." in after
