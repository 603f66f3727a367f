"""What one rank knows about the place it runs at, as a small text that ranks exchange."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field, replace
from importlib import util
from pathlib import Path

import torch

from flexla_dist.comm.topology import gpus

SYSFS = Path("/sys")


@dataclass(frozen=True)
class RankFacts:
    """Place of one rank.

    host, process: of the rank. cores: that the process may use. device: "cpu" or "cuda", with its
    name, PCI address and NUMA domain (-1: unknown). peers: {PCI address: "nvlink" | "pcie"} of GPUs
    whose memory its GPU reaches. adapters: {"infiniband" | "roce" | "efa": working ports}.
    nvshmem: whether its Python bindings are installed.
    """

    host: str
    process: int
    cores: int
    device: str = "cpu"
    device_name: str = "cpu"
    address: str = ""
    numa: int = -1
    peers: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, int] = field(default_factory=dict)
    nvshmem: bool = False

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankFacts:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


def look_around(device: torch.device, sysfs: Path = SYSFS) -> RankFacts:
    """The facts of this process, whose states live on `device`."""
    facts = RankFacts(
        host=socket.gethostname(),
        process=os.getpid(),
        cores=len(os.sched_getaffinity(0)),
        numa=_numa_of_cores(sysfs),
        adapters=adapters(sysfs),
        nvshmem=_installed("nvshmem"),
    )
    if device.type != "cuda":
        return facts
    index = torch.cuda.current_device() if device.index is None else device.index
    address = gpus.bus_id(index)
    return replace(
        facts,
        device="cuda",
        device_name=torch.cuda.get_device_name(index),
        address=address,
        numa=_number(sysfs / "bus" / "pci" / "devices" / address / "numa_node"),
        peers=gpus.peers_of(index),
    )


def adapters(sysfs: Path = SYSFS) -> dict[str, int]:
    """Working ports of RDMA adapters by kind; a port counts when its state is ACTIVE."""
    folder = sysfs / "class" / "infiniband"
    found: dict[str, int] = {}
    for adapter in sorted(folder.iterdir()) if folder.is_dir() else []:
        ports = adapter / "ports"
        for port in sorted(ports.iterdir()) if ports.is_dir() else []:
            if "ACTIVE" not in _text(port / "state"):
                continue
            kind = _adapter_kind(adapter, _text(port / "link_layer"))
            found[kind] = found.get(kind, 0) + 1
    return found


def _adapter_kind(adapter: Path, link_layer: str) -> str:
    driver = adapter / "device" / "driver"
    name = driver.resolve().name if driver.exists() else ""
    if name == "efa" or adapter.name.startswith(("efa", "rdmap")):
        return "efa"
    return "roce" if link_layer == "Ethernet" else "infiniband"


def _numa_of_cores(sysfs: Path) -> int:
    """The NUMA domain that holds all cores of this process, else -1."""
    own = os.sched_getaffinity(0)
    folder = sysfs / "devices" / "system" / "node"
    for node in sorted(folder.glob("node[0-9]*")) if folder.is_dir() else []:
        if own <= _core_list(_text(node / "cpulist")):
            return int(node.name.removeprefix("node"))
    return -1


def _core_list(text: str) -> set[int]:
    """`0-3,8` as a set."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else -1


def _installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
