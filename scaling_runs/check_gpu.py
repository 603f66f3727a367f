#!/usr/bin/env python3
"""Checks the kernels of every variant on a GPU against float64, twice, and keeps the errors.

    python scaling_runs/check_gpu.py --jobs 16            everything, most informative first
    python scaling_runs/check_gpu.py --quick --seconds 200
    python scaling_runs/check_gpu.py --variants gla,kda
    python scaling_runs/check_gpu.py --compile-only       fill Triton's cache, no GPU needed

Rows go to scaling_runs/results/check_<gpu>.csv. Cases that passed at this commit are not run again,
those that failed come last. Kernels compiled elsewhere are found when TRITON_CACHE_DIR names the
same folder on both machines and both have the same Triton:

    TRITON_CACHE_DIR=/tmp/kernels TRITON_STORE_BINARY_ONLY=1 \\
        python scaling_runs/check_gpu.py --compile-only --quick --jobs 2
    tar -czf kernels.tar.gz -C /tmp kernels          # there: tar -xzf kernels.tar.gz -C /tmp
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flexla_dist.compiler.aot import CompileTask, describe_call
from flexla_dist.compiler.aot_pool import CompilePool
from flexla_dist.compiler.executor.launch import interpreting
from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec.variants import get_variant, variant_names
from scaling_runs.check_case import (
    ERROR_COLUMNS,
    HEADS,
    VALUE_HEADS,
    Part,
    Results,
    join,
    judge,
    make_part,
    own_heads,
    reference,
    run_op,
    same_bits,
)
from scaling_runs.check_cases import DTYPES, ORACLE_TOKENS, Case, cases
from scaling_runs.compiling import CompileCount, compile_only, gpu_target
from scaling_runs.machine import RESULTS, Machine, describe_machine
from scaling_runs.rows import RowStore, format_table

KEY = ("gpu", "variant", "executor", "dtype", "T", "K", "V", "packed")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton"),
    *("variant", "executor", "dtype", "T", "K", "V", "packed"),
    *("ok", "bits", "worst", *ERROR_COLUMNS, "seconds", "note"),
)
SHOWN = COLUMNS[5:]
Work = list[tuple[Case, list[str]]]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", help="comma-separated names; default all")
    parser.add_argument(
        "--dtypes",
        default=",".join(DTYPES),
        help="of bfloat16, float16, float32; default not float16",
    )
    parser.add_argument("--tokens", help="comma-separated T of the grid to keep; default all")
    parser.add_argument("--sizes", help="comma-separated K of the grid to keep; default all")
    parser.add_argument("--quick", action="store_true", help="only the first, cheap tiers")
    parser.add_argument("--seconds", type=float, help="start no case after this time")
    parser.add_argument("--again", action="store_true", help="also run what passed already")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile ahead")
    parser.add_argument("--compile-only", action="store_true", help="compile, run nothing")
    parser.add_argument(
        "--target", type=int, default=90, help="compute capability for --compile-only"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    parser.add_argument(
        "--commit",
        help="commit to note; where there is no git history nothing is skipped without it",
    )
    options = parser.parse_args(words)
    options.variants = _names(parser, options.variants, variant_names())
    options.dtypes = _names(parser, options.dtypes, ("bfloat16", "float16", "float32"))
    return options


def _names(parser: argparse.ArgumentParser, text: str | None, known: Sequence[str]) -> list[str]:
    if text is None:
        return list(known)
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{', '.join(unknown)} is not among {', '.join(known)}")
    return names


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Cases that the options leave, in order."""
    every = cases(options.variants, options.quick)
    tokens = _chosen("--tokens", options.tokens, {case.T for case in every})
    sizes = _chosen("--sizes", options.sizes, {case.K for case in every})
    return [case for case in every if case.T in tokens and case.K in sizes]


def _chosen(option: str, words: str | None, known: set[int]) -> set[int]:
    """Numbers of a comma-separated option; all that are known where it is not given."""
    if words is None:
        return known
    unknown = [word for word in words.split(",") if word not in {str(x) for x in known}]
    if unknown:
        shown = ", ".join(map(str, sorted(known)))
        raise SystemExit(f"{option}: {', '.join(unknown)} is not in the grid; it has {shown}")
    return {int(word) for word in words.split(",")}


def compile_tasks(ops: dict[str, LinearAttentionOp], work: Work) -> list[CompileTask]:
    """The calls of all cases, one for each dtype, in order."""
    return [
        CompileTask(
            ops[case.variant].graphs,
            describe_call(
                ops[case.variant].graphs,
                batch=case.batch,
                tokens=case.T,
                heads=HEADS,
                value_heads=VALUE_HEADS,
                sizes=case.sizes,
                dtype=getattr(torch, dtype),
                cu_seqlens=case.cu_seqlens,
            ),
        )
        for case, dtypes in work
        for dtype in dtypes
    ]


class Checker:
    """Runs cases and keeps rows."""

    def __init__(
        self, ops: dict[str, LinearAttentionOp], store: RowStore, machine: Machine, again: bool
    ):
        self.ops, self.store, self.machine, self.again = ops, store, machine, again
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.written: list[dict[str, str]] = []

    def missing(self, case: Case, dtypes: Sequence[str]) -> list[str]:
        """Dtypes of a case that have not passed at this commit."""
        return [dtype for dtype in dtypes if self.again or not self._passed(case, dtype)]

    def _passed(self, case: Case, dtype: str) -> bool:
        row = self.store.get({"gpu": self.machine.gpu, **case.key(dtype)})
        return row is not None and row["ok"] == "1" and self.machine.measured_same_code(row)

    def failed(self, case: Case, dtypes: Sequence[str]) -> bool:
        """Has one of these dtypes failed at this commit?"""
        keys = [{"gpu": self.machine.gpu, **case.key(dtype)} for dtype in dtypes]
        rows = [row for key in keys if (row := self.store.get(key)) is not None]
        return any(row["ok"] != "1" and self.machine.measured_same_code(row) for row in rows)

    def run(self, case: Case, dtypes: Sequence[str]) -> None:
        """Check a case in these dtypes."""
        begin = time.perf_counter()
        parts = [make_part(case, d, 100 * i + 1, self.device) for i, d in enumerate(dtypes)]
        joined = join(parts)
        op = self.ops[case.variant]
        try:
            want = reference(case, op, joined)
        except Exception as error:
            for dtype in dtypes:
                self._put(case, dtype, {"ok": 0, "note": f"reference: {_short(error)}"})
            return
        if case.T == ORACLE_TOKENS and not case.packed:
            self._check_reference(case, op, joined, want)
        for index, part in enumerate(parts):
            mine = {
                name: own_heads(name, x, index, len(parts), list(part.call.inputs))
                for name, x in want.items()
            }
            self._check(case, op, part, mine, begin)
            begin = time.perf_counter()

    def _check_reference(
        self, case: Case, op: LinearAttentionOp, joined: Part, want: Results
    ) -> None:
        verdict = judge(joined, run_op(op, joined, "torch"), want)
        row = {"ok": int(verdict.ok), "worst": verdict.worst, **verdict.errors}
        self._put(case, "float64", row, executor="torch")

    def _check(
        self, case: Case, op: LinearAttentionOp, part: Part, want: Results, begin: float
    ) -> None:
        try:
            first = run_op(op, part, "triton")
            bits = same_bits(first, run_op(op, part, "triton"))
            verdict = judge(part, first, want)
        except Exception as error:
            self._put(case, part.dtype, {"ok": 0, "note": _short(error)})
            if "CUDA" in str(error) or "illegal" in str(error):
                raise
            return
        row: dict[str, object] = {
            "ok": int(verdict.ok and bits),
            "bits": "same" if bits else "DIFFER",
            "worst": verdict.worst,
            **verdict.errors,
            "seconds": time.perf_counter() - begin,
        }
        self._put(case, part.dtype, row)

    def _put(
        self, case: Case, dtype: str, row: dict[str, object], executor: str = "triton"
    ) -> None:
        row = {**self.machine.columns(), **case.key(dtype, executor), **row}
        self.written.append(self.store.put(row))
        mark = "ok  " if row["ok"] else "FAIL"
        packed = " packed" if case.packed else ""
        print(
            f"{mark} {case.variant} {dtype} T={case.T} K={case.K} V={case.V}{packed} "
            f"{row.get('worst', '')} {row.get('note', '')}",
            flush=True,
        )


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def run_cases(
    checker: Checker, work: Work, pool: CompilePool | None, seconds: float | None, begin: float
) -> int:
    """Run cases until the time is up; returns how many were left."""
    task = 0
    for at, (case, dtypes) in enumerate(work):
        if seconds is not None and time.perf_counter() - begin > seconds:
            return len(work) - at
        for _ in dtypes if pool is not None else ():
            pool.wait(task)
            task += 1
        checker.run(case, dtypes)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 when a case failed."""
    options = parse(words)
    begin = time.perf_counter()
    ops = {name: compile(get_variant(name)) for name in options.variants}
    chosen = chosen_cases(options)
    if options.compile_only:
        tasks = compile_tasks(ops, [(case, options.dtypes) for case in chosen])
        target = ("cuda", options.target)
        return int(compile_only(tasks, target, options.jobs, options.seconds) > 0)
    if not torch.cuda.is_available() and not interpreting():
        print("check_gpu.py needs a CUDA device (or --compile-only)", file=sys.stderr)
        return 2
    machine = describe_machine(options.commit)
    store = RowStore(options.results / f"check_{machine.slug}.csv", COLUMNS, KEY)
    checker = Checker(ops, store, machine, options.again)
    work = [(case, checker.missing(case, options.dtypes)) for case in chosen]
    work = [(case, dtypes) for case, dtypes in work if dtypes]
    work.sort(key=lambda item: checker.failed(*item))  # one that broke the device may do so again
    count = CompileCount()
    if interpreting():
        left = run_cases(checker, work, None, options.seconds, begin)
    else:
        with CompilePool(compile_tasks(ops, work), gpu_target(), options.jobs) as pool:
            left = run_cases(checker, work, pool, options.seconds, begin)
    failed = [row for row in checker.written if row["ok"] != "1"]
    print(format_table(checker.written, SHOWN))
    if failed:
        print(f"\nfailed:\n{format_table(failed, SHOWN)}")
    print(
        f"\n{len(checker.written)} rows, {len(failed)} failed, {left} of {len(work)} cases left, "
        f"{time.perf_counter() - begin:.0f} s; kernels: {count.found} found in the cache, "
        f"{count.compiled} compiled here; {store.path}"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
