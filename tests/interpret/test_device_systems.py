"""Strategies by kernels as systems of the scaling comparison, on ranks that interpret kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist

from flexla_dist.comm.engines import DeviceEngine
from flexla_dist.ops.op import compile
from flexla_dist.parallel.engine import DeviceCarrier
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs.baselines import Settings, Sharding, get_system
from scaling_runs.baselines.device import IdealAttend, checked_once
from scaling_runs.weak_cases import Case, Comparison, Known, Setup, compiled, inputs_of
from scaling_runs.weak_grid import Point

from .device_parallel_cases import PRELOAD

STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")
FEW = ("simple_gla", "gated_delta_rule")
MANY = (*FEW, "gla", "linear_attn_normalized")


def point(system: str, variant: str, size: int) -> Point:
    return Point(
        system=system,
        variant=variant,
        mode="weak",
        placement="barrier",
        direction="fwdbwd",
        P=size,
        T=16,
        total=16 * size,
        B=2,
        H=2,
        K=8,
        V=8,
        dtype="float32",
    )


def setup(size: int) -> Setup:
    nodes = tuple(rank // 2 for rank in range(size))
    return Setup(dist.group.WORLD, torch.device("cpu"), Settings(node_size=2, timeout=60.0), nodes)


def errors(
    rank: int, size: int, systems: tuple[str, ...], variants: tuple[str, ...]
) -> dict[tuple[str, str], float]:
    """Largest error of each, as a multiple of its bound, on this rank."""
    lengths = tuple(0 if rank == 1 and size > 2 else 20 + 3 * rank for rank in range(size))
    found = {}
    for variant in variants:
        known: Known = {}
        for system in systems:
            comparison = Comparison(point(system, variant, size), setup(size), lengths, known)
            found[system, variant] = max(comparison.errors(comparison.sharded()).values())
    return found


@pytest.mark.parametrize(
    ("size", "variants"), [(2, FEW), pytest.param(4, MANY, marks=pytest.mark.long)]
)
def test_systems_equal_the_unsharded_operator(size: int, variants: tuple[str, ...]) -> None:
    systems = tuple(f"{name}_device" for name in STRATEGIES)
    for found in run_ranks(errors, size, systems, variants, preload=PRELOAD, timeout=300):
        assert len(found) == len(systems) * len(variants)
        assert all(0 < worst <= 1.0 for worst in found.values()), found


def checks(rank: int, size: int, direction: str) -> tuple[list[int], bool]:
    """Checks of exchanges in two calls outside of the block, in two inside, and at its end; and
    whether the exchange alone gives the rank after the first what the first one sent."""
    place = replace(point("chain_device", "simple_gla", size), direction=direction)
    case = Case(place, setup(size))
    call, original, seen = case.call(), DeviceEngine.check, [0]

    def count(self: DeviceEngine, *, always: bool = False) -> None:
        seen[0] += 1
        original(self, always=always)

    DeviceEngine.check = count  # type: ignore[method-assign]
    try:
        call(), call()
        counts = [seen[0]]
        with checked_once(dist.group.WORLD, torch.device("cpu")):
            call(), call()
            counts.append(seen[0] - counts[0])
        counts.append(seen[0] - sum(counts))
    finally:
        DeviceEngine.check = original  # type: ignore[method-assign]
    [state] = case.exchange()()
    return counts, bool(state.abs().sum() > 0)


@pytest.mark.parametrize("direction", ["fwd", "fwdbwd"])
def test_timed_calls_check_once(direction: str) -> None:
    first, second = run_ranks(checks, 2, direction, preload=PRELOAD)
    assert first == ([2, 0, 1], False) and second == ([2, 0, 1], True)


def ideal(rank: int, size: int, backend: str) -> tuple[bool, bool, float]:
    """Whether the last rank's calls end while the others make none, by which engine it ran, and
    the largest error of our own call afterwards."""
    group, where = dist.group.WORLD, setup(size)
    lengths = tuple(20 + 3 * r for r in range(size))
    attend = IdealAttend(
        compiled("gated_delta_rule"), Sharding.of(group, lengths), 60.0, backend=backend
    )
    own = Comparison(point("chain_device", "gated_delta_rule", size), where, lengths)
    given = inputs_of(point("chain", "gated_delta_rule", size), lengths[rank], where.device, rank)

    def both() -> bool:
        output = attend(given.inputs, given.params, given.scalars)
        grads = torch.autograd.grad(output.sum(), list(given.inputs.values()))
        return all(bool(x.isfinite().all()) for x in (output, *grads))

    whole = both()  # makes workspaces, together
    dist.barrier()
    if rank == size - 1:
        whole = all([whole, both(), both()])
    dist.barrier()
    whole = both() and whole
    error = max(own.errors(own.sharded()).values())
    carrier = next(iter(attend.carriers.values()))
    return whole, isinstance(carrier, DeviceCarrier), error


@pytest.mark.parametrize("backend", ["device", "auto"])
def test_the_ideal_waits_for_nobody(backend: str) -> None:
    for finite, by_kernels, error in run_ranks(ideal, 2, backend, preload=PRELOAD, timeout=200):
        assert finite and by_kernels == (backend == "device") and 0 < error <= 1.0


def scans_by_kernels(rank: int, size: int, systems: tuple[str, ...]) -> list[float]:
    """Largest error of systems that gather elements, with calls of kernels that stop for them."""
    where, lengths = setup(size), tuple(20 + 3 * r for r in range(size))
    found = []
    for variant in ("gated_delta_rule", "simple_gla"):
        op = compile(get_variant(variant), executor="triton")
        comparison = Comparison(point("chain_device", variant, size), where, lengths)
        for name in systems:
            sharding = Sharding.of(dist.group.WORLD, lengths)
            comparison._attend = get_system(name).prepare(op, sharding, Settings(panels=1))
            found.append(max(comparison.errors(comparison.sharded()).values()))
            assert op.executor(None, where.device, torch.float32).name == "triton"
    return found


def test_baselines_go_on_from_calls_that_stop() -> None:
    for found in run_ranks(scans_by_kernels, 3, ("lasp2", "lasp2_naive"), preload=PRELOAD):
        assert len(found) == 4 and all(0 < worst <= 1.0 for worst in found), found


def test_engines_of_systems() -> None:
    assert get_system("chain").engine == "host" and get_system("auto").engine == "auto"
    system = get_system("log_scan_device")
    assert (system.engine, system.strategy, system.family) == ("device", "log_scan", "ours")
