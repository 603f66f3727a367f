"""What a group knows of itself: topology, links and rates, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flexla_dist.comm.chooser.cache import parse, read_cache, serialise, write_cache
from flexla_dist.comm.chooser.choose import AUTO, Choice, choose
from flexla_dist.comm.chooser.links import ASSUMED_LINKS, DEVICE, HOST, Link, Rates, assumed_rates
from flexla_dist.comm.chooser.measure import (
    Transport,
    measure_gather,
    measure_link,
    measure_rates,
    today,
)
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.setting import Setting
from flexla_dist.comm.topology import RankFacts, Topology, build_topology, look_around

HEAPS = ("posix_shm", "local", "torch_symm", "nvshmem")
GatherTexts = Callable[[str, str], list[str]]


@dataclass(frozen=True)
class Survey:
    """Topology, links by class and rates of a group, for one engine.

    carrier: what moves the bytes ("gloo", "nccl", or a heap's name). gather: an all-gather over the
    group by the bytes of one rank, None where it was not measured.
    """

    topology: Topology
    links: Mapping[str, Link]
    rates: Rates
    carrier: str
    gather: Link | None = None

    def setting(self, payload: Payload, work: float = 0.0) -> Setting:
        """The setting of a scan of such elements beside `work` seconds of other work."""
        curve = None if self.gather is None else self.gather.one
        ring = self.carrier == "nccl"
        return Setting(self.topology, payload, self.links, self.rates, work, ring, curve)

    def choose(self, payload: Payload, strategy: str = AUTO) -> Choice:
        """The strategy of the host engine for a payload."""
        return choose({HOST: self.setting(payload)}, strategy=strategy)


def survey_group(
    rank: int,
    gather: GatherTexts,
    transport: Transport,
    device: torch.device,
    *,
    nodes: Sequence[int] | None = None,
    measure: bool = True,
    fresh: bool = False,
    folder: Path | None = None,
) -> Survey:
    """Find out together; collective over the group, in which this is `rank`.

    gather: (what, text) -> the texts of all ranks. nodes: node of every rank, where hosts shall not
    tell. measure: time the links of which the first rank of their pair has kept nothing; fresh:
    time them all. What is not measured is assumed. folder: of kept measurements.
    """
    facts = look_around(device)
    key = f"{facts.host}|{facts.device_name}|{transport.name}"
    kept = ({}, None) if fresh else read_cache(key, folder)
    texts = gather(
        "survey of the group",
        json.dumps({"facts": facts.to_json(), **serialise(*kept)}, separators=(",", ":")),
    )
    told = [json.loads(text) for text in texts]
    known = [parse(content) for content in told]
    topology = build_topology([RankFacts.from_json(c["facts"]) for c in told], nodes)
    links, rates = _known(topology, known)
    wanted = (*topology.classes, _together(topology))
    missing = [name for name in wanted if name not in links]
    if measure and (missing or rates is None):
        own = _measure_own(rank, topology, transport, device, missing, rates is None)
        texts = gather("measured links", json.dumps(serialise(*own), separators=(",", ":")))
        found = [parse(json.loads(text)) for text in texts]
        links = links | {n: x for part, _ in reversed(found) for n, x in part.items()}
        rates = rates or next((r for _, r in found if r is not None), None)
        if _first_of_host(rank, told):
            write_cache(key, links, rates, folder)
    kind, name = topology.device, topology.device_name
    carrier = transport.name
    assumed = {n: _assumed(carrier, n) for n in topology.classes if n not in links}
    return Survey(
        topology,
        {n: _with_lanes(n, {**links, **assumed}[n], topology) for n in topology.classes},
        rates or assumed_rates(kind, name),
        carrier,
        links.get(_together(topology)),
    )


def _known(
    topology: Topology, known: Sequence[tuple[dict[str, Link], Rates | None]]
) -> tuple[dict[str, Link], Rates | None]:
    """What the first rank of each measuring pair, and rank 0, have kept."""
    links = {}
    for name in topology.classes:
        first, _ = topology.pair_of(name)
        if name in known[first][0]:
            links[name] = known[first][0][name]
    together = _together(topology)
    if together in known[0][0]:
        links[together] = known[0][0][together]
    return links, known[0][1]


def _measure_own(
    rank: int,
    topology: Topology,
    transport: Transport,
    device: torch.device,
    missing: Sequence[str],
    want_rates: bool,
) -> tuple[dict[str, Link], Rates | None]:
    """This rank's part of the measurements: one pair after the other where it is in both."""
    links: dict[str, Link] = {}
    curve = measure_gather(transport, topology.size)
    if rank == 0:
        links[_together(topology)] = Link(curve, measured=True, source=today())
    for name in missing:
        if name not in topology.classes:
            continue
        first, second = topology.pair_of(name)
        if rank in (first, second):
            found = measure_link(transport, second if rank == first else first, rank == first)
            links |= {name: found} if rank == first else {}
    return links, measure_rates(device) if want_rates and rank == 0 else None


def _first_of_host(rank: int, told: Sequence[Mapping[str, str]]) -> bool:
    hosts = [RankFacts.from_json(content["facts"]).host for content in told]
    return hosts.index(hosts[rank]) == rank


def _together(topology: Topology) -> str:
    """Name under which the group's all-gather is kept."""
    return "all_gather " + "+".join(map(str, topology.runs))


def _assumed(carrier: str, name: str) -> Link:
    """The default of a carrier; unknown ones count as gloo, heaps as the device engine."""
    known = (carrier, name) if (carrier, name) in ASSUMED_LINKS else None
    return ASSUMED_LINKS[known or (DEVICE if carrier in HEAPS else "gloo", name)]


def _with_lanes(name: str, link: Link, topology: Topology) -> Link:
    """How many messages of a node pass side by side: on CPUs each keeps two cores busy, and two at
    once are what `both` is the time of; on GPUs it is a matter of the link's class."""
    if topology.device != "cpu":
        return replace(link, lanes=ASSUMED_LINKS[DEVICE, name].lanes)
    return replace(link, lanes=max(2.0 if link.both else 1.0, topology.cores / 2))
