"""Step 1: every variant and strategy by both engines, forward and backward, on all ranks.

A small call on shards of unequal lengths is compared with the unsharded operator in float64 on one
device: output and all gradients, on every rank. It runs twice, and must give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexla_dist.comm.heaps import HeapError
from flexla_dist.comm.heaps.meeting import Meeting
from flexla_dist.comm.heaps.nvshmem import NvshmemHeap
from flexla_dist.comm.links import GroupRanks
from flexla_dist.parallel import check_exchanges, use_heap
from scaling_runs.baselines import Refused
from scaling_runs.multi_gpu_ranks import WRONG
from scaling_runs.weak_cases import Comparison, Known
from scaling_runs.weak_grid import CallShape, Point
from scaling_runs.weak_scaling import short_text

if TYPE_CHECKING:
    from scaling_runs.multi_gpu_part import Part
    from scaling_runs.multi_gpu_sizes import Sizes

Found = tuple[float, bool]
FIRST_STRATEGIES = ("chain", "hierarchical")


def check(part: Part) -> int:
    """All systems of ours; what was wrong is in the rows and in the status."""
    return _check(part, "check", part.sizes.engines)


def check_nvshmem(part: Part) -> int:
    """The device engine by NVSHMEM's functions, where that can be had."""
    name = {"engine": "device", "quantity": "nvshmem heap"}
    try:
        meeting = Meeting(GroupRanks.of(part.group), part.sizes.timeout)
        heap = NvshmemHeap(meeting, part.ranks.device, dialect="nvshmem")
    except HeapError as why:
        part.put("check_nvshmem", "refused", **name, note=short_text(why))
        return 0
    use_heap(part.group, heap)
    part.put("check_nvshmem", "ok", **name, note=f"dialect {heap.dialect}")
    return _check(part, "check_nvshmem", ("device",))


def _check(part: Part, step: str, engines: tuple[str, ...]) -> int:
    """What tells most first: see `cases`."""
    wrong = 0
    known: Known = {}
    for name in cases(part.sizes, engines):
        if part.to_do(step, **name):
            wrong += not _case(part, step, name, known)
    return WRONG if wrong else 0


def cases(sizes: Sizes, engines: tuple[str, ...]) -> list[dict[str, str]]:
    """Every engine, variant and strategy once; chain and hierarchical of the leading variants by
    all engines come first. An engine after the other, so that one which ends the program leaves
    the other alone."""
    found = [
        (engine, variant, strategy)
        for variants, strategies in (
            (sizes.leading, [s for s in FIRST_STRATEGIES if s in sizes.strategies]),
            ((*sizes.leading, *sizes.checked), sizes.strategies),
        )
        for engine in engines
        for variant in variants
        for strategy in strategies
        if variant in sizes.checked
    ]
    names = ("engine", "variant", "strategy")
    return [dict(zip(names, case, strict=True)) for case in dict.fromkeys(found)]


def _case(part: Part, step: str, name: dict[str, str], known: Known) -> bool:
    """One comparison; False where it is wrong."""
    try:
        worst, same = _errors(part, name, known)
    except Refused as why:
        part.put(step, "refused", **name, note=short_text(why))
        return True
    except Exception as why:
        part.put(step, "failed", **name, note=short_text(why))
        raise
    errors, bits = part.gathered(worst), part.gathered(float(same))
    good = max(errors) <= 1.0 and all(bits)
    note = "output and gradients; the same bits twice" if all(bits) else "BITS DIFFER"
    part.put(
        step,
        "ok" if good else "wrong",
        **name,
        value=max(errors),
        unit="of its bound",
        bound=1.0,
        first=errors[0],
        middle=errors[len(errors) // 2],
        last=errors[-1],
        note=note,
    )
    return good


def _errors(part: Part, name: dict[str, str], known: Known) -> Found:
    """This rank's largest error as a multiple of its bound, and whether bits repeat."""
    point = _point(part, name)
    lengths = tuple(part.sizes.check_tokens + 3 * rank for rank in range(point.P))
    comparison = Comparison(point, part.setup, lengths, known)
    first, again = comparison.sharded(), comparison.sharded()
    if name["engine"] == "device":
        check_exchanges(part.group)
    same = all(torch.equal(a, again[n]) for n, a in first.items())
    return max(comparison.errors(first).values()), same


def _point(part: Part, name: dict[str, str]) -> Point:
    sizes, world = part.sizes, part.ranks.world
    system = name["strategy"] + ("_device" if name["engine"] == "device" else "")
    return Point(
        system=system,
        variant=name["variant"],
        mode="weak",
        placement="barrier",
        direction="fwdbwd",
        P=world,
        T=sizes.check_tokens,
        total=sizes.check_tokens * world,
        **vars(CallShape.parse(sizes.shape)),
        dtype=sizes.dtype,
    )
