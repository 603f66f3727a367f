"""Machines that are modelled: links between ranks, and where their numbers come from.

Contract: a link moves a message of n bytes in alpha + n / bandwidth; ports of a rank carry one
message at a time in each direction, and ranks that share a network card share its port. Numbers of
a preset are of data sheets where a source is named, else assumptions, and said to be so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SOFTWARE = ("message", "p2p", "gather", "all_to_all", "device", "notice")
TWO_SIDED = ("message", "p2p")


class ModelProblem(ValueError):
    """Something the model was asked for and cannot answer; the message says why."""


@dataclass(frozen=True)
class Link:
    """alpha: seconds of an empty message; bandwidth: bytes a second in one direction."""

    alpha: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """A message of `size` bytes alone on the link."""
        return self.alpha + size / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes.

    inside, between: links in a node and between nodes, by who drives them: `message` (our host
    engine), `p2p` (host point-to-point), `gather` and `all_to_all` (a step of a collective),
    `device` (kernels that put and signal), and `notice` (word to a sender that its message is
    awaited; none where the link is missing). cores: CPU cores that all ranks of a node share for
    computing and for moving messages, None where ranks have a device each. sharing: ranks that
    share a port out of the node. ring_waits: a step of an all-gather's ring over nodes waits
    for the one before, as gloo's does; NCCL's follow each other. streams: messages are work of a
    device's stream, so that our engine gathers by one collective and not by messages. kernel_scale:
    factor on measured kernel times, with its reason among the assumptions; most_scale: the largest
    that it may be.
    """

    name: str
    node_size: int
    inside: Mapping[str, Link]
    between: Mapping[str, Link]
    cores: int | None = None
    sharing: int = 1
    ring_waits: bool = False
    streams: bool = False
    kernel_scale: float = 1.0
    most_scale: float | None = None
    kernels_of: str = "nvidia_h200"
    assumptions: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def link(self, kind: str, source: int, target: int) -> Link:
        """The link between two ranks. Raises ModelProblem where the cluster has none."""
        same = source // self.node_size == target // self.node_size
        links = self.inside if same else self.between
        if kind not in links:
            where = "inside a node" if same else "between nodes"
            raise ModelProblem(
                f"{self.name} has no {kind!r} link {where}; it has {', '.join(links) or 'none'}"
            )
        return links[kind]

    def notice(self, source: int, target: int) -> float:
        """Seconds until `source` knows that `target` has posted its receive."""
        same = source // self.node_size == target // self.node_size
        link = (self.inside if same else self.between).get("notice")
        return 0.0 if link is None else link.alpha


def with_notices(links: Mapping[str, Link]) -> dict[str, Link]:
    """Measured links of two-sided messages, cut into notices and messages.

    They were measured there and back between ranks that begin together: the first message waits
    for its notice, the other's comes meanwhile. Of the three empty messages in a row that p2p's
    alpha is half of, one is a notice, and half of it is in the alpha of either kind.
    """
    if "p2p" not in links:
        return dict(links)
    notice = links["p2p"].alpha * 2 / 3
    cut = {
        kind: replace(links[kind], alpha=max(0.0, links[kind].alpha - notice / 2))
        for kind in TWO_SIDED
        if kind in links
    }
    return {**links, **cut, "notice": Link(notice, math.inf)}


def _links(alpha_us: Mapping[str, float], gigabytes: float) -> dict[str, Link]:
    return {kind: Link(1e-6 * alpha, 1e9 * gigabytes) for kind, alpha in alpha_us.items()}


def _alphas(host: float, step: float, device: float) -> dict[str, float]:
    steps = {"gather": step, "all_to_all": step, "notice": step}
    return {"message": host, "p2p": host, **steps, "device": device}


# Microseconds of an empty message. All are assumptions, see _ALPHAS: a message that the host drives
# costs launches, a step of a collective's ring and a put from inside a kernel do not.
_NVLINK = {
    "message": 25.0,
    "p2p": 25.0,
    "gather": 3.0,
    "all_to_all": 3.0,
    "device": 4.0,
    "notice": 3.0,
}
_NETWORK = {
    "message": 30.0,
    "p2p": 30.0,
    "gather": 8.0,
    "all_to_all": 8.0,
    "device": 12.0,
    "notice": 8.0,
}
_EFA = {
    "message": 45.0,
    "p2p": 45.0,
    "gather": 20.0,
    "all_to_all": 20.0,
    "device": 25.0,
    "notice": 20.0,
}
_PCIE = {
    "message": 30.0,
    "p2p": 30.0,
    "gather": 6.0,
    "all_to_all": 6.0,
    "device": 6.0,
    "notice": 6.0,
}

_ALPHAS = (
    "latencies are assumptions: 4 us a device-driven hop over NVLink (measured inside one H200: "
    "1.4 to 3.8 us for 4 to 32 KiB), 12 us over InfiniBand, 25 and 30 us where the host drives, "
    "3 and 8 us a step of a collective or word of a receive"
)
_SHARE = "300 of NVLink's 450 GB/s and 45 of the card's 50 GB/s are reached"
_H200_SOURCE = "H200: NVLink 450 GB/s a direction (www.saulelectric.com/nvidia-h200.html)"
_IB_SOURCE = (
    "400 Gb/s InfiniBand is 50 GB/s, 1 to 5 us across nodes "
    "(fridayswithfaraday.com/posts/gpu-hw-nvlink-nvswitch-interconnect)"
)

PRESETS: dict[str, Cluster] = {
    c.name: c
    for c in (
        Cluster(
            "h20_ib",
            8,
            _links(_NVLINK, 300.0),
            _links(_NETWORK, 45.0),
            streams=True,
            kernel_scale=1.2,
            most_scale=6.7,
            assumptions=(
                _ALPHAS,
                _SHARE,
                "one 400 Gb/s card a GPU",
                "kernel times are those of an H200 times 1.2, the ratio of memory bandwidths (4.8 "
                "to 4.0 TB/s) and the least that an H20 can take, so that shares of exchanges are "
                "at their largest; `h20_ib_slow` has them times 6.7, the ratio of peak rates "
                "(989 to 148 TFLOP/s)",
            ),
            sources=(
                "H20: 148 TFLOP/s, 4.0 TB/s, NVLink 900 GB/s both ways "
                "(willitrunai.com/es/gpus/h20-96gb)",
                _IB_SOURCE,
            ),
        ),
        Cluster(
            "h200_ib",
            8,
            _links(_NVLINK, 300.0),
            _links(_NETWORK, 45.0),
            streams=True,
            assumptions=(_ALPHAS, _SHARE, "one 400 Gb/s card a GPU"),
            sources=(_H200_SOURCE, _IB_SOURCE),
        ),
        Cluster(
            "h200_efa",
            8,
            _links(_NVLINK, 300.0),
            _links(_EFA, 40.0),
            streams=True,
            assumptions=(
                _ALPHAS.replace("12 us over InfiniBand", "25 us over EFA"),
                "40 of 50 GB/s a GPU are reached",
            ),
            sources=(
                _H200_SOURCE,
                "p5.48xlarge: 400 GB/s EFA for 8 GPUs "
                "(agenticdaily.ai/articles/aws-maps-open-source-ml-stack-to-its-accelerated-instances)",
            ),
        ),
        Cluster(
            "l20_pcie",
            8,
            _links(_PCIE, 20.0),
            _links(_NETWORK, 22.0),
            sharing=4,
            streams=True,
            kernel_scale=5.6,
            most_scale=8.3,
            assumptions=(
                "PCIe 4.0 x16 carries 32 GB/s a direction, 20 are reached between GPUs; four GPUs "
                "share a 200 Gb/s card",
                "kernel times are those of an H200 times 5.6, the ratio of 4.8 to 0.864 TB/s of "
                "memory; `l20_pcie_slow` has them times 8.3, of 989 to 119.5 TFLOP/s",
            ),
            sources=("L20: PCIe 4.0 x16, 864 GB/s memory (technical.city/pl/video/L20)",),
        ),
    )
}


def from_calibration(
    name: str, cores: int, rows: Sequence[Mapping[str, str]], node_size: int = 1 << 20
) -> Cluster:
    """A cluster of CPU processes on this host, from the rows of `--calibrate`."""
    links = {
        row["kind"]: Link(1e-6 * float(row["alpha_us"]), 1e9 * float(row["gigabytes"]))
        for row in rows
    }
    if not links:
        raise ModelProblem(f"no calibrated links of {name}: run the model with --calibrate first")
    return Cluster(name, node_size, links, {}, cores=cores, kernels_of=name)


def get_cluster(name: str) -> Cluster:
    """A preset by name. Raises ModelProblem with the known names."""
    if name not in PRESETS:
        raise ModelProblem(f"no cluster {name!r}; presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def slowest(cluster: Cluster) -> Cluster | None:
    """The cluster with the slowest kernels that it may have; None where that is known."""
    if cluster.most_scale is None:
        return None
    return replace(cluster, name=f"{cluster.name}_slow", kernel_scale=cluster.most_scale)


def with_links(cluster: Cluster, links: Mapping[str, Link]) -> Cluster:
    """The cluster with measured links inside its nodes."""
    return replace(cluster, inside={**cluster.inside, **links})
