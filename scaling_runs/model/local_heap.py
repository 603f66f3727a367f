"""The chooser's predictions for virtual ranks of one device, beside what was measured there.

Contract: links and rates are those that `HeapTransport` measured on the same device, kept in
`local_links_<gpu>.json`; what an older file lacks is assumed. An exchange alone is compared with
its median less that of the same call where nothing crosses a cut: what the exchange adds, which is
what is predicted. Rows of whole calls (`virtual_ranks.py`) do not tell how much work went on beside
the exchange, so that the prediction is a range: all of it hidden but what it takes from the device,
to nothing hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexla_dist.comm.chooser.cache import parse, serialise
from flexla_dist.comm.chooser.cost import Estimate, estimate
from flexla_dist.comm.chooser.links import ASSUMED_LINKS, DEVICE, Link, Rates, assumed_rates
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.setting import Setting
from flexla_dist.comm.topology import SAME_PROCESS, Topology
from scaling_runs.model.clusters import ModelProblem
from scaling_runs.rows import RowStore, format_table
from scaling_runs.virtual_ranks import COLUMNS as VIRTUAL_COLUMNS
from scaling_runs.virtual_ranks import KEY as VIRTUAL_KEY
from scaling_runs.weak_cases import compiled

WITHIN = 0.25
EXCHANGE_COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "kind", "heads", "K", "W", "strategy"),
    *("median_us", "p20_us", "p80_us", "apart_us", "hop_us", "mib_hop"),
)
EXCHANGE_KEY = ("gpu", "kind", "heads", "K", "W", "strategy")
ALONE = (
    *("kind", "heads", "K", "W", "strategy", "median_us", "apart_us", "added_us"),
    *("predicted_us", "ratio", "whole_ratio"),
)
WHOLE = (
    *("variant", "direction", "T", "W", "strategy", "delay_us", "median_ms", "ideal_ms"),
    *("added_us", "hidden_us", "exposed_us", "ratio"),
)
Row = dict[str, object]


@dataclass(frozen=True)
class Device:
    """What was measured of a device whose ranks share it."""

    link: Link
    rates: Rates

    def keep(self, folder: Path, slug: str) -> Path:
        """Write the file; returns it."""
        path = _path(folder, slug)
        folder.mkdir(parents=True, exist_ok=True)
        content = serialise({SAME_PROCESS: self.link}, self.rates)
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path, slug: str) -> Device:
        """Inverse of `keep`. Raises ModelProblem where there is no such file."""
        path = _path(folder, slug)
        if not path.is_file():
            raise ModelProblem(
                f"no links and rates of virtual ranks ({path} is missing): run "
                "scaling_runs/local_exchange.py on that GPU"
            )
        links, rates = parse(json.loads(path.read_text()))
        if rates is None or SAME_PROCESS not in links:
            raise ModelProblem(f"{path} holds no link between virtual ranks, or no rates")
        step = rates.step or assumed_rates("cuda", slug.upper()).step
        return cls(links[SAME_PROCESS], replace(rates, step=step))

    def estimate(self, strategy: str, ranks: int, payload: Payload, delay: float = 0.0) -> Estimate:
        """The chooser's estimate of an exchange. delay: seconds added to each message."""
        lanes = ASSUMED_LINKS[DEVICE, SAME_PROCESS].lanes
        curve = self.link.one
        later = replace(curve, points=tuple((n, t + delay) for n, t in curve.points))
        credit = self.link.credit or self.link.alpha
        link = replace(self.link, one=later, lanes=lanes, credit=credit)
        place = Topology((ranks,), SAME_PROCESS, device="cuda", device_name="gpu", heap="local")
        setting = Setting(place, payload, {SAME_PROCESS: link}, self.rates)
        return estimate(strategy, DEVICE, setting)


def _path(folder: Path, slug: str) -> Path:
    return folder / f"local_links_{slug}.json"


def exchange_rows(folder: Path, slug: str) -> RowStore:
    """Rows of exchanges alone."""
    return RowStore(folder / f"local_exchange_{slug}.csv", EXCHANGE_COLUMNS, EXCHANGE_KEY)


def compare_alone(rows: Sequence[Mapping[str, str]], device: Device) -> list[Row]:
    """Exchanges alone beside the prediction of what they add.

    ratio: predicted by measured of what is added; whole_ratio: of all of the call's time.
    """
    found: list[Row] = []
    for row in rows:
        W, heads, K = (int(row[name]) for name in ("W", "heads", "K"))
        payload = Payload.of_heads(row["kind"], heads, K, K)
        predicted = 1e6 * device.estimate(row["strategy"], W, payload).total
        median, apart = float(row["median_us"]), float(row["apart_us"])
        added = median - apart
        one: Row = {name: row[name] for name in ALONE[:7]}
        one |= {"added_us": added, "predicted_us": predicted}
        one |= {"ratio": predicted / added if added > 0 else None}
        found.append(one | {"whole_ratio": (predicted + apart) / median})
    return found


def compare_whole(rows: Sequence[Mapping[str, str]], device: Device) -> list[Row]:
    """Whole calls on virtual ranks beside the range of predictions.

    added: over `ideal_same_plan`; hidden and exposed: the ends of the range. ratio: of the whole
    time, the nearest predicted one by the measured one: 1 inside the range.
    """
    ideals = {
        _call(row): float(row["median_ms"]) for row in rows if row["impl"] == "ideal_same_plan"
    }
    found: list[Row] = []
    for row in rows:
        if row["impl"] != "ours" or _call(row) not in ideals:
            continue
        ideal, measured = ideals[_call(row)], float(row["median_ms"])
        K, V, lanes = int(row["K"]), int(row["V"]), int(row["B"]) * int(row["H"])
        payload = Payload.of_heads(kind_of(row["variant"]), lanes, K, V)
        delay = 1e-6 * float(row["delay_us"])
        one = device.estimate(row["strategy"], int(row["W"]), payload, delay)
        scans = 1 if row["direction"] == "fwd" else 2
        least, most = (1e3 * scans * seconds for seconds in (min(one.busy, one.total), one.total))
        nearest = min(max(measured, ideal + least), ideal + most)
        line: Row = {name: row[name] for name in WHOLE[:7]}
        line |= {"ideal_ms": ideal, "added_us": 1e3 * (measured - ideal)}
        line |= {"hidden_us": 1e3 * least, "exposed_us": 1e3 * most, "ratio": nearest / measured}
        found.append(line)
    return found


def _call(row: Mapping[str, str]) -> tuple[str, ...]:
    """What a row and its ideal have in common; older rows have fewer columns."""
    return tuple(row.get(name, "") for name in VIRTUAL_KEY if name not in ("impl", "delay_us"))


def kind_of(variant: str) -> str:
    """The kind of M of a variant, the costliest of its states, by the chooser's names."""
    names = {"identity": "none", "columns": "rows"}
    order = ("none", "scalar", "rows", "full", "dense")
    kinds = [t.kind for t in compiled(variant).graphs.transitions.values()]
    return max((names.get(kind, kind) for kind in kinds), key=order.index)


def said(rows: Sequence[Row], column: str, what: str) -> str:
    """How many ratios of a column are within the bound."""
    ratios = [float(str(row[column])) for row in rows if row[column] is not None]
    inside = sum(1 - WITHIN <= ratio <= 1 + WITHIN for ratio in ratios)
    return f"{what}: {inside} of {len(rows)} within {WITHIN:.0%}"


def report(folder: Path, slug: str) -> tuple[str, bool]:
    """(tables and verdict of a machine's rows, whether every exchange alone is within 25%).

    Raises ModelProblem where the links were not measured, or no rows.
    """
    device = Device.read(folder, slug)
    alone = compare_alone(exchange_rows(folder, slug).rows(), device)
    path = folder / f"virtual_ranks_{slug}.csv"
    rows = RowStore(path, VIRTUAL_COLUMNS, VIRTUAL_KEY).rows() if path.is_file() else []
    whole = compare_whole(rows, device)
    if not alone and not whole:
        raise ModelProblem(
            f"no rows of virtual ranks on {slug} in {folder}: run scaling_runs/local_exchange.py "
            "and scaling_runs/virtual_ranks.py on that GPU"
        )
    texts = []
    if alone:
        texts += [format_table(alone, ALONE)]
        texts += [said(alone, "ratio", "what exchanges add, predicted against measured")]
        texts += [said(alone, "whole_ratio", "the whole time of exchanges")]
    if whole:
        texts += ["", format_table(whole, WHOLE)]
        texts += [said(whole, "ratio", "whole calls, nearest end of the predicted range")]
    good = [r for r in alone if _within(r["ratio"])]
    return "\n".join(texts), bool(alone) and len(good) == len(alone)


def _within(ratio: object) -> bool:
    return ratio is not None and 1 - WITHIN <= float(str(ratio)) <= 1 + WITHIN
