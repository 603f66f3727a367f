"""The measuring programs without a GPU: arguments, result files, tables, order of work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexla_dist.spec.variants import variant_names

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "check_gpu.py",
    "single_gpu.py",
    "profile_kernels.py",
    "limits.py",
    "report_single.py",
    "host_time.py",
    "virtual_ranks.py",
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the programs would run here")

sys.path.insert(0, str(ROOT))
from scaling_runs import (  # noqa: E402
    bench,
    check_case,
    check_gpu,
    implementations,
    limits,
    measure,
    plain_chunk,
    profile_kernels,
    single_gpu,
)
from scaling_runs.check_cases import SIZES, TOKENS, Case, cases  # noqa: E402
from scaling_runs.machine import Machine, describe_machine  # noqa: E402
from scaling_runs.rows import RowStore, format_table  # noqa: E402

MACHINE = Machine("2026-01-02", "abc", "Some GPU", "2.0", "3.0")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings without a GPU: those of a call are made up."""

    def made_up(call: measure.Call, limit_s: float) -> measure.Timing:
        call()
        return measure.Timing(2.0, 1.9, 2.1, 30.0, 100.0)

    monkeypatch.setattr(bench, "measure_call", made_up)


# -- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program: str) -> None:
    command = [sys.executable, str(ROOT / "scaling_runs" / program), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert program in result.stdout


@no_gpu
@pytest.mark.parametrize("main", [check_gpu.main, single_gpu.main, limits.main])
def test_a_gpu_is_asked_for(main, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    assert main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@no_gpu
def test_profile_asks_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_kernels.main(["gla"]) == 2


@pytest.mark.parametrize(
    ("parse", "words", "message"),
    [
        (check_gpu.parse, ["--variants", "gla,nothing"], "nothing is not among"),
        (check_gpu.parse, ["--dtypes", "int8"], "int8 is not among"),
        (single_gpu.parse, ["--impl", "ours,theirs"], "theirs is not among"),
        (single_gpu.parse, ["--tokens", "many"], "invalid"),
        (single_gpu.parse, ["--preset", "all"], "invalid choice"),
        (limits.parse, ["--impl", "sdpa"], "sdpa is not among"),
        (profile_kernels.parse, ["nothing"], "invalid choice"),
    ],
)
def test_wrong_arguments(parse, words: list[str], message: str, capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit):
        parse(words)
    assert message in capsys.readouterr().err


# -- rows -----------------------------------------------------------------------------------------


def test_a_newer_row_replaces_the_older(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    store = RowStore(path, ("name", "size", "value"), ("name", "size"))
    store.put({"name": "a", "size": 1, "value": 0.123456})
    store.put({"name": "b", "size": 1, "value": None})
    store.put({"name": "a", "size": 1, "value": 2e-7})
    assert path.read_text() == "name,size,value\na,1,2e-07\nb,1,\n"
    again = RowStore(path, ("name", "size", "value"), ("name", "size"))
    assert again.rows() == store.rows()
    assert again.get({"name": "a", "size": 1}) == {"name": "a", "size": "1", "value": "2e-07"}
    assert again.get({"name": "c", "size": 1}) is None
    assert [x.name for x in path.parent.iterdir()] == ["rows.csv"]


def test_rows_of_a_file_with_fewer_columns_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    RowStore(path, ("a", "b"), ("a",)).put({"a": 1, "b": 2})
    store = RowStore(path, ("a", "b", "c"), ("a", "c"))
    store.put({"a": 1, "b": 3, "c": 4})
    assert path.read_text() == "a,b,c\n1,2,\n1,3,4\n"


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    RowStore(path, ("a", "b"), ("a",)).put({"a": 1})
    with pytest.raises(ValueError, match="has the columns a,b; expected a,c"):
        RowStore(path, ("a", "c"), ("a",))
    with pytest.raises(ValueError, match="not among the columns"):
        RowStore(path, ("a", "b"), ("d",))
    with pytest.raises(ValueError, match=r"columns \['d'\] do not exist"):
        RowStore(path, ("a", "b"), ("a",)).put({"a": 1, "d": 2})


def test_tables_leave_out_empty_columns() -> None:
    rows = [{"a": "x", "b": "", "c": 1.5}, {"a": "longer", "c": 0.00012345}]
    assert format_table(rows, ("a", "b", "c")).splitlines() == [
        "a       c",
        "x       1.5",
        "longer  0.0001234",
    ]


def test_machine() -> None:
    machine = describe_machine("somewhere")
    assert machine.commit == "somewhere" and machine.torch == torch.__version__
    assert replace(machine, gpu="NVIDIA H200 (SXM)").slug == "nvidia_h200_sxm"


# -- check_gpu ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--tokens", "--sizes"])
def test_numbers_outside_the_grid_are_refused(option: str) -> None:
    """None of the grid is left by them: a run without cases would look like one that passed."""
    for word in ("77", "abc"):
        with pytest.raises(SystemExit, match=f"{option}: (77|abc) is not in the grid; it has"):
            check_gpu.chosen_cases(check_gpu.parse([option, word]))
    some = check_gpu.chosen_cases(check_gpu.parse(["--tokens", "1000,64", "--sizes", "128"]))
    assert {case.T for case in some} == {1000, 64} and {case.K for case in some} == {128}


def test_the_grid_has_what_is_asked_for() -> None:
    every = cases()
    assert len(every) == len(set(every))
    for name in variant_names():
        mine = [case for case in every if case.variant == name]
        assert {1, 63, 64, 65, 1000, 16384, 65536} <= {case.T for case in mine}
        if name not in ("retention", "lightning"):
            assert {case.V for case in mine} >= set(SIZES)
            assert {(c.T, c.V) for c in mine if not c.packed} >= {
                (t, d) for t in TOKENS[1:] for d in SIZES
            }
            assert any(case.packed for case in mine)
            assert name == "hgrn" or any(case.K != case.V for case in mine)
    quick = cases(quick=True)
    assert quick == every[: len(quick)] and len(quick) < 60
    assert {case.variant for case in cases(["gla"])} == {"gla"}


@pytest.mark.parametrize("tokens", TOKENS)
def test_documents_of_packed_cases(tokens: int) -> None:
    bounds = Case("gla", tokens, 64, 64, True).cu_seqlens
    assert bounds is not None and bounds[0] == 0 and bounds[-1] == tokens
    assert bounds == sorted(bounds) and len(set(bounds)) < len(bounds)


def test_dtypes_are_judged_by_their_own_heads() -> None:
    """The joined float64 call gives every dtype its own reference."""
    case = Case("mamba2", 20, 8, 6, False)
    device = torch.device("cpu")
    parts = [check_case.make_part(case, d, i, device) for i, d in enumerate(("float32", "float64"))]
    joined = check_case.join(parts)
    want = check_case.run_oracle(case, joined)
    op = check_gpu.compile(case.spec)
    for index, part in enumerate(parts):
        mine = {
            name: check_case.own_heads(name, x, index, 2, list(part.call.inputs))
            for name, x in want.items()
        }
        got = check_case.run_op(op, part, "torch")
        verdict = check_case.judge(part, got, mine)
        assert verdict.ok, verdict
        assert {"o", "state", "dq", "ddt", "dparams", "dstate"} <= verdict.errors.keys()
        assert set(verdict.errors) <= set(check_case.ERROR_COLUMNS)
        assert check_case.same_bits(got, check_case.run_op(op, part, "torch"))
        spoiled = {**got, "dk": got["dk"] * 1.01}
        assert not check_case.judge(part, spoiled, mine).ok
        assert not check_case.same_bits(got, spoiled)
        assert not check_case.judge(part, {**got, "o": got["o"] * float("nan")}, mine).ok


class TorchOnly:
    """An operator whose triton executor is the torch one."""

    def __init__(self, variant: str, breaks: bool = False):
        self.op, self.breaks = check_gpu.compile(check_gpu.get_variant(variant)), breaks

    def __call__(self, *, executor: str, **arguments):  # type: ignore[no-untyped-def]
        if self.breaks and executor == "triton":
            raise RuntimeError("no kernel\nimage")
        return self.op(executor="torch", **arguments)


def test_what_passed_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RowStore(tmp_path / "check.csv", check_gpu.COLUMNS, check_gpu.KEY)
    case = Case("linear_attn", 1000, 4, 4, False)
    other = Case("linear_attn", 3, 4, 4, False)
    dtypes = ["float32"]
    checker = check_gpu.Checker({"linear_attn": TorchOnly("linear_attn")}, store, MACHINE, False)  # type: ignore[dict-item]
    assert check_gpu.run_cases(checker, [(case, dtypes), (other, dtypes)], None, None, 0.0) == 0
    rows = store.rows()
    assert [(row["executor"], row["dtype"], row["T"]) for row in rows] == [
        ("torch", "float64", "1000"),
        ("triton", "float32", "1000"),
        ("triton", "float32", "3"),
    ]
    assert all(row["ok"] == "1" for row in rows) and rows[1]["bits"] == "same"
    assert checker.missing(case, dtypes) == []
    later = check_gpu.Checker({}, store, replace(MACHINE, commit="def"), False)
    assert later.missing(case, dtypes) == dtypes
    assert check_gpu.Checker({}, store, MACHINE, True).missing(case, dtypes) == dtypes
    unknown = replace(MACHINE, commit="unknown")
    assert not unknown.measured_same_code({**rows[0], "commit": "unknown"})
    assert check_gpu.run_cases(checker, [(case, dtypes)], None, -1.0, 0.0) == 1
    assert "ok   linear_attn float32 T=1000" in capsys.readouterr().out


def test_a_case_that_fails_is_noted_and_run_again(tmp_path: Path) -> None:
    store = RowStore(tmp_path / "check.csv", check_gpu.COLUMNS, check_gpu.KEY)
    broken = TorchOnly("linear_attn", breaks=True)
    checker = check_gpu.Checker({"linear_attn": broken}, store, MACHINE, False)  # type: ignore[dict-item]
    case = Case("linear_attn", 3, 4, 4, False)
    checker.run(case, ["float32"])
    (row,) = store.rows()
    assert row["ok"] == "0" and row["note"] == "RuntimeError: no kernel image"
    assert checker.failed(case, ["float32"]) and not checker.failed(case, ["bfloat16"])
    assert checker.missing(case, ["float32"]) == ["float32"]


def test_options_choose_cases() -> None:
    options = check_gpu.parse(["--variants", "gla", "--tokens", "65,1000", "--sizes", "64"])
    chosen = check_gpu.chosen_cases(options)
    assert {(c.variant, c.K) for c in chosen} == {("gla", 64)} and {c.T for c in chosen} == {
        65,
        1000,
    }
    tasks = check_gpu.compile_tasks(
        {"gla": check_gpu.compile(check_gpu.get_variant("gla"))}, [(chosen[0], ["bfloat16"])]
    )
    assert tasks[0].problem.tokens == chosen[0].T and tasks[0].problem.device.type == "meta"


# -- single_gpu -----------------------------------------------------------------------------------


def shape(variant: str, direction: str, tokens: int = 128) -> bench.Shape:
    return bench.Shape(variant, direction, 1, tokens, 4, 8, 8, "float32")


class Ours:
    """Stands for a library: our operator on the torch executor."""

    def prepare(self, variant, call, direction):  # type: ignore[no-untyped-def]
        op = check_gpu.compile(check_gpu.get_variant(variant), executor="torch")
        arguments = {**call.inputs, **call.params, **call.scalars}
        plan = lambda: implementations.plan_text(op.last_plan)  # noqa: E731
        return implementations.Prepared(lambda: op(**arguments)[0], "1.0", plan)


def make_bench(tmp_path: Path, **every) -> bench.Bench:  # type: ignore[no-untyped-def]
    store = RowStore(tmp_path / "single.csv", bench.COLUMNS, bench.KEY)
    return bench.Bench(every, store, MACHINE, "cpu")


@pytest.mark.parametrize("variant", ["gla", "hgrn", "mamba2"])
def test_measured_rows(variant: str, tmp_path: Path, here: None) -> None:
    runs = make_bench(tmp_path, ours=Ours())
    work = {shape(variant, d): ["ours"] for d in ("fwd", "fwdbwd")}
    runs.run(work, errors=True)
    header = (tmp_path / "single.csv").read_text().splitlines()[0]
    assert header == (
        "date,commit,gpu,torch,triton,variant,direction,B,T,H,K,V,dtype,impl,impl_version,plan,"
        "median_ms,p20_ms,p80_ms,host_us,peak_mib,rel_err,HV,note"
    )
    forward, both = runs.store.rows()
    assert forward["direction"] == "fwd" and both["direction"] == "fwdbwd"
    assert forward["median_ms"] == "2.0000" and forward["impl_version"] == "1.0"
    assert "chunk_size=64" in forward["plan"]
    assert float(forward["rel_err"]) < 1e-6 and float(both["rel_err"]) < 1e-4
    assert all(runs.missing(s, ["ours", "fla"]) == ["fla"] for s in work)
    tomorrow = replace(MACHINE, date="2026-01-03")
    newer = bench.Bench({"ours": Ours()}, runs.store, tomorrow, "cpu")
    assert newer.missing(shape(variant, "fwd"), ["ours"]) == ["ours"]
    newer.run({shape(variant, "fwd"): ["ours"]}, errors=False)
    assert len(runs.store.rows()) == 2 and runs.store.rows()[0]["rel_err"] == ""


def test_unavailable_and_failing_implementations_leave_no_row(
    tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def prepare(self, variant, call, direction):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of\nmemory")

    runs = make_bench(tmp_path, fla=implementations.Fla(False), ours=Broken())
    runs.run({shape("mamba2", "fwd"): ["fla", "ours"]}, errors=False)
    out = capsys.readouterr().out
    assert "fla: no such function" in out and "FAILED RuntimeError: out of memory" in out
    assert runs.store.rows() == []


def test_shapes_come_by_length() -> None:
    options = single_gpu.parse(["--tokens", "64,128", "--variants", "gla,kda"])
    groups = [point.shapes for point in single_gpu.points(options)]
    assert [(g[0].T, g[0].variant) for g in groups] == [
        (64, "gla"),
        (64, "kda"),
        (128, "gla"),
        (128, "kda"),
    ]
    assert [s.direction for s in groups[0]] == ["fwd", "fwdbwd"]
    assert bench.fits(groups[0][0], "ours") and not bench.fits(groups[0][0], "sdpa")
    assert single_gpu.parse([]).tokens == (1024, 4096, 16384, 65536, 262144)


@pytest.mark.parametrize("variant", ["linear_attn", "simple_gla"])
def test_plain_chunk_form(variant: str) -> None:
    call = bench.make_call(shape(variant, "fwdbwd"), "cpu")
    op = check_gpu.compile(check_gpu.get_variant(variant), executor="torch")
    plain = getattr(plain_chunk, variant)(**call.inputs, **call.scalars)
    want = op(**call.inputs, **call.scalars)[0]
    torch.testing.assert_close(plain, want, rtol=1e-4, atol=1e-4)


def test_softmax_attention_is_causal_and_scaled() -> None:
    call = bench.make_call(shape(implementations.SOFTMAX, "fwd", 16), "cpu")
    output = implementations.Sdpa().prepare(implementations.SOFTMAX, call, "fwd").forward()
    q, k, v = (call.inputs[n][0, :, 1] for n in "qkv")
    weights = (q @ k.T * call.scalars["scale"]).masked_fill(
        torch.ones(16, 16).triu(1) > 0, -torch.inf
    )
    torch.testing.assert_close(output[0, :, 1], weights.softmax(-1) @ v)
    for impl in (
        implementations.TorchCompile(),
        implementations.Fla(False),
        implementations.Ours(),
    ):
        with pytest.raises(implementations.Unavailable):
            impl.prepare(implementations.SOFTMAX, call, "fwd")


def test_profile_table() -> None:
    from flexla_dist.compiler.aot import CompiledInfo

    times = [
        profile_kernels.KernelTime("a_scan", 2, 30.0),
        profile_kernels.KernelTime("fill", 1, 10.0),
    ]
    infos = [
        CompiledInfo("a_scan", "forward", 4, 2, 100, 0, 2048, {"tile_K": 64, "tile_V": 32}),
        CompiledInfo("a_scan", "backward", 4, 2, 120, 8, 2048, {"tile_K": 64, "tile_V": 32}),
    ]
    table = format_table(profile_kernels.table_rows(times, infos), profile_kernels.COLUMNS)
    assert table.splitlines()[1].split() == (
        ["a_scan", "2", "30.0", "75.0%", "K64", "V32", "4", "100/120", "0/8", "2048"]
    )
    assert table.splitlines()[3].split() == ["all", "40.0"]


def test_kernels_of_a_shape() -> None:
    forward, both = shape("gla", "fwd"), shape("gla", "fwdbwd")
    assert bench.compile_task({forward: ["fla"]}) is None
    task = bench.compile_task({forward: ["ours"], both: ["fla"]})
    assert task is not None and task.directions == ("forward",)
    task = bench.compile_task({forward: ["ours"], both: ["ours", "fla"]})
    assert task is not None and task.directions == ("forward", "backward")
    assert task.problem.tokens == 128 and task.problem.heads == 4
