"""Tuning databases: files, buckets, look-up, stale entries, and what says what was used."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flexla_dist.compiler.aot import CompileTask, describe_call, record_launches
from flexla_dist.compiler.executor.choosing import (
    Tuned,
    buckets_of,
    choose,
    kernel_key,
    misfit,
    structure_of,
)
from flexla_dist.compiler.executor.launch import Launch
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.segments import Cutting
from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor
from flexla_dist.compiler.tuned.database import (
    Database,
    KernelEntry,
    Key,
    Measured,
    ScanEntry,
    package_file,
    read,
    write,
)
from flexla_dist.errors import TuningError, TuningWarning
from flexla_dist.ops.op import compile
from flexla_dist.ops.plan import plan_of

from .compiled import graphs_of

NOTED = Measured(10.0, 12.5, "2026-01-01", "abc", "a GPU")
KEY = Key("0123456789abcdef", "bfloat16", "C=64 K=128 V=128", "many", "long")
SCALES = {"K": 128, "V": 128}


def entry(key: Key = KEY, **changes: Any) -> KernelEntry:
    return dataclasses.replace(
        KernelEntry(key, "gla_output", 32, 8, 2, None, 1024, NOTED), **changes
    )


def described(name: str = "gla", tokens: int = 16384, heads: int = 32, **more: Any) -> Problem:
    return describe_call(graphs_of(name), tokens=tokens, heads=heads, sizes=SCALES, **more)


def built_of(executor: TritonExecutor, problem: Problem, direction: str = "forward") -> Any:
    return executor.built(direction, executor.uneven_dims(problem))


def database_of(
    tmp_path: Path, executor: TritonExecutor, problem: Problem, kernel: str, **changes: Any
) -> Path:
    """A file with one entry, for a kernel of a problem."""
    [built] = [b for b in built_of(executor, problem) if b.kernel.name == kernel]
    key = kernel_key(problem, built.kernel, built.emitted, buckets_of(problem))
    database = Database("sm_90")
    database.add(entry(key, name=built.emitted.name, **changes))
    write(database, tmp_path / "own.json")
    return tmp_path / "own.json"


def chosen(file: Path | None, problem: Problem, kernel: str, name: str = "gla") -> str:
    tuned = Tuned(file) if file else Tuned(measured=False)
    executor = TritonExecutor(graphs_of(name), tuned)
    return str(executor.configurations(problem, "forward")[kernel])


# -- files ----------------------------------------------------------------------------------------


def test_a_file_has_one_sorted_entry_a_line_and_reads_as_it_was_written(tmp_path: Path) -> None:
    database = Database("sm_90")
    later = entry(dataclasses.replace(KEY, load="few"), registers=128, shared=None)
    scans = ScanEntry(KEY, "gla_scan", 3, NOTED)
    for each in (
        entry(),
        later,
        scans,
        entry(name="a_kernel", key=dataclasses.replace(KEY, structure="f")),
    ):
        database.add(each)
    write(database, tmp_path / "folder" / "sm_90.json")
    text = (tmp_path / "folder" / "sm_90.json").read_text()
    assert read(tmp_path / "folder" / "sm_90.json", "sm_90") == database
    assert text.count("\n") == text.count('"structure"') + 7
    assert text.index("a_kernel") < text.index('"few"') < text.index('"many"', text.index('"few"'))
    write(read(tmp_path / "folder" / "sm_90.json", "sm_90"), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == text


def test_the_database_of_the_package_is_right() -> None:
    found = read(package_file("sm_90"), "sm_90")
    assert found.text() == package_file("sm_90").read_text()
    assert all(e.measured.us < e.measured.before_us for e in found.kernels.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tile": 48}, "tile is 48; expected a power of two"),
        ({"warps": 3}, "warps is 3"),
        ({"stages": 0}, "stages is 0"),
        ({"registers": 300}, "registers is 300"),
        ({"load": "much"}, "load is 'much'; expected one of few, some, many"),
        ({"unknown": 1}, "unknown ['unknown']"),
    ],
)
def test_an_entry_that_no_kernel_can_have_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    database = Database("sm_90")
    database.add(entry())
    data = json.loads(database.text())
    data["kernels"][0] |= change
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TuningError, match="kernels\\[0\\]") as error:
        read(path, "sm_90")
    assert said in str(error.value) and "remove the entry" in str(error.value)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert read(path, "sm_90") == Database("sm_90")
    path.write_text("{")
    with pytest.raises(TuningError, match="is not JSON"):
        read(path, "sm_90")
    write(Database("sm_80"), path)
    with pytest.raises(TuningError, match="has arch 'sm_80'; expected 'sm_90'"):
        read(path, "sm_90")


# -- look-up --------------------------------------------------------------------------------------


def test_buckets_of_calls() -> None:
    assert buckets_of(described()) == ("many", "few", "long")
    assert buckets_of(described(tokens=1 << 20)) == ("many", "few", "long")
    assert buckets_of(described(tokens=4096)) == ("some", "few", "short")
    assert buckets_of(described(tokens=1024, heads=4)) == ("few", "few", "short")
    assert buckets_of(described(batch=16, tokens=4096)) == ("many", "many", "long")


def test_the_structure_of_a_kernel_is_that_of_its_text_whatever_its_name() -> None:
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    kernels = built_of(executor, described())
    found = [structure_of(built.emitted) for built in kernels]
    assert len(set(found)) == len(found)
    emitted = kernels[0].emitted
    source = emitted.source.replace(emitted.name, "renamed")
    source = source.replace("\n", "  # a line of the user's\n")
    assert structure_of(dataclasses.replace(emitted, name="renamed", source=source)) == found[0]


def test_an_entry_is_used_for_its_bucket_and_for_near_ones_and_it_is_said(tmp_path: Path) -> None:
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    file = database_of(tmp_path, executor, described(), "scan", tile=32, warps=8, stages=1)
    assert chosen(file, described(), "scan") == "tuned"
    assert chosen(file, described(tokens=100_000), "scan") == "tuned"
    assert chosen(file, described(tokens=4096), "scan") == "nearest bucket"
    assert chosen(file, described(batch=16, tokens=4096), "scan") == "estimate"  # two buckets away
    assert chosen(file, described(dtype=torch.float16), "scan") == "estimate"
    assert chosen(file, described(), "before_scan") == "estimate"
    assert chosen(None, described(), "scan") == "estimate"


def test_what_a_launch_gets_is_the_entry(tmp_path: Path) -> None:
    graphs, problem = graphs_of("gla"), described()
    executor = TritonExecutor(graphs, Tuned(measured=False))
    file = database_of(
        tmp_path, executor, problem, "scan", tile=32, warps=8, stages=1, registers=168
    )
    wanted = ("gla_scan", 32, 8, 1, 168)
    for tuned, there in ((Tuned(file), True), (Tuned(measured=False), False)):
        found = record_launches(CompileTask(graphs, problem, tuned=(tuned,)), "forward")
        launches = {
            (x.kernel, x.keywords.get("tile_V"), x.keywords["num_warps"],
             x.keywords["num_stages"], x.keywords.get("maxnreg"))
            for x in found
        }  # fmt: skip
        assert (wanted in launches) is there


def test_no_length_of_a_bucket_makes_another_launch(tmp_path: Path) -> None:
    """What is compiled for T is compiled for every T of its bucket."""
    graphs = graphs_of("gla")
    executor = TritonExecutor(graphs, Tuned(measured=False))
    file = database_of(tmp_path, executor, described(), "scan", tile=32)
    keys = []
    for tokens in (16384, 65536, 131072):
        task = CompileTask(graphs, described(tokens=tokens), tuned=(Tuned(file),))
        keys.append({x.key for x in record_launches(task, "forward")})
    assert keys[0] == keys[1] == keys[2]


def test_the_users_file_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    file = database_of(tmp_path, executor, described(dtype=torch.float16), "scan", tile=32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    default = tmp_path / "cache" / "flexla_dist" / "tuned" / "sm_90.json"
    assert str(
        TritonExecutor(graphs_of("gla")).configurations(described(dtype=torch.float16), "forward")[
            "scan"
        ]
    ) == ("estimate")
    write(read(file, "sm_90"), default)
    assert str(
        TritonExecutor(graphs_of("gla")).configurations(described(dtype=torch.float16), "forward")[
            "scan"
        ]
    ) == ("tuned")


def test_segments_are_cut_as_measured(tmp_path: Path) -> None:
    problem = described()
    plain = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    database = Database("sm_90")
    database.add(ScanEntry(plain.scans_key(problem), "gla_scan", 4, NOTED))
    write(database, tmp_path / "own.json")
    tuned = TritonExecutor(graphs_of("gla"), Tuned(tmp_path / "own.json"))
    assert plain.cutting(problem) == Cutting(None, 2 * 132 // 64)
    assert tuned.cutting(problem) == Cutting(None, 4 * 132 // 64)
    assert tuned.cutting(described(tokens=4096, chunk_size=32)) == Cutting(None, 4 * 132 // 64)


# -- entries that cannot be used ------------------------------------------------------------------


def test_an_entry_with_another_tile_than_its_sums_need_is_not_used(tmp_path: Path) -> None:
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    problem = describe_call(graphs_of("gla"), tokens=16384, heads=32, sizes={"K": 128, "V": 16})
    file = database_of(tmp_path, executor, problem, "scan", tile=64)
    with pytest.warns(TuningWarning, match="gla_scan: an entry .* wider than the 16 there are"):
        said = chosen(file, problem, "scan")
    assert said.startswith("estimate (entry not used: its tile of 64 columns is wider")


def test_an_entry_that_needs_more_memory_than_there_is_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flexla_dist.compiler.executor.choosing.shared_limit", lambda _: 1000)
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    problem = described()
    [scan] = [b for b in built_of(executor, problem) if b.kernel.name == "scan"]
    schedule, launch = executor.forward_schedule, Launch(64, 4, 3)
    arguments = (problem, schedule, scan.kernel, launch, launch)
    assert misfit(*arguments, 1001) == "it needs 1001 bytes of shared memory, the device has 1000"
    assert misfit(*arguments, 1000) == ""
    assert "the device has 1000" in misfit(*arguments, None)  # by the estimate


def test_measured_configurations_that_do_not_fit_give_way_to_estimates(tmp_path: Path) -> None:
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    problem = described()
    executor.tuned = Tuned(database_of(tmp_path, executor, problem, "scan", tile=32))
    tries: list[tuple[int, str]] = []

    def once(shrink: int) -> str:
        source = executor.configurations(problem, "forward")["scan"].source
        tries.append((shrink, source))
        if source == "tuned":
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(300_000, 232_448, "shared memory")
        return source

    with pytest.warns(TuningWarning, match="needs 300000 bytes of shared memory"):
        assert executor._fitting(problem, "forward", once) == "estimate"
    assert tries == [(0, "tuned"), (0, "estimate")]
    said = plan_of(executor, problem).configurations
    assert any(name == "scan" and "entry not used: a kernel needs 300000" in s for name, s in said)
    assert executor.refusal(problem, "backward") == ""


# -- what says what was used ----------------------------------------------------------------------


def test_plans_and_explain_say_what_was_used(tmp_path: Path) -> None:
    from flexla_dist.compiler.explain import explain

    spec = graphs_of("gla").spec
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    file = database_of(tmp_path, executor, described(), "scan", tile=32, warps=8, registers=168)
    op = compile(spec, executor="triton", tuned=file)
    plan = dict(plan_of(op.executor("triton"), described()).configurations)
    assert plan["scan"] == "tuned" and plan["before_scan"] == "estimate"
    text = str(explain(op, tokens=16384, heads=32, K=128, stage="triton"))
    assert "8 tuned" in text and "est" in text
    assert "at most 168 registers a thread; configuration: tuned" in text
    page = explain(op, tokens=16384, heads=32, K=128).html()
    assert "<td class='n'>tuned</td>" in page
    near = str(explain(op, tokens=4096, heads=32, K=128, stage="triton"))
    assert "8 near" in near and "configuration: nearest bucket" in near


def test_choices_of_a_forced_kernel_are_its_own() -> None:
    executor = TritonExecutor(graphs_of("gla"), Tuned(measured=False))
    problem = described()
    launch = Launch(32, 8, 1)
    executor.tuned = Tuned(measured=False, forced={("forward", "scan"): launch})
    found = executor.configurations(problem, "forward")
    assert found["scan"].launch == launch and found["scan"].source == "forced"
    built: Built = built_of(executor, problem)[0]
    choice = choose(
        executor.tuned, problem, executor.forward_schedule, built.kernel, built.emitted,
        direction="backward",
    )  # fmt: skip
    assert choice.source == "estimate"
