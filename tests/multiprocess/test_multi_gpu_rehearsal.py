"""The script for several GPUs on CPU processes: steps, limits, resumption, rows, summary."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scaling_runs import multi_gpu, multi_gpu_check  # noqa: E402
from scaling_runs.machine import Machine  # noqa: E402
from scaling_runs.multi_gpu_ranks import WRONG, Limits, run_ranks  # noqa: E402
from scaling_runs.multi_gpu_rows import Rows  # noqa: E402
from scaling_runs.multi_gpu_sizes import FULL, SIZES  # noqa: E402
from scaling_runs.multi_gpu_summary import summary  # noqa: E402

SCRIPT = ROOT / "scaling_runs" / "multi_gpu.sh"
MACHINE = Machine("2026-01-02", "abc", "cpu", "2.0", "3.0")
Row = dict[str, str]


def rehearse(folder: Path, *words: str, seconds: float) -> tuple[str, list[Row]]:
    """Output and rows of a rehearsal."""
    command = [str(SCRIPT), "--rehearse", "--results", str(folder), "--commit", "abc", *words]
    command += ["--logs", str(folder / "logs")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with (folder / "multi_gpu_cpu.csv").open(newline="") as file:
        return ran.stdout, list(csv.DictReader(file))


def of_step(rows: list[Row], step: str) -> dict[tuple[str, str, str], Row]:
    return {(r["engine"], r["strategy"], r["variant"]): r for r in rows if r["step"] == step}


def test_shortest_rehearsal(tmp_path: Path) -> None:
    """Both engines are right on two ranks, and the other rank hears of one that is killed."""
    words = ("--short", "--ranks", "2", "--only", "check,killed_device", "--copy", "copy")
    copied = tmp_path / "copy"
    text, rows = rehearse(tmp_path, *words[:-1], str(copied), seconds=100)
    assert "[check] ok" in text and "[killed_device] ok" in text
    checks = of_step(rows, "check")
    assert {key[0] for key in checks} == {"device", "host"}
    for row in checks.values():
        assert row["status"] == "ok" and 0 < float(row["value"]) < 1
        assert row["first"] and row["last"]
    [killed] = of_step(rows, "killed").values()
    assert killed["status"] == "ok" and float(killed["value"]) < 20
    log = (tmp_path / "logs" / "killed_device.0.log").read_text()
    said = ("the group is ready", "3 quiet steps are done", "RemoteRankError", "at rest")
    assert all(text in log for text in said), log
    assert "is killed now" in (tmp_path / "logs" / "killed_device.1.log").read_text()
    names = {path.name for path in copied.iterdir()}
    assert names == {"multi_gpu_cpu.csv", "multi_gpu_cpu.txt", "multi_gpu_logs.txt"}


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_whole_rehearsal(tmp_path: Path) -> None:
    text, rows = rehearse(tmp_path, "--ranks", "3", seconds=2300)
    for step in multi_gpu.STEPS:
        assert f"[{step.name}] ok" in text, text
    assert {row["status"] for row in of_step(rows, "check").values()} == {"ok"}
    assert {row["status"] for row in of_step(rows, "train").values()} == {"ok"}
    assert {row["status"] for row in of_step(rows, "killed").values()} == {"ok"}
    with (tmp_path / "weak_scaling_cpu.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert {row["status"] for row in points} == {"ok", "refused"}
    refused = {row["system"] for row in points if row["status"] == "refused"}
    assert refused <= {"fla_cp", "ulysses"}
    measured = {row["system"] for row in points if row["status"] == "ok"}
    assert {"chain_device", "chain", "lasp2", "lasp", "ideal_best"} <= measured


# -- processes of a step --------------------------------------------------------------------------


def start(tmp_path: Path, program: str, limits: Limits, ranks: int = 2, **settings: bool):
    logs = [tmp_path / f"{rank}.log" for rank in range(ranks)]
    head = "import os, sys, time; rank = int(os.environ['RANK']); "
    words = ["-c", head + program]
    return run_ranks(words, ranks, dict(os.environ), logs, limits, tmp_path, **settings), logs


def test_ranks_that_end_well_or_found_something_wrong(tmp_path: Path) -> None:
    limits = Limits(30, 30)
    outcome, logs = start(tmp_path, "print(os.environ['WORLD_SIZE'], rank)", limits)
    assert (outcome.status, outcome.codes) == ("ok", (0, 0))
    assert logs[1].read_text() == "2 1\n"
    assert start(tmp_path, f"sys.exit({WRONG})", limits)[0].status == "wrong"


def test_ranks_that_hang_or_are_late_are_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    assert start(tmp_path, "time.sleep(60)", Limits(30, 1.0))[0].status == "stuck"
    noisy = "[(print(1, flush=True), time.sleep(0.1)) for _ in range(600)]"
    outcome, _ = start(tmp_path, noisy, Limits(2.0, 30))
    assert outcome.status == "late" and None not in outcome.codes
    assert time.monotonic() - begin < 20


def test_a_rank_that_may_die(tmp_path: Path) -> None:
    program = "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(0.5)"
    assert start(tmp_path, program, Limits(30, 30), one_may_die=True)[0].status == "ok"
    both = "sys.exit(1)"
    assert start(tmp_path, both, Limits(30, 30), one_may_die=True)[0].status == "failed"


# -- rows, sizes, summary -------------------------------------------------------------------------


def test_rows_of_the_present_commit_are_known(tmp_path: Path) -> None:
    rows = Rows(tmp_path, MACHINE, 4, "full", "gloo")
    name = {"engine": "device", "strategy": "chain", "variant": "gla"}
    assert not rows.known("check", **name)
    rows.put("check", "begun", **name)
    assert Rows(tmp_path, MACHINE, 4, "full", "gloo").known("check", **name)
    assert not Rows(tmp_path, MACHINE, 8, "full", "gloo").known("check", **name)
    other = Machine("2026-01-02", "def", "cpu", "2.0", "3.0")
    assert not Rows(tmp_path, other, 4, "full", "gloo").known("check", **name)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_points_of_a_real_run(ranks: int) -> None:
    main, more, long = FULL.weak(ranks), FULL.weak_more(ranks), FULL.long(ranks)
    for stages in (main, more, long):
        points = stages.points()
        assert len(set(points)) == len(points) and {p.P for p in points} <= set(stages.ranks)
        assert max(p.P for p in points) <= ranks
    shapes = {(p.B, p.H, p.K, p.T) for p in main.points()}
    assert shapes == {(4, 32, 128, 32768), (1, 32, 128, 32768)}
    assert {p.total for p in long.points()} == {262144}
    assert {p.P for p in more.points()} == {1, ranks, *(n for n in (2, 4) if n < ranks)}
    systems = {p.system for p in main.points()}
    assert {"chain_device", "chain", "lasp2", "lasp2_naive", "lasp", "ulysses"} <= systems
    assert {"ideal_same_plan", "ideal_best"} <= systems
    other = FULL.other_code(ranks).points()
    assert {p.system for p in other} == {"fla_cp"} and not {"fla_cp"} & systems
    assert {p.variant for p in other} >= {"gated_delta_rule", "kda"}


def test_what_tells_most_is_timed_first() -> None:
    points = FULL.weak(2).points()
    first = points[: 4 * len(FULL.few)]
    few = {"chain_device", "chain", "ideal_same_plan", "ideal_best", "lasp2"}
    assert {(p.system, p.B, p.T) for p in first} == {(name, 4, 32768) for name in few}
    assert {p.variant for p in first} == {"gated_delta_rule", "simple_gla"}
    assert {p.direction for p in first} == {"fwd", "fwdbwd"}
    assert {p.system for p in points[: len(few)]} == few


def test_another_attempt_begins_with_other_systems() -> None:
    again = FULL.turned()
    assert again.engines == ("host", "device")
    first = [p.system for p in again.weak(8).points()[: len(FULL.few)]]
    assert first == list(FULL.few[::-1]) and first[-1] == "chain_device"
    assert set(again.weak_more(8).points()) == set(FULL.weak_more(8).points())


def test_steps_fit_into_nine_minutes() -> None:
    """What tells whether all is right, and the times that tell most, fit even if each takes all it
    may; the steps after them have limits too, so that none costs the others their time."""
    limits = {step.name: step.limit for step in multi_gpu.STEPS}
    names = list(limits)
    before = names[: names.index("long")]
    assert {"check", "weak", "killed_device", "killed_host", "train", "links"} <= set(before)
    assert sum(limits[name] for name in before) + multi_gpu.RESERVE < 540
    assert names[-1] == "weak_more" and limits["other_code"] <= 60
    assert set(SIZES) == {"full", "rehearsal", "short", "one_gpu"}


def test_cases_of_a_check_in_order() -> None:
    """Chain and hierarchical of the leading variants come first, by both engines."""
    found = multi_gpu_check.cases(FULL, FULL.engines)
    every = [(case["engine"], case["variant"], case["strategy"]) for case in found]
    half = len(FULL.checked) * len(FULL.strategies)
    assert len(set(every)) == len(every) == 2 * half
    first = every[: 2 * 2 * len(FULL.leading)]
    assert {case[2] for case in first} == {"chain", "hierarchical"}
    assert [case[0] for case in first] == ["device"] * 6 + ["host"] * 6
    rest = [case[0] for case in every[len(first) :]]
    assert rest == ["device"] * (half - 6) + ["host"] * (half - 6)
    assert {case[1] for case in every} == set(FULL.checked)


def keep(folder: Path, **files: dict[str, object]) -> Row:
    """The row that is kept of what ranks left behind."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    rows = Rows(folder, MACHINE, 2, "full", "gloo")
    multi_gpu.keep_killed(rows, folder, "killed_host", 2)
    [row] = [row for row in rows.of_this_run() if row["step"] == "killed"]
    return row


def test_a_rank_that_hears_late_or_never_is_wrong(tmp_path: Path) -> None:
    dead: dict[str, object] = {"at": 100.0, "rank": 1}
    error = "RemoteRankError: the process of rank 1 has ended"
    told: dict[str, object] = {"at": 101.5, "error": error}
    row = keep(tmp_path, killed=dead, rank0={**told, "rest": 102.0})
    assert (row["status"], row["value"]) == ("ok", "1.5")
    assert "1 of 1 others raised" in row["note"] and "of 1 came to rest, in 2.0 s" in row["note"]
    row = keep(tmp_path, killed=dead, rank0=told)
    assert row["status"] == "wrong" and "of 0 came to rest" in row["note"]
    row = keep(tmp_path, killed=dead, rank0={**told, "error": "nothing", "rest": 102.0})
    assert row["status"] == "wrong" and row["note"].startswith("0 of 1 others")


def test_multicast_is_off() -> None:
    text = SCRIPT.read_text()
    for name, value in multi_gpu.QUIET.items():
        assert f"{name}={value}" in text


def test_help() -> None:
    ran = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 0 and "multi_gpu.sh --rehearse" in ran.stdout
    assert os.access(SCRIPT, os.X_OK) and "set -euo pipefail" in SCRIPT.read_text()


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--only", "chek"], "chek is not among"),
        (["--short"], "--short goes with --rehearse"),
        (["--rehearse", "--results", "here", "--ranks", "1"], "wants at least 2 GPUs"),
        (["--rehearse", "--results", "here", "--one-gpu"], "give one of them"),
        (["--rehearse"], "give its rows a folder with --results"),
    ):
        with pytest.raises(SystemExit):
            multi_gpu.parse(words)
        assert said in capsys.readouterr().err


def test_summary(tmp_path: Path) -> None:
    """One line a place with both ideals and the best of each family; what was wrong is shown."""
    rows = Rows(tmp_path, MACHINE, 8, "full", "gloo")
    rows.put("check", "ok", engine="device", strategy="chain", variant="gla", value=0.1)
    rows.put("check", "wrong", engine="host", strategy="chain", variant="gla", value=7.0)
    path = tmp_path / "weak.csv"
    place = {"variant": "gated_delta_rule", "mode": "strong", "P": "8", "T": "32768", "B": "1"}
    place |= {"direction": "fwd", "total": "262144", "world": "8", "p80_ms": "", "note": ""}
    times = {"ideal_best": 1.0, "ideal_same_plan": 1.25, "chain_device": 1.5, "lasp2": 2.0}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*place, "system", "median_ms", "status"])
        writer.writeheader()
        for system, ms in times.items():
            writer.writerow({**place, "system": system, "median_ms": f"{ms}", "status": "ok"})
    short, whole = summary(rows.of_this_run(), path, 8)
    assert "-- check: 1 ok, 1 wrong" in short and "host    chain" in short
    assert "chain_device 1.500" in short and "+20.0%" in short and "lasp2 2.000" in short
    assert "262144 tokens, fwd: chain_device 1.500 ms; on 8 H200: FlashQLA 1.68 ms" in short
    assert short in whole and "+50.0%" in whole
