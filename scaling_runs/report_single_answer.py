"""Whether tensor cores are the limit, and what is: words and tables from rows of `limits.py`."""

from __future__ import annotations

from collections.abc import Sequence

from scaling_runs.report_single_data import (
    BANDWIDTH,
    BUSY,
    DIRECTIONS,
    PEAK,
    VARIANTS,
    Call,
    Row,
    SingleGpu,
    limit_words,
    number,
)

LIBRARIES = (("ours", "ours"), ("fla", "FLA"))
SMALL = 0.05  # share of a call from which on a kernel is named
Kernels = list[tuple[Call, Row]]


def answer(found: SingleGpu) -> str:
    """The answer in a few sentences, from counters where there are any, else from counts."""
    if not found.limits:
        return (
            f"Not measured yet: there is no `limits_{found.gpu}.csv`; `python "
            "scaling_runs/limits.py` on a GPU makes it.\n"
        )
    said = [_counters_words(found, impl, name) for impl, name in LIBRARIES]
    told = [words for words in said if words]
    if not told:
        told = [_counted_words(found)]
        notes = sorted({rows[-1]["note"] for rows in found.limits.values() if rows[-1]["note"]})
        told += [f"No hardware counters: {'; '.join(notes)}."] if notes else []
    return " ".join([_verdict(found), *told]) + "\n"


def _kernels(found: SingleGpu, impl: str, column: str) -> Kernels:
    """Launches that have a number in a column, of all calls of a library."""
    return [
        (call, row)
        for (call, of), rows in found.limits.items()
        if of == impl
        for row in rows[:-1]
        if number(row, column) is not None
    ]


def _time(rows: Kernels, least: str = "", bound: float = 0.0) -> float:
    """Microseconds of those launches whose column is at least the bound."""
    return sum(
        number(row, "us") or 0.0
        for _, row in rows
        if not least or (number(row, least) or 0.0) >= bound
    )


def _mean(rows: Kernels, column: str) -> float:
    weights = [(number(row, "us") or 0.0, number(row, column)) for _, row in rows]
    known = [(us, value) for us, value in weights if value is not None]
    return sum(us * value for us, value in known) / (sum(us for us, _ in known) or 1.0)


def _verdict(found: SingleGpu) -> str:
    """One word: by the share of our kernels' time in which tensor cores are near their peak."""
    counted = _kernels(found, "ours", "tensor_pct")
    if counted:
        busy = _time(counted, "tensor_pct", BUSY) / (_time(counted) or 1.0)
    else:
        rows = _kernels(found, "ours", "tflops")
        busy = _time(rows, "tflops", BUSY / 100 * PEAK / 1e12) / (_time(rows) or 1.0)
        if not rows:
            return "Not known:"
    if busy < 0.1:
        return "**No.**"
    return "**Yes.**" if busy > 0.5 else f"**For {busy:.0%} of the time.**"


def _counters_words(found: SingleGpu, impl: str, name: str) -> str:
    rows = _kernels(found, impl, "tensor_pct")
    if not rows:
        return ""
    large = [(c, r) for c, r in rows if (number(r, "share") or 0.0) >= SMALL]
    call, most = max(large or rows, key=lambda pair: number(pair[1], "tensor_pct") or 0.0)
    calls = len({c for c, _ in rows})
    counted = f"{calls} call{'s' if calls > 1 else ''} of {name}"
    return (
        f"In {counted} the tensor pipes are active {_mean(rows, 'tensor_pct'):.0f}% "
        f"of the kernels' time, at most {number(most, 'tensor_pct'):.0f}% (`{most['kernel']}`, "
        f"{call.variant} {call.direction}); memory runs at {_mean(rows, 'dram_pct'):.0f}% of its "
        f"peak, and {_time(rows, 'dram_pct', BUSY) / _time(rows):.0%} of the time is in kernels "
        f"where it is above {BUSY:.0f}%."
    )


def _counted_words(found: SingleGpu) -> str:
    rows = _kernels(found, "ours", "tflops")
    if not rows:
        return "no row has counts of bytes and products."
    computed = 1e14 * _mean(rows, "tflops") / PEAK
    moved = 1e14 * _mean(rows, "tbs") / BANDWIDTH
    call, most = max(rows, key=lambda pair: number(pair[1], "tflops") or 0.0)
    return (
        f"By counts, our kernels compute at {computed:.0f}% of {PEAK / 1e12:.0f} TFLOP/s on "
        f"average, at most {number(most, 'tflops'):.0f} TFLOP/s (`{most['kernel']}`, "
        f"{call.variant} {call.direction}), and move {moved:.0f}% of {BANDWIDTH / 1e12:g} TB/s."
    )


# -- tables ---------------------------------------------------------------------------------------


def limits_table(found: SingleGpu) -> str:
    """One line a variant, direction and library."""
    if not found.limits:
        return "No rows.\n"
    head = ("", "us", "launches", "MB moved", "DRAM MB", "floor MB", "TB/s", "DRAM TB/s")
    more = ("floor TB/s", "TFLOP/s", "floor TFLOP/s", "tensor %", "DRAM %", "what limits it")
    lines = [
        "Sums over the kernels of a call. `MB moved`, `TB/s` and `TFLOP/s` are counted from our "
        "plan; `DRAM ...` and `tensor %` are hardware counters; floors are the bytes and products "
        "that no plan can do without, over the same time. `latency`: nothing is "
        f"above {BUSY:.0f}% of its peak; `launches`: the call takes much longer than its kernels.",
        "",
        f"| {' | '.join((*head, *more))} |",
        "|---" * (len(head) + len(more)) + "|",
    ]
    columns = ("us", "launches", "moved_mb", "dram_mb", "floor_mb", "tbs")
    rates = ("floor_tbs", "tflops", "floor_tflops", "tensor_pct", "dram_pct")
    for direction in DIRECTIONS:
        for variant in VARIANTS:
            for impl, name in LIBRARIES:
                row = found.whole(_limits_call(found, variant, direction), impl)
                label = f"{variant} {direction}, {name}"
                if row is None:
                    lines.append(f"| {label} | missing |" + " |" * (len(head) + len(more) - 2))
                    continue
                cells = [row[n] for n in columns] + [_dram_rate(row)] + [row[n] for n in rates]
                lines.append(f"| {' | '.join([label, *cells, limit_words(row)])} |")
    return "\n".join([*lines, ""])


def _dram_rate(row: Row) -> str:
    moved, us = number(row, "dram_mb"), number(row, "ncu_us")
    return f"{moved / us:.3f}" if moved is not None and us else ""


def _limits_call(found: SingleGpu, variant: str, direction: str) -> Call:
    """The call of a variant that limits were measured at; that of the table where none was."""
    known = [c for c, _ in found.limits if (c.variant, c.direction) == (variant, direction)]
    return known[0] if known else Call(variant, direction)


def kernel_tables(found: SingleGpu) -> str:
    """Kernels with a share of at least 5% of a call."""
    parts = []
    for (call, impl), rows in found.limits.items():
        whole = rows[-1]
        title = f"**{call.variant} {call.direction}, {dict(LIBRARIES).get(impl, impl)}**"
        size = f"B={call.B}, T={call.T}, H={call.H}, D={call.D}"
        note = f"; {whole['note']}" if whole["note"] else ""
        parts += [f"{title}, {size}; {whole['date']}, {whole['commit']}{note}", ""]
        parts += _kernel_table(rows[:-1])
    return "\n".join(parts) if parts else "No rows.\n"


def _kernel_table(rows: Sequence[Row]) -> list[str]:
    columns = ("us", "moved_mb", "tbs", "tflops", "tensor_pct", "dram_pct", "xu_pct", "warps_pct")
    head = ("us", "MB", "TB/s", "TFLOP/s", "tensor %", "DRAM %", "exp %", "warps %")
    lines = [f"| kernel | share | {' | '.join(head)} |", "|---" * (len(head) + 2) + "|"]
    for row in rows:
        share = number(row, "share") or 0.0
        if share >= SMALL:
            cells = " | ".join(row[name] for name in columns)
            lines.append(f"| `{row['kernel'][:48]}` | {share:.0%} | {cells} |")
    return [*lines, ""]
