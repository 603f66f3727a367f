"""Local parts of a call on a GPU, from rows of single_gpu.py and of virtual_ranks.py.

Contract: forward and backward are medians of `single_gpu_<gpu>.csv`. What summaries add is the
difference between two medians of `virtual_ranks_<gpu>.csv`, shards with summaries and flags set
beforehand and shards as sequences of their own, for each of the W ranks; in forward and backward
together it is measured as one, and halved. All of it is in proportion to B * T. Applying and
composing elements was not measured alone: it takes the time of the bytes that it moves.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling_runs.model.clusters import ModelProblem
from scaling_runs.model.workload import Kernels, bytes_of
from scaling_runs.weak_grid import Point

COPY_BANDWIDTH = 4.28e12  # bytes a second that one H200 copies, measured
ASSUMPTIONS = (
    "local times are those of one sequence of the rows' length on one H200 in proportion to B x T: "
    "four sequences at once took 4.0 times as long as one in the same rows",
    "an apply moves three states and M, a combine twice as much, at 4.28 TB/s",
    "what summaries and adjoint summaries add is measured in forward and backward together, half "
    "is taken for either",
    "device engine: all heads at once, the default, so that no summary or local pass hides an "
    "exchange; delays of messages between virtual ranks added 0.96 of themselves to gated delta "
    "rule and 0.91 to simple_gla, chain",
)


def apply_seconds(state: float, element: float) -> float:
    """An element on a state: the state is read, read and written, and M is read."""
    return (3 * state + (element - state)) / COPY_BANDWIDTH


@dataclass(frozen=True)
class GpuRows:
    """Rows of a GPU."""

    single: Sequence[Mapping[str, str]]
    virtual: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, folder: Path, slug: str) -> GpuRows:
        """Those of a folder. Raises ModelProblem where there are none."""
        stores = tuple(
            _rows(folder / f"{name}_{slug}.csv") for name in ("single_gpu", "virtual_ranks")
        )
        if not all(stores):
            raise ModelProblem(
                f"no rows of local parts on {slug} in {folder}: measure them with `python -m "
                "scaling_runs.model --calibrate`, or with single_gpu.py and virtual_ranks.py"
            )
        return cls(*stores)

    def kernels(self, point: Point) -> Kernels:
        """Seconds at the point's B and T. Raises ModelProblem where its shape was not measured."""
        forward = self._single(point, "fwd")
        both = self._single(point, "fwdbwd") if point.direction == "fwdbwd" else forward
        scale, added = point.B * point.T, self._summaries(point)
        half = added / 2 if point.direction == "fwdbwd" else added
        sizes = bytes_of(point.variant, point.B, point.H, point.K, point.V, point.dtype)
        apply = apply_seconds(sizes.state, sizes.element)
        return Kernels(
            summary=scale * half,
            forward=scale * forward,
            adjoint=scale * half,
            backward=scale * (both - forward),
            apply=apply,
            combine=2 * apply,
        )

    def source(self, variant: str) -> str:
        """Whose rows and commits they are."""
        single = {r["commit"] for r in self.single if _ours(r) and r["variant"] == variant}
        virtual = {
            r["commit"]
            for r in self.virtual
            if r["variant"] == variant and (_at_once(r) or r["impl"] == "ideal_best")
        }
        return f"single_gpu {' '.join(sorted(single))}; virtual_ranks {' '.join(sorted(virtual))}"

    def _single(self, point: Point, direction: str) -> float:
        """Seconds for each token of a sequence, of the longest that was measured up to T."""
        rows = [r for r in self.single if _ours(r) and _same(r, point, direction)]
        return _per_token(_nearest(rows, point), 1)

    def _summaries(self, point: Point) -> float:
        """Seconds for each token that summaries add."""
        rows = [r for r in self.virtual if _same(r, point, point.direction)]
        plan = _nearest([r for r in rows if _at_once(r)], point)
        alone = [r for r in rows if r["impl"] == "ideal_best" and r["W"] == plan["W"]]
        ranks = int(plan["W"])
        return _per_token(plan, ranks) - _per_token(_nearest(alone, point), ranks)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _ours(row: Mapping[str, str]) -> bool:
    return row["impl"] == "ours"


def _at_once(row: Mapping[str, str]) -> bool:
    """Of the plan with summaries, all heads at once."""
    return row["impl"] == "ideal_same_plan" and row["groups"] == row["H"]


def _same(row: Mapping[str, str], point: Point, direction: str) -> bool:
    wanted = {"variant": point.variant, "direction": direction, "dtype": point.dtype}
    wanted |= {"H": str(point.H), "K": str(point.K), "V": str(point.V)}
    return all(row[name] == value for name, value in wanted.items())


def _nearest(rows: Sequence[Mapping[str, str]], point: Point) -> Mapping[str, str]:
    if not rows:
        raise ModelProblem(
            f"no rows of {point.variant} {point.direction} with {point.H} heads of {point.K} x "
            f"{point.V} in {point.dtype}: measure them with single_gpu.py and virtual_ranks.py"
        )
    return min(rows, key=lambda r: abs(int(r["T"]) - point.T))


def _per_token(row: Mapping[str, str], ranks: int) -> float:
    return 1e-3 * float(row["median_ms"]) / (int(row["B"]) * int(row["T"]) * ranks)
