"""The Markdown page of one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scaling_runs.report_single_answer import answer, kernel_tables, limits_table
from scaling_runs.report_single_data import (
    DIRECTIONS,
    GOALS,
    SOFTMAX,
    VARIANTS,
    Call,
    SingleGpu,
    floor_ms,
)

MISSING = "missing"
NAMES = {
    "ours": "ours",
    "fla": "FLA",
    "flashqla": "FlashQLA",
    "torch_compile": "torch.compile",
    "sdpa": "softmax attention",
}
LIFTED = "guard lifted"
SPEED = ("ours", "fla", "flashqla", "torch_compile")
LENGTHS = (1024, 4096, 16384, 65536, 262144)
SWEEP_HEADS = 16
HOW = """\
All numbers are those of rows in `single_gpu_{gpu}.csv` and `limits_{gpu}.csv`, which
`single_gpu.py` and `limits.py` write; `missing` is a row that is not there. Times are medians of
calls with a cold L2 cache, in ms. The floor is the time to move inputs, output and gradients once
at 4.3 TB/s, a measured copy; `/ floor` is ours over it. `FLA / ours` is how many times quicker ours
is. A star: FLA refuses this backward pass on this version of Triton; it was timed with that guard
lifted, its results are used for nothing.
"""


def page(found: SingleGpu, plots: Sequence[str]) -> str:
    """The whole page."""
    parts = [f"# One GPU: {found.gpu}\n", HOW.format(gpu=found.gpu), commits(found)]
    parts += ["## Is the tensor core the limit?\n", answer(found)]
    parts += ["## Speed\n", *speed_tables(found)]
    parts += ["## What limits it\n", limits_table(found)]
    parts += [_picture(name) for name in plots if "shares" in name]
    parts += ["## Batch and length beside softmax attention\n", sweep_table(found)]
    parts += [_picture(name) for name in plots if "sweep" in name]
    parts += ["## Other shapes\n", shapes_table(found)]
    parts += ["## Kernels\n", kernel_tables(found)]
    return "\n".join(parts)


def _picture(name: str) -> str:
    return f"![{name.removesuffix('.png').replace('_', ' ')}]({name})\n"


def commits(found: SingleGpu) -> str:
    """Whose rows they are; a warning where those of several commits stand beside each other."""
    lines, ours = [], set()
    for impl, name in NAMES.items():
        every = [row for (_, of), row in found.times.items() if of == impl]
        every += [rows[-1] for (_, of), rows in found.limits.items() if of == impl]
        if not every:
            why = " (it needs tilelang and a run with it)" if impl == "flashqla" else ""
            lines.append(f"- {name}: no rows{why}")
            continue
        known = sorted({f"{row['date']} {row['commit']}" for row in every})
        versions = sorted({row["impl_version"] for row in every if row["impl_version"]})
        lines.append(f"- {' '.join([name, ', '.join(versions)]).strip()}: {', '.join(known)}")
        ours |= {row["commit"] for row in every} if impl == "ours" else set()
    if len(ours) > 1:
        lines.append(
            f"\nRows of ours are of {len(ours)} commits: what stands side by side was not always "
            "measured in one run."
        )
    return "\n".join([*lines, ""])


def whose(found: SingleGpu, calls: Iterable[tuple[Call, str]]) -> str:
    """Commits of the rows of a table, by implementation."""
    known: dict[str, set[str]] = {}
    for call, impl in calls:
        row = found.times.get((call, impl))
        if row is not None:
            known.setdefault(impl, set()).add(row["commit"])
    said = [f"{NAMES[impl]} {', '.join(sorted(of))}" for impl, of in known.items()]
    return f"rows of commits: {'; '.join(said)}"


# -- speed ----------------------------------------------------------------------------------------


def speed_tables(found: SingleGpu) -> list[str]:
    """A table for each direction and length that has rows."""
    tables = []
    for direction in DIRECTIONS:
        for tokens in LENGTHS:
            calls = [Call(variant, direction, T=tokens) for variant in VARIANTS]
            if any((call, impl) in found.times for call in calls for impl in SPEED):
                tables.append(_speed_table(found, calls))
    return tables or ["No rows.\n"]


def _speed_table(found: SingleGpu, calls: Sequence[Call]) -> str:
    direction, tokens = calls[0].direction, calls[0].T
    goals = GOALS.get((direction, tokens), {})
    others = [n for n in SPEED[1:] if n == "fla" or any((c, n) in found.times for c in calls)]
    head = ["ms", "ours", *(NAMES[n] for n in others), "FLA / ours", "floor", "/ floor", "goal"]
    rows = whose(found, [(call, name) for name in SPEED for call in calls])
    lines = [f"**{direction}, B=1, T={tokens}, H=32, D=128, bfloat16** (hgrn: D=4096); {rows}", ""]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for call in calls:
        ours, fla, floor = found.ms(call, "ours"), found.ms(call, "fla"), floor_ms(call)
        cells = [call.variant, milliseconds(found, call, "ours")]
        cells += [milliseconds(found, call, name) for name in others]
        cells += [_ratio(fla, ours), f"{floor:.3f}", _ratio(ours, floor)]
        cells.append(f"{goals[call.variant]:g}" if call.variant in goals else "")
        lines.append(f"| {' | '.join(cells)} |")
    softmax = replace(calls[0], variant=SOFTMAX)
    if (softmax, "sdpa") in found.times:
        text = milliseconds(found, softmax, "sdpa")
        lines += ["", f"Softmax attention of the same sizes: {text} ms."]
    return "\n".join([*lines, ""])


def milliseconds(found: SingleGpu, call: Call, impl: str) -> str:
    """A time, or what there is instead."""
    if impl == "flashqla" and call.variant != "gated_delta_rule":
        return "-"
    if impl == "torch_compile" and call.variant not in ("linear_attn", "simple_gla"):
        return "-"
    value = found.ms(call, impl)
    if value is not None:
        lifted = LIFTED in found.times[call, impl]["impl_version"]
        return f"{value:.3f}{'*' if lifted else ''}"
    return found.note(call, impl).split(":")[0] or MISSING


def _memory(found: SingleGpu, call: Call, impl: str) -> str:
    value = found.mib(call, impl)
    return f"{value:.0f}" if value is not None else milliseconds(found, call, impl)


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}" if over is not None and under else ""


# -- the sweep ------------------------------------------------------------------------------------


def sweep_calls(found: SingleGpu) -> list[Call]:
    """Calls of GLA over batch and length, by direction, batch and length."""
    calls = {
        replace(call, variant="gla")
        for call in found.calls()
        if call.variant in ("gla", SOFTMAX)
        and (call.H, call.D, call.HV, call.dtype) == (SWEEP_HEADS, 128, 0, "bfloat16")
    }
    return sorted(calls, key=lambda call: (call.direction, call.B, call.T))


def sweep_table(found: SingleGpu) -> str:
    """Latency and peak memory of ours, FLA and softmax attention side by side."""
    calls = sweep_calls(found)
    if not calls:
        return "No rows: `python scaling_runs/single_gpu.py --preset sweep` makes them.\n"
    head = ("GLA", "B", "T", "ours ms", "FLA ms", "softmax ms", "FLA / ours", "softmax / ours")
    memory = ("ours MiB", "FLA MiB", "softmax MiB", "ours / softmax", "FLA / softmax")
    every = [(c, name) for name in ("ours", "fla") for c in calls]
    every += [(replace(c, variant=SOFTMAX), "sdpa") for c in calls]
    said = f"H={SWEEP_HEADS}, D=128, bfloat16; peak memory has the arguments in it"
    lines = [f"{said}; {whose(found, every)}.", ""]
    lines += [f"| {' | '.join((*head, *memory))} |", "|---" * (len(head) + len(memory)) + "|"]
    for call in calls:
        softmax = replace(call, variant=SOFTMAX)
        beside = ((call, "ours"), (call, "fla"), (softmax, "sdpa"))
        ours, fla, other = (found.ms(*one) for one in beside)
        cells = [call.direction, str(call.B), str(call.T)]
        cells += [milliseconds(found, *one) for one in beside]
        cells += [_ratio(fla, ours), _ratio(other, ours)]
        ours, fla, other = (found.mib(*one) for one in beside)
        cells += [_memory(found, *one) for one in beside]
        cells += [_ratio(ours, other), _ratio(fla, other)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_sweep_words(found, calls)])


def _sweep_words(found: SingleGpu, calls: Sequence[Call]) -> list[str]:
    """Against softmax attention, a line for each library and direction."""
    lines = []
    for impl in ("ours", "fla"):
        for direction in DIRECTIONS:
            here = [c for c in calls if c.direction == direction]
            pairs = [((c, impl), (replace(c, variant=SOFTMAX), "sdpa")) for c in here]
            both = [(a, b) for a, b in pairs if found.ms(*a) and found.ms(*b)]
            if not both:
                continue
            slower = [a[0] for a, b in both if (found.ms(*a) or 0) > (found.ms(*b) or 0)]
            where = ", ".join(f"B={c.B} T={c.T}" for c in slower) or "nowhere"
            most = max((found.mib(*a) or 0) / (found.mib(*b) or 1) for a, b in both)
            lines.append(
                f"- {NAMES[impl]} {direction}: slower than softmax attention {where} (of "
                f"{len(both)} calls); at most {most:.2f}x its memory"
            )
    return [*lines, ""] if lines else []


def shapes_table(found: SingleGpu) -> str:
    """Calls that are neither in the tables of speed nor in the sweep."""
    known = set(sweep_calls(found))
    usual = {Call(v, d, T=t) for v in (*VARIANTS, SOFTMAX) for d in DIRECTIONS for t in LENGTHS}
    calls = [
        call
        for call in found.calls()
        if call not in usual and call not in known and call.variant in VARIANTS
    ]
    if not calls:
        return "No rows: `python scaling_runs/single_gpu.py --preset shapes` makes them.\n"
    head = ("call", "ours ms", "FLA ms", "FlashQLA ms", "FLA / ours", "ours MiB", "FLA MiB")
    rows = whose(found, [(call, name) for name in ("ours", "fla", "flashqla") for call in calls])
    lines = [f"{rows.capitalize()}.", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for call in calls:
        heads = f"{call.H}/{call.HV}" if call.HV else f"{call.H}"
        name = f"{call.variant} {call.direction}, B={call.B} T={call.T} H={heads} D={call.D}"
        cells = [name, *(milliseconds(found, call, n) for n in ("ours", "fla", "flashqla"))]
        cells += [_ratio(found.ms(call, "fla"), found.ms(call, "ours"))]
        cells += [_memory(found, call, name) for name in ("ours", "fla")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
