"""Rows of one GPU for its page, the least bytes of a call, and what a row says of its limit.

Contract: everything comes from the rows of two files, `single_gpu_<gpu>.csv` and
`limits_<gpu>.csv`; what is not there is None.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM
from flexla_dist.spec.variants import get_variant

Row = Mapping[str, str]
VARIANTS = ("linear_attn", "simple_gla", "gla", "gated_delta_rule", "kda", "hgrn")
SOFTMAX = "softmax_attention"
DIRECTIONS = ("fwd", "fwdbwd")
BANDWIDTH, PEAK = 4.3e12, 790e12  # measured: a copy, dense bfloat16 products
ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}
BUSY = 60.0  # per cent of a peak from which on it is called the limit
IDLE = 1.25  # a call that takes this much more than its kernels is held up between them
# ms on an H200 at B=1, H=32, D=128 in bfloat16, by direction and T
GOALS: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("fwd", 16384): {
        "linear_attn": 0.20, "simple_gla": 0.25, "gla": 0.60, "gated_delta_rule": 0.50,
        "kda": 0.90, "hgrn": 0.14,
    },
    ("fwd", 262144): {
        "linear_attn": 3.1, "simple_gla": 3.5, "gla": 9.0, "gated_delta_rule": 4.9, "kda": 14.0,
        "hgrn": 2.0,
    },
    ("fwdbwd", 16384): {
        "linear_attn": 1.0, "simple_gla": 1.3, "gla": 3.4, "gated_delta_rule": 2.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A variant, a direction and sizes."""

    variant: str
    direction: str
    B: int = 1
    T: int = 16384
    H: int = 32
    D: int = 128
    HV: int = 0
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class SingleGpu:
    """All rows of one GPU: `times` by call and implementation, `limits` by call and
    implementation, launches in order and the whole call last."""

    gpu: str
    times: Mapping[tuple[Call, str], Row]
    limits: Mapping[tuple[Call, str], Sequence[Row]]

    def calls(self) -> list[Call]:
        """Calls that any implementation was timed at."""
        return list(dict.fromkeys(call for call, _ in self.times))

    def ms(self, call: Call, impl: str) -> float | None:
        """Median milliseconds."""
        return number(self.times.get((call, impl)), "median_ms")

    def mib(self, call: Call, impl: str) -> float | None:
        """Peak memory."""
        return number(self.times.get((call, impl)), "peak_mib")

    def note(self, call: Call, impl: str) -> str:
        """What a row says instead of numbers."""
        return self.times.get((call, impl), {}).get("note") or ""

    def whole(self, call: Call, impl: str) -> Row | None:
        """The row of limits of a whole call."""
        rows = self.limits.get((call, impl))
        return rows[-1] if rows else None

    def launches(self, call: Call, impl: str) -> Sequence[Row]:
        """Rows of limits of its launches."""
        return self.limits.get((call, impl), ())[:-1]


def number(row: Row | None, column: str) -> float | None:
    """A column as a number; None where it is empty or the row is missing."""
    text = row.get(column) if row is not None else None
    return float(text) if text else None


def read_single(folder: Path, gpu: str) -> SingleGpu:
    """Rows of one GPU, given as in file names; files may be missing."""
    times = {(_call(r), r["impl"]): r for r in _rows(folder / f"single_gpu_{gpu}.csv")}
    limits: dict[tuple[Call, str], list[Row]] = {}
    for row in _rows(folder / f"limits_{gpu}.csv"):
        limits.setdefault((_call(row), row["impl"]), []).append(row)
    for rows in limits.values():
        rows.sort(key=lambda row: (row["at"] == "all", row["at"].zfill(4)))
    whole = {key: rows for key, rows in limits.items() if rows[-1]["at"] == "all"}
    return SingleGpu(gpu, times, whole)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _call(row: Row) -> Call:
    sizes = {"B": int(row["B"]), "T": int(row["T"]), "H": int(row["H"]), "D": int(row["V"])}
    grouped = int(row.get("HV") or 0)
    return Call(row["variant"], row["direction"], **sizes, HV=grouped, dtype=row["dtype"])


# -- the floor ------------------------------------------------------------------------------------


def floor_bytes(call: Call) -> int:
    """Bytes that no plan can do without: inputs and output once; with the backward pass, inputs
    and the output's gradient once more, and the gradients. States are not counted."""
    if call.variant == SOFTMAX:
        given = 3 * call.D * call.H
        output = call.D * call.H
    else:
        spec = get_variant(call.variant)
        heads = 1 if call.variant == "hgrn" else call.H
        wide = call.HV or heads
        given = sum(
            (wide if item.group is None else heads) * _size(item.dims, call)
            for item in spec.input_specs.values()
        )
        output = wide * _size(spec.output_dims, call)
    tokens = call.B * call.T * ELEMENT[call.dtype]
    forward = given + output
    return tokens * (forward if call.direction == "fwd" else 2 * forward + given)


def _size(dims: Iterable[str], call: Call) -> int:
    sizes = {"D": call.D * call.H, TOKEN_DIM: 1, UNIT_DIM: 1}
    total = 1
    for dim in dims:
        total *= sizes.get(dim, call.D)
    return total


def floor_ms(call: Call) -> float:
    """Least time of those bytes on an H200."""
    return 1e3 * floor_bytes(call) / BANDWIDTH


# -- what limits ----------------------------------------------------------------------------------


def limit_words(whole: Row) -> str:
    """What limits a call now, from counters, else from counted bytes and FLOPs."""
    tensor, dram = number(whole, "tensor_pct"), number(whole, "dram_pct")
    if tensor is not None and dram is not None:
        parts = {"memory": dram, "tensor cores": tensor, "exponentials": number(whole, "xu_pct")}
        how = "counters"
    else:
        moved, computed = number(whole, "tbs"), number(whole, "tflops")
        if moved is None or computed is None:
            least = 1e14 * (number(whole, "floor_tbs") or 0.0) / BANDWIDTH
            return f"not known: no counters (memory at least {least:.0f}%, by the floor)"
        parts = {"memory": 1e14 * moved / BANDWIDTH, "products": 1e14 * computed / PEAK}
        how = "counted"
    known = {name: value for name, value in parts.items() if value is not None}
    told = ", ".join(f"{name} {value:.0f}%" for name, value in known.items())
    first = max(known, key=lambda name: known[name])
    limit = first if known[first] >= BUSY else "latency"
    call, kernels = number(whole, "call_ms"), number(whole, "us")
    gaps = call is not None and kernels is not None and 1e3 * call > IDLE * kernels
    return f"{limit} ({told}; {how}){'; launches' if gaps else ''}"
