"""Step 2: what a link and a hop of the exchange cost, by both engines.

A scan over all ranks is timed from a meeting of the ranks until the rank that waits longest has its
state. A hop of the chain is a (P - 1)th of what that takes longer than the same call where nothing
crosses a cut. alpha and bandwidth are fitted to the hops of states of several sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from flexla_dist.comm import Element, Tag, zero_state
from flexla_dist.comm.engines import span_of
from flexla_dist.parallel import check_exchanges
from flexla_dist.parallel.runtime import runtime_of
from scaling_runs.baselines import Refused
from scaling_runs.baselines.device import engine_of
from scaling_runs.link_times import make_element
from scaling_runs.model.calibrate import fit
from scaling_runs.weak_scaling import short_text
from scaling_runs.weak_time import Clock, Times

if TYPE_CHECKING:
    from scaling_runs.multi_gpu_part import Part

Call = Callable[[], object]
KINDS = ("scalar", "dense")
COPIED_BYTES = 256 << 20
CHECKS = 10
SECONDS = 0.1  # of timed scans


def links(part: Part) -> int:
    """Rows of scans, hops and links."""
    _copies(part)
    for engine in part.sizes.engines:
        try:
            _engine(part, engine)
        except Refused as why:
            part.put("links", "refused", engine=engine, note=short_text(why))
    if "host" in part.sizes.engines:
        _survey(part)
    _check_time(part)
    return 0


def _engine(part: Part, engine: str) -> None:
    """Scans of one engine: strategies, kinds of M, sizes."""
    clock, seconds = Clock(part.group, part.ranks.device), min(SECONDS, part.sizes.seconds)
    for kind in KINDS:
        for strategy in part.sizes.strategies:
            hops: list[tuple[int, float]] = []
            for heads in part.sizes.link_heads:
                element = make_element(kind, heads, part.ranks.device)
                size = element.states[0].local.nbytes
                name = {"engine": engine, "strategy": strategy, "variant": kind, "bytes": size}
                if not part.to_do("links", quantity="scan", **name):
                    continue
                call = scan_call(part, engine, strategy, element, crossing=True)
                whole = Times.of(clock.barrier_samples(call, seconds))
                put = {**name, "quantity": "scan", "unit": "us"}
                part.put("links", "ok", **put, value=1e3 * whole.median_ms)
                if strategy == "chain" and part.ranks.world > 1:
                    call = scan_call(part, engine, strategy, element, crossing=False)
                    apart = Times.of(clock.barrier_samples(call, seconds))
                    hop = 1e3 * (whole.median_ms - apart.median_ms) / (part.ranks.world - 1)
                    part.put("links", "ok", **{**put, "quantity": "hop"}, value=hop)
                    hops.append((size, 1e-6 * hop))
            _fitted(part, {"engine": engine, "strategy": strategy, "variant": kind}, hops)
    if engine == "device":
        check_exchanges(part.group)


def _fitted(part: Part, name: dict[str, str], hops: Sequence[tuple[int, float]]) -> None:
    if len(hops) < 2 or min(seconds for _, seconds in hops) <= 0:
        return
    alpha, bandwidth, worst = fit([n for n, _ in hops], [seconds for _, seconds in hops])
    note = f"largest error of the fit {100 * worst:.0f}%"
    part.put("links", "ok", **name, quantity="hop alpha", value=1e6 * alpha, unit="us", note=note)
    part.put("links", "ok", **name, quantity="hop bandwidth", value=1e-9 * bandwidth, unit="GB/s")


def scan_call(part: Part, engine: str, strategy: str, element: Element, crossing: bool) -> Call:
    """A forward scan over all ranks; where nothing crosses it takes the same steps alone."""
    world, device = part.ranks.world, part.ranks.device
    size = part.sizes.node_size(world) if strategy == "hierarchical" else None
    exchanger = runtime_of(part.group).exchanger(strategy, size)
    cuts, zero = (crossing,) * (world - 1), zero_state(element)
    if engine == "host":
        return lambda: exchanger.prefix(element, cuts, Tag(), zero)
    kernels = engine_of(part.group, device, strategy)
    if kernels is None:
        raise Refused("one rank exchanges nothing")
    runs = exchanger.heap_survey(device, kernels.heap.name).topology.runs
    span = span_of(element)
    return lambda: kernels.begin(span, cuts, Tag(), strategy, runs, reverse=False).take()


def _survey(part: Part) -> None:
    """alpha and beta of the host engine's links, as the chooser measures them."""
    if part.ranks.world < 2 or not part.to_do("links", engine="host", quantity="survey"):
        return
    survey = runtime_of(part.group).exchanger().survey(part.ranks.device, fresh=True)
    for name, link in survey.links.items():
        put = {"engine": "host", "strategy": name, "note": f"carrier {survey.carrier}"}
        part.put("links", "ok", **put, quantity="link alpha", value=1e6 * link.alpha, unit="us")
        speed = 1e-9 / link.beta if link.beta else 0.0
        part.put("links", "ok", **put, quantity="link bandwidth", value=speed, unit="GB/s")
    part.put("links", "ok", engine="host", quantity="survey", note=f"{survey.topology.runs}")


def _copies(part: Part) -> None:
    """Copies from the first GPU to each other one, one after the other."""
    if part.ranks.device.type != "cuda" or not part.to_do("links", quantity="peer copies"):
        return
    speeds = _copy_speeds(part.ranks.world) if part.ranks.rank == 0 else []
    dist.barrier()
    if speeds:
        part.put(
            "links",
            "ok",
            quantity="peer copies",
            bytes="",
            value=min(speeds),
            unit="GB/s",
            first=speeds[0],
            last=speeds[-1],
            note="the slowest pair with GPU 0",
        )


def _copy_speeds(world: int) -> list[float]:
    """GB/s from GPU 0 to every other one that this process sees."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    found = []
    for peer in range(1, min(world, torch.cuda.device_count())):
        target = torch.empty_like(source, device=f"cuda:{peer}")
        target.copy_(source)
        torch.cuda.synchronize(0)
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(peer)
        found.append(4e-9 * COPIED_BYTES / (time.perf_counter() - begin))
    return found


def _check_time(part: Part) -> None:
    """What the check of a training step costs, which the timed calls leave to their end."""
    name = {"engine": "device", "quantity": "check of a step"}
    if part.ranks.world < 2 or not part.to_do("links", **name):
        return
    try:
        engine_of(part.group, part.ranks.device, "chain")
    except Refused as why:
        part.put("links", "refused", **name, note=short_text(why))
        return
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CHECKS):
        check_exchanges(part.group)
    spent = max(part.gathered((time.perf_counter() - begin) / CHECKS))
    part.put("links", "ok", **name, value=1e6 * spent, unit="us", note="on the host, once a step")
