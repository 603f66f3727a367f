"""The ranks of a group on their hosts: nodes, the links inside and between them, the heap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flexla_dist.comm.links import node_runs, nodes_of_ids
from flexla_dist.comm.topology.facts import RankFacts

SAME_PROCESS, SHARED_MEMORY = "same_process", "shared_memory"
NVLINK, PCIE, NETWORK = "nvlink", "pcie", "network"
LINK_CLASSES = (SAME_PROCESS, SHARED_MEMORY, NVLINK, PCIE, NETWORK)  # from near to far


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a group are, in group order.

    runs: ranks of every node; a node is a maximal run of consecutive ranks on one host.
    inside: class of the slowest link between neighbours of a node. across: the same between
    neighbouring nodes. full_mesh: NVLink joins all pairs of every node.
    adapters, adapter_kind: network ports of the node that has fewest. cores: of a node.
    device: "cpu" or "cuda". numa: NUMA domains of a node, 0 unknown. heap: symmetric memory that
    these ranks can share, "none" if there is none.
    """

    runs: tuple[int, ...]
    inside: str = SHARED_MEMORY
    across: str = NETWORK
    full_mesh: bool = False
    adapters: int = 1
    adapter_kind: str = "ethernet"
    cores: int = 1
    device: str = "cpu"
    device_name: str = "cpu"
    numa: int = 0
    heap: str = "none"
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.runs or min(self.runs) < 1:
            raise ValueError(f"runs is {self.runs}, expected at least one rank on every node")
        for name in (self.inside, self.across):
            if name not in LINK_CLASSES:
                known = ", ".join(LINK_CLASSES)
                raise ValueError(f"link class is {name!r}, expected one of: {known}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.runs)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.runs)

    @property
    def longest(self) -> int:
        """Ranks of the largest node."""
        return max(self.runs)

    @property
    def classes(self) -> tuple[str, ...]:
        """The link classes that neighbouring ranks use."""
        found = ([self.inside] if self.longest > 1 else []) + [self.across] * (self.nodes > 1)
        return tuple(dict.fromkeys(found))

    def pair_of(self, name: str) -> tuple[int, int]:
        """The first two neighbouring ranks that a link of this class joins."""
        starts = [0, *accumulate(self.runs)]
        if name == self.inside:
            for start, run in zip(starts, self.runs, strict=False):
                if run > 1:
                    return start, start + 1
        if name == self.across and self.nodes > 1:
            return starts[1] - 1, starts[1]
        raise ValueError(f"no neighbouring ranks use {name!r}, only {', '.join(self.classes)}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The topology as text, a fact a line."""
        many = f"{self.size} ranks on {self.nodes} node{'s' * (self.nodes > 1)}"
        said = [f"ranks      {many}: {_runs_in_words(self.runs)}"]
        if self.hosts:
            names = dict.fromkeys(self.hosts)
            shown = ", ".join(list(names)[:4]) + (", ..." if len(names) > 4 else "")
            said.append(f"hosts      {shown}")
        cores = f", {self.cores} cores a node" if self.device == "cpu" else ""
        domains = f", {self.numa} NUMA domain{'s' * (self.numa > 1)} a node" if self.numa else ""
        said.append(f"device     {self.device_name}{cores}{domains}")
        if self.longest > 1:
            mesh = ", all pairs" if self.full_mesh else ""
            said.append(f"in a node  {self.inside}{mesh}")
        if self.nodes > 1:
            ports = f", {self.adapters} {self.adapter_kind} port{'s' * (self.adapters > 1)} a node"
            said.append(f"between    {self.across}{ports if self.across == NETWORK else ''}")
        said.append(f"heap       {self.heap}")
        return said


def build_topology(facts: Sequence[RankFacts], nodes: Sequence[int] | None = None) -> Topology:
    """The topology of ranks with these facts, in group order.

    nodes: node number of every rank, where the caller says what a node is; else hosts tell.
    """
    numbers = nodes_of_ids([f.host for f in facts]) if nodes is None else tuple(nodes)
    if len(numbers) != len(facts):
        raise ValueError(f"nodes has {len(numbers)} entries for {len(facts)} ranks")
    inside, across = [SAME_PROCESS], [SAME_PROCESS]
    for (a, node), (b, next_node) in pairwise(zip(facts, numbers, strict=True)):
        (inside if node == next_node else across).append(link_class(a, b))
    kind, ports = _ports(facts)
    domains = {(f.host, f.numa) for f in facts if f.numa >= 0}
    hosts = {f.host for f in facts}
    return Topology(
        runs=node_runs(numbers),
        inside=_slowest(inside),
        across=_slowest(across),
        full_mesh=_full_mesh(facts),
        adapters=max(1, ports),
        adapter_kind=kind,
        cores=min(f.cores for f in facts),
        device=facts[0].device,
        device_name=", ".join(dict.fromkeys(f.device_name for f in facts)),
        numa=max((sum(host == h for h, _ in domains) for host in hosts), default=0),
        heap=_heap(facts),
        hosts=tuple(dict.fromkeys(f.host for f in facts)),
    )


def link_class(a: RankFacts, b: RankFacts) -> str:
    """What joins two ranks."""
    if a.host != b.host:
        return NETWORK
    if a.process == b.process or (a.address and a.address == b.address):
        return SAME_PROCESS
    if a.device != "cuda" or b.device != "cuda":
        return SHARED_MEMORY
    return a.peers.get(b.address, PCIE)


def _slowest(names: Sequence[str]) -> str:
    return max(names, key=LINK_CLASSES.index)


def _full_mesh(facts: Sequence[RankFacts]) -> bool:
    pairs = [(a, b) for a in facts for b in facts if a is not b and a.host == b.host]
    return bool(pairs) and all(link_class(a, b) == NVLINK for a, b in pairs)


def _ports(facts: Sequence[RankFacts]) -> tuple[str, int]:
    """(kind, number) of the network ports of the node with the fewest."""
    fewest = min(facts, key=lambda f: sum(f.adapters.values()))
    if not fewest.adapters:
        return "ethernet", 0
    kind = max(fewest.adapters, key=lambda name: fewest.adapters[name])
    return kind, fewest.adapters[kind]


def _heap(facts: Sequence[RankFacts]) -> str:
    one_host = len({f.host for f in facts}) == 1
    if all(f.device == "cpu" for f in facts):
        return "posix_shm" if one_host else "none"
    if any(f.device == "cpu" for f in facts):
        return "none"
    reached = all(
        a.address == b.address or b.address in a.peers for a in facts for b in facts if a is not b
    )
    if one_host and reached:
        return "torch_symm"
    return "nvshmem" if all(f.nvshmem for f in facts) else "none"


def _runs_in_words(runs: Sequence[int]) -> str:
    """`8 x 4`, or the lengths where nodes differ."""
    if len(set(runs)) == 1:
        return f"{len(runs)} x {runs[0]}"
    return " + ".join(map(str, runs[:8])) + (" + ..." if len(runs) > 8 else "")
