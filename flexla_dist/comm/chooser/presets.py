"""Clusters to predict for without having them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexla_dist.comm.chooser.choose import engines_of
from flexla_dist.comm.chooser.links import (
    ASSUMED_LINKS,
    ASSUMED_RATES,
    DEVICE,
    HOST,
    Curve,
    Link,
    Rates,
    assumed_rates,
)
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.setting import Setting
from flexla_dist.comm.topology import (
    NETWORK,
    NVLINK,
    PCIE,
    SAME_PROCESS,
    SHARED_MEMORY,
    Topology,
)
from flexla_dist.errors import ShardingError
from flexla_dist.shapes import nearest


@dataclass(frozen=True)
class Preset:
    """A kind of cluster: what its nodes are like, and links that differ from the assumed ones."""

    about: str
    node: Topology
    rates: Rates
    replaced: Mapping[tuple[str, str], Link]

    def topology(self, ranks: int, node_size: int | None = None) -> Topology:
        """`ranks` ranks on nodes of `node_size` (default: the preset's), the last one shorter."""
        size = self.node.longest if node_size is None else node_size
        if ranks < 1 or size < 1:
            raise ShardingError(
                f"got {ranks} ranks and nodes of {size}, expected at least one of each"
            )
        full, rest = divmod(ranks, size)
        runs = (size,) * full + ((rest,) if rest else ())
        heap = self.node.heap
        if len(runs) > 1:
            heap = "nvshmem" if self.node.device == "cuda" else "none"
        return replace(self.node, runs=runs, heap=heap)


def _wire(base: tuple[str, str], alpha: float, bandwidth: float, source: str) -> Link:
    link = ASSUMED_LINKS[base]
    panel = link.panel_beta if base[0] == DEVICE and link.panel_beta > 1 / bandwidth else 0.0
    return replace(
        link, one=Curve.line(alpha, 1 / bandwidth), panel_beta=panel or 1 / bandwidth, source=source
    )


_EFA = "AWS P5: 32 ports of 100 Gbit/s a node, 4 for each GPU; SRD through a proxy thread"
_ETHERNET = "two ports of 100 Gbit/s a node through the host, RDMA over Ethernet"
_GPU_NODE = Topology((8,), NVLINK, NETWORK, True, 8, "infiniband", 96, "cuda", numa=2)

PRESETS: dict[str, Preset] = {
    "h200-nvlink-8": Preset(
        "8 H200 a node, NVLink between all, 400 Gbit/s InfiniBand for each GPU",
        replace(_GPU_NODE, device_name="H200", heap="torch_symm"),
        ASSUMED_RATES["H200"],
        {},
    ),
    "h20-ib400": Preset(
        "8 H20 a node, NVLink between all, 400 Gbit/s InfiniBand for each GPU",
        replace(_GPU_NODE, device_name="H20", heap="torch_symm"),
        ASSUMED_RATES["H20"],
        {},
    ),
    "l20-pcie": Preset(
        "8 L20 a node on PCIe 4.0, two 100 Gbit/s ports a node",
        replace(
            _GPU_NODE,
            inside=PCIE,
            full_mesh=False,
            adapters=2,
            adapter_kind="roce",
            device_name="L20",
            heap="torch_symm",
        ),
        ASSUMED_RATES["L20"],
        {
            ("nccl", NETWORK): _wire(("nccl", NETWORK), 45e-6, 11e9, _ETHERNET),
            (DEVICE, NETWORK): _wire((DEVICE, NETWORK), 20e-6, 11e9, _ETHERNET),
        },
    ),
    "efa": Preset(
        "8 H100 a node, NVLink between all, EFA with 400 Gbit/s for each GPU",
        replace(_GPU_NODE, adapter_kind="efa", device_name="H100", heap="torch_symm"),
        ASSUMED_RATES["H100"],
        {
            ("nccl", NETWORK): _wire(("nccl", NETWORK), 60e-6, 40e9, _EFA),
            (DEVICE, NETWORK): _wire((DEVICE, NETWORK), 30e-6, 40e9, _EFA),
        },
    ),
    "one-gpu": Preset(
        "virtual ranks in one process on one H200",
        Topology((8,), SAME_PROCESS, NETWORK, device="cuda", device_name="H200", heap="local"),
        ASSUMED_RATES["H200"],
        {},
    ),
    "cpu": Preset(
        "processes on hosts with 2 cores, gloo over TCP",
        Topology((2,), SHARED_MEMORY, NETWORK, cores=2, heap="posix_shm"),
        assumed_rates("cpu", "cpu"),
        {},
    ),
}


def get_preset(name: str) -> Preset:
    """The preset of this name; ShardingError that lists them all."""
    if name not in PRESETS:
        raise ShardingError(
            f"preset is {name!r}{nearest(name, PRESETS)}, expected one of: {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def described_settings(
    preset: Preset, topology: Topology, payload: Payload, work: float = 0.0
) -> dict[str, Setting]:
    """Settings of every engine that such a cluster has."""
    transport = "nccl" if topology.device == "cuda" else "gloo"
    table = ASSUMED_LINKS | dict(preset.replaced)
    classes = topology.classes or (topology.inside,)
    settings = {}
    for engine, carrier in ((HOST, transport), (DEVICE, DEVICE)):
        if engine not in engines_of(topology):
            continue
        links = {name: table[carrier, name] for name in classes}
        ring = carrier == "nccl"
        settings[engine] = Setting(topology, payload, links, preset.rates, work, ring)
    return settings
