"""Who is connected to whom: ranks of a group, runs of connected ranks, ranks by host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from flexla_dist.errors import ShardingError


@dataclass(frozen=True)
class GroupRanks:
    """A process group seen from one of its members."""

    group: dist.ProcessGroup
    rank: int
    size: int
    global_ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> GroupRanks:
        """Ranks of `group` (None: the default group); a member calls this."""
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError(
                "the process group does not exist: call torch.distributed.init_process_group first"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is no member of the group it was given; "
                "pass each rank the group that it belongs to"
            )
        members = tuple(dist.get_process_group_ranks(group))
        return cls(group, rank, dist.get_world_size(group), members)

    def name(self, rank: int) -> str:
        """`rank 1`, with the global rank where it differs."""
        whole = self.global_ranks[rank]
        return f"rank {rank}" if whole == rank else f"rank {rank} (global rank {whole})"

    def device_for(self, device: torch.device) -> torch.device:
        """Where messages about tensors on `device` live: there, if the group's backends can."""
        return device if device.type in _backends(self.group) else self.control_device()

    def carrier_for(self, device: torch.device) -> str:
        """The backend that moves messages about tensors on `device`: "gloo", "nccl"."""
        return _backends(self.group).get(self.device_for(device).type, "gloo")

    def control_device(self) -> torch.device:
        """Where small control values live: the CPU if the group has a CPU backend."""
        if "cpu" in _backends(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def all_gather_flat(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather into one flat tensor, under the name that this torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=True)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """{"cpu": "gloo", "cuda": "nccl"} as far as the group has them."""
    pairs = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
    found = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    if found.get("cpu") == "gloo" and found.get("cuda") == "gloo":
        del found["cuda"]
    return found


@dataclass(frozen=True)
class Line:
    """The connected run of ranks around one rank, in the order of a scan.

    ranks are group ranks: ascending for a prefix, descending for a suffix, so that a strategy
    written for "what enters from the left" serves both directions.
    """

    ranks: tuple[int, ...]
    position: int

    @classmethod
    def around(cls, rank: int, crossing: Sequence[bool], reverse: bool = False) -> Line:
        """Maximal run of ranks around `rank` whose cuts are all crossed by a document."""
        first = last = rank
        while first > 0 and crossing[first - 1]:
            first -= 1
        while last < len(crossing) and crossing[last]:
            last += 1
        ranks = tuple(range(first, last + 1))
        return cls(ranks[::-1], last - rank) if reverse else cls(ranks, rank - first)

    @property
    def prev_rank(self) -> int | None:
        """The rank whose state enters here, None for the first of the run."""
        return self.ranks[self.position - 1] if self.position else None

    @property
    def next_rank(self) -> int | None:
        """The rank that this one's state enters, None for the last of the run."""
        last = self.position + 1 == len(self.ranks)
        return None if last else self.ranks[self.position + 1]

    def segments(self, nodes: Sequence[int]) -> list[Line]:
        """The run cut where the node changes; positions of other segments are -1."""
        cuts = [0]
        for i in range(1, len(self.ranks)):
            if nodes[self.ranks[i]] != nodes[self.ranks[i - 1]]:
                cuts.append(i)
        ends = [*cuts[1:], len(self.ranks)]
        return [
            Line(self.ranks[a:b], self.position - a if a <= self.position < b else -1)
            for a, b in zip(cuts, ends, strict=True)
        ]


def nodes_of_size(size: int, node_size: int) -> tuple[int, ...]:
    """Node number of every rank when each node holds `node_size` consecutive ranks."""
    if isinstance(node_size, bool) or not isinstance(node_size, int) or node_size < 1:
        raise ShardingError(
            f"node_size is {node_size!r}, expected a whole number of ranks, at least 1"
        )
    return tuple(rank // node_size for rank in range(size))


def nodes_of_ids(ids: Sequence[object]) -> tuple[int, ...]:
    """Node number of every rank: maximal runs of consecutive ranks with the same id.

    A host that appears again after another one counts as a new node.
    """
    nodes = [0]
    for before, here in pairwise(ids):
        nodes.append(nodes[-1] + (before != here))
    return tuple(nodes)


def node_runs(nodes: Sequence[int]) -> tuple[int, ...]:
    """Length of every node's run of ranks."""
    return tuple(sum(n == node for n in nodes) for node in range(nodes[-1] + 1))


def host_name() -> str:
    """Name that tells hosts apart."""
    return socket.gethostname()
