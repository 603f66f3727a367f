#!/usr/bin/env python3
"""Millions of tokens: what a step takes on many GPUs, and a run on the CPU that is compared.

    python scaling_runs/long_context.py --plan                  16M tokens over 128 GPUs
    python scaling_runs/long_context.py --plan --tokens 4194304 --ranks 32 --no-checkpoint
    python scaling_runs/long_context.py --run                   1M tokens over 8 processes

--plan prints the bytes that a GPU holds by part, from formulas (`long_plan.py`), whether they fit,
the longest sequence that would, and how to start such a run. Nothing is run. --run starts processes
on this machine, forward and backward, and compares every output and gradient with float64 streams
over the whole sequence (`long_run.py`); rows go to scaling_runs/results/long_context_cpu.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flexla_dist.layers import ModelConfig
from scaling_runs.long_plan import (
    EXECUTORS,
    STRATEGIES,
    VARIANTS,
    LongCase,
    PlanProblem,
    parameters_of,
    plan_memory,
    state_bytes,
)
from scaling_runs.long_run import DTYPES, LongResult, LongRun, RunProblem, run_long
from scaling_runs.machine import RESULTS, Machine, describe_machine
from scaling_runs.rows import RowStore, format_table

GIB = 2**30
MODEL_SETTINGS = (
    *("variant", "layers", "width", "heads", "key_dim", "value_dim", "mlp_width", "vocab"),
)
PLAN_TOKENS, PLAN_RANKS = 16 << 20, 128
RUN_TOKENS, RUN_RANKS = 1 << 20, 8
KEY = ("variant", "T", "P", "H", "K", "V", "dtype", "strategy", "memory_tokens")
ERRORS = ("o", "state", "dq", "dk", "dv", "dg", "dbeta")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", *KEY),
    *("forward_s", "backward_s", "peak_mib", "stream_s"),
    *(f"err_{name}" for name in ERRORS),
    *("worst_chunk", "worst_in", "status"),
)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--plan", action="store_true", help="memory of a GPU and how to start")
    mode.add_argument("--run", action="store_true", help="run on this machine and compare")
    parser.add_argument("--tokens", type=int, help="of the sequence (16777216; --run 1048576)")
    parser.add_argument("--ranks", type=int, help="that share it (128; --run 8)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="hierarchical; --run chain")
    plan = parser.add_argument_group("--plan")
    plan.add_argument("--variant", choices=VARIANTS, default="gated_delta_rule")
    sizes = {"layers": 24, "width": 2048, "heads": 16, "key-dim": 128, "value-dim": 128}
    for name, default in {**sizes, "mlp-width": 5632, "vocab": 256}.items():
        plan.add_argument(f"--{name}", type=int, default=default, help=f"of the model ({default})")
    plan.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    plan.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    plan.add_argument("--no-checkpoint", action="store_true", help="keep all activations")
    plan.add_argument("--executor", choices=EXECUTORS, default="triton")
    plan.add_argument("--wrapper", choices=("fsdp", "ddp"), default="fsdp")
    plan.add_argument("--node-size", type=int, default=8, help="GPUs of a node")
    plan.add_argument("--memory-gib", type=float, default=131.0, help="of a GPU (H200: 131)")
    run = parser.add_argument_group("--run")
    run.add_argument("--variants", default=",".join(VARIANTS), help="separated by commas")
    run.add_argument("--size", type=int, default=16, help="K and V of the one head")
    run.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    run.add_argument("--block", type=int, default=4096, help="tokens that are streamed at once")
    run.add_argument("--memory-tokens", type=int, default=1 << 14, help="that a state remembers")
    run.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    return parser.parse_args(words)


def case_of(options: argparse.Namespace) -> LongCase:
    """The case that is planned. Raises PlanProblem."""
    model = ModelConfig(
        variant=options.variant,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        key_dim=options.key_dim,
        value_dim=options.value_dim,
        mlp_width=options.mlp_width,
        vocab=options.vocab,
    )
    return LongCase(
        model,
        PLAN_TOKENS if options.tokens is None else options.tokens,
        PLAN_RANKS if options.ranks is None else options.ranks,
        options.batch,
        options.precision == "bf16",
        not options.no_checkpoint,
        options.executor,
        options.strategy or "hierarchical",
        options.node_size,
        options.wrapper == "fsdp",
    )


def longest(case: LongCase, limit: float) -> int:
    """Tokens of the longest sequence whose step takes at most `limit` bytes a GPU; 0 for none."""

    def fits(local: int) -> bool:
        return sum(plan_memory(replace(case, tokens=local * case.ranks)).values()) <= limit

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * case.ranks


def plan_page(case: LongCase, memory_gib: float) -> str:
    """The plan in words."""
    parts = plan_memory(case)
    total = sum(parts.values())
    whole, _ = parameters_of(case.model)
    m = case.model
    rows = [{"part": name, "GiB": f"{size / GIB:.3f}"} for name, size in parts.items()]
    rows.append({"part": "together", "GiB": f"{total / GIB:.3f}"})
    most = longest(case, memory_gib * GIB)
    fits = "fits in" if total <= memory_gib * GIB else "does NOT fit in"
    lines = [
        f"{case.batch} x {case.tokens} tokens over {case.ranks} GPUs: {case.local} tokens a GPU; "
        f"{m.variant}, {m.layers} layers of width {m.width}, {whole / 1e6:.0f} M parameters; "
        f"{'bf16' if case.bf16 else 'fp32'}, activations "
        f"{'computed again' if case.checkpoint else 'kept'}. By formula, nothing was run.",
        "",
        format_table(rows, ("part", "GiB")),
        "",
        f"{fits} {memory_gib:g} GiB; the longest sequence that does has {most} tokens.",
        f"Between ranks, a layer and direction: {state_bytes(case) / 2**20:.2f} MiB a hop of the "
        "state; which strategy, with predicted times:",
        f"  flexla-dist doctor --strategies --preset h20-ib400 --ranks {case.ranks} --kind "
        f"{'dense' if 'delta' in m.variant else 'scalar'} --state-mib "
        f"{state_bytes(case) / 2**20:g}",
        "Start:",
        f"  sbatch --nodes={ceil(case.ranks / case.node_size)} launch/slurm.sbatch --config "
        f"configs/long.yaml {' '.join(settings_of(case))}",
    ]
    return "\n".join(lines)


def settings_of(case: LongCase) -> list[str]:
    """Settings of the training program for a case."""
    m = case.model
    settings = {
        "batch": case.batch,
        "accumulation": 1,
        "precision": "bf16" if case.bf16 else "fp32",
        "checkpoint_activations": str(case.checkpoint).lower(),
        "data.length": case.tokens,
        "mesh.cp": case.ranks,
        "mesh.strategy": case.strategy,
        "mesh.wrapper": "fsdp" if case.sharded else "ddp",
        **{f"model.{name}": getattr(m, name) for name in MODEL_SETTINGS},
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def row_of(case: LongRun, found: LongResult, machine: Machine) -> dict[str, object]:
    """The row of a run."""
    name, (_, worst) = max(found.errors.items(), key=lambda item: item[1][1])
    values: dict[str, object] = {
        **machine.columns(),
        "variant": case.variant,
        "T": case.tokens,
        "P": case.ranks,
        "H": 1,
        "K": case.size,
        "V": case.size,
        "dtype": case.dtype,
        "strategy": case.strategy,
        "memory_tokens": case.memory,
        "forward_s": found.forward_s,
        "backward_s": found.backward_s,
        "peak_mib": found.peak_mib,
        "stream_s": found.stream_s,
        **{f"err_{name}": ratio for name, (ratio, _) in found.errors.items()},
        "worst_chunk": worst,
        "worst_in": name,
        "status": "ok" if found.within(DTYPES[case.dtype]) else "failed",
    }
    return values


def run_all(options: argparse.Namespace) -> int:
    """Run the variants; the number of those that failed. Raises RunProblem."""
    cases = [
        LongRun(
            variant,
            RUN_TOKENS if options.tokens is None else options.tokens,
            RUN_RANKS if options.ranks is None else options.ranks,
            options.size,
            options.dtype,
            options.strategy or "chain",
            options.block,
            options.memory_tokens,
        )
        for variant in options.variants.split(",")
    ]
    store = RowStore(options.results / "long_context_cpu.csv", COLUMNS, KEY)
    machine = describe_machine()
    rows = []
    for case in cases:
        rows.append(store.put(row_of(case, run_long(case), machine)))
        print(format_table(rows[-1:], COLUMNS), flush=True)
    return sum(row["status"] != "ok" for row in rows)


def main(words: Sequence[str] | None = None) -> int:
    """Run the program; 0 unless something was wrong."""
    options = parse(words)
    try:
        if options.run:
            return run_all(options)
        print(plan_page(case_of(options), options.memory_gib))
    except (PlanProblem, RunProblem) as error:
        print(f"long_context.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
