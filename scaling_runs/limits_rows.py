"""Rows of `limits.py`: one a launch, and one a call with sums and the floor.

Contract: the rows of a case are replaced together; `at` is the place of a launch in its call, or
`all`. Numbers that nobody counted or measured are empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from scaling_runs.bench import Shape
from scaling_runs.limits_kernels import (
    Counted,
    Launch,
    counted_launches,
    matched,
    plan_steps,
)
from scaling_runs.limits_ncu import METRICS, Seen, aligned
from scaling_runs.machine import Machine
from scaling_runs.rows import Row, RowStore

CASE = ("gpu", "variant", "direction", "B", "T", "H", "K", "V", "dtype", "impl")
KEY = (*CASE, "at")
COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "variant", "direction"),
    *("B", "T", "H", "K", "V", "dtype", "impl", "impl_version", "plan", "at", "kernel"),
    *("launches", "us", "share", "call_ms", "moved_mb", "tbs", "gflop", "tflops", "bound"),
    *("floor_mb", "floor_tbs", "floor_gflop", "floor_tflops"),
    *METRICS,
    "note",
)
WHOLE = "all"
SUMS = ("ncu_us", "dram_mb")


class LimitRows:
    """Writes rows of cases."""

    def __init__(self, store: RowStore, machine: Machine):
        self.store, self.machine = store, machine
        self._touched: dict[tuple[Shape, str], None] = {}

    def case(self, shape: Shape, impl: str) -> dict[str, str]:
        """The columns that all rows of a case share."""
        known = {"gpu": self.machine.gpu, **vars(shape), "impl": impl}
        return {name: str(known[name]) for name in CASE}

    def of(self, shape: Shape, impl: str) -> list[Row]:
        """Rows of a case, launches in order, the whole call last."""
        wanted = self.case(shape, impl)
        found = [r for r in self.store.rows() if all(r[n] == v for n, v in wanted.items())]
        return sorted(found, key=lambda row: (row["at"] == WHOLE, row["at"].zfill(4)))

    def whole(self, shape: Shape, impl: str) -> Row | None:
        """The row of the whole call."""
        return self.store.get({**self.case(shape, impl), "at": WHOLE})

    def is_new(self, shape: Shape, impl: str) -> bool:
        """Is there a row of today at this commit?"""
        row = self.whole(shape, impl)
        if row is None or row["date"] != self.machine.date:
            return False
        return self.machine.measured_same_code(row)

    def is_counted(self, shape: Shape, impl: str) -> bool:
        """Has the case hardware counters?"""
        row = self.whole(shape, impl)
        return row is not None and row["tensor_pct"] != ""

    def written(self) -> list[Row]:
        """Rows of all cases that were written or counted."""
        return [row for case in self._touched for row in self.of(*case)]

    # -- writing ----------------------------------------------------------------------------------

    def write(
        self,
        shape: Shape,
        impl: str,
        version: str,
        plan: str,
        launches: Sequence[Launch],
        call_ms: float,
    ) -> Row:
        """Rows of a case that was just profiled; returns that of the call."""
        self._touched[shape, impl] = None
        case = self.case(shape, impl)
        self.store.remove(case)
        steps, floor = plan_steps(shape)
        counted: dict[tuple[str, int], Counted] = {}
        note = ""
        if impl == "ours":
            counted, note = matched(launches, counted_launches(shape.variant, steps))
        common = {**self.machine.columns(), **case, "impl_version": version, "plan": plan}
        total = sum(launch.us for launch in launches)
        for at, launch in enumerate(launches):
            row = {"at": at, "kernel": launch.kernel, "launches": 1, "us": f"{launch.us:.2f}"}
            row |= {"share": f"{launch.us / total:.4f}"}
            row |= counted_columns(counted.get((launch.kernel, launch.at)), launch.us)
            self.store.put({**common, **row})
        row = {"at": WHOLE, "kernel": WHOLE, "launches": len(launches), "us": f"{total:.2f}"}
        row |= {"share": "1", "call_ms": f"{call_ms:.4f}", "note": note}
        if counted and not note:
            every = counted.values()
            whole = Counted(sum(c.bytes for c in every), sum(c.flops for c in every))
            row |= counted_columns(whole, total)
        row |= {f"floor_{n}": v for n, v in rate_columns(floor, total).items()}
        return self.store.put({**common, **row})

    def note(self, shape: Shape, impl: str, text: str) -> None:
        """Say something in the row of the call."""
        row = self.whole(shape, impl)
        if row is not None and text and text not in row["note"]:
            self._touched[shape, impl] = None
            kept = row["note"].split("; ") if row["note"] else []
            kept = [said for said in kept if not said.startswith("no counters")]
            self.store.put({**row, "note": "; ".join([*kept, text])})

    def count(self, shape: Shape, impl: str, seen: Sequence[Seen], why_not: str) -> bool:
        """Add counters to the rows of a case; says whether they fit its launches."""
        rows = self.of(shape, impl)
        launches: list[Launch] = []
        places: dict[tuple[str, int], Row] = {}
        for row in rows[:-1]:
            at = sum(x.kernel == row["kernel"] for x in launches)
            launches.append(Launch(row["kernel"], at, float(row["us"])))
            places[row["kernel"], at] = row
        found = aligned(launches, seen)
        if not found:
            said = why_not or "the counted call launched other kernels"
            self.note(shape, impl, f"no counters: {said}")
            return False
        self._touched[shape, impl] = None
        for key, one in found.items():
            self.store.put({**places[key], **{n: _text(v) for n, v in one.values.items()}})
        whole = dict(rows[-1])
        whole["note"] = "; ".join(
            said for said in whole["note"].split("; ") if not said.startswith("no counters")
        )
        self.store.put({**whole, **_summed(list(found.values()))})
        return True


def counted_columns(counted: Counted | None, us: float) -> dict[str, object]:
    """Bytes, FLOPs and the rates that they were moved and computed at."""
    if counted is None or us <= 0:
        return {}
    rates = rate_columns(counted, us)
    return {"moved_mb": rates.pop("mb"), **rates, "bound": counted.bound}


def rate_columns(counted: Counted, us: float) -> dict[str, object]:
    """Amounts, and amounts over time."""
    return {
        "mb": f"{counted.bytes / 1e6:.1f}",
        "tbs": f"{counted.bytes / us / 1e6:.3f}",
        "gflop": f"{counted.flops / 1e9:.2f}",
        "tflops": f"{counted.flops / us / 1e6:.1f}",
    }


def _summed(seen: Sequence[Seen]) -> dict[str, str]:
    """Counters of a call: sums, or means weighted with the time of the counted launches."""
    found = {}
    for name in METRICS:
        have = [x for x in seen if name in x.values and x.values.get("ncu_us", 0) > 0]
        if len(have) < len(seen):
            continue
        if name in SUMS:
            value = sum(x.values[name] for x in have)
        else:
            time = sum(x.values["ncu_us"] for x in have)
            value = sum(x.values[name] * x.values["ncu_us"] for x in have) / time
        found[name] = _text(value)
    return found


def _text(value: float) -> str:
    """Four digits, or all of a large number."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
