"""Facts of a rank, the class of a link, the topology of a group."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexla_dist.comm.topology import RankFacts, Topology, build_topology, link_class, look_around
from flexla_dist.comm.topology.facts import adapters


def gpu(host: str, number: int, peers: dict[str, str] | None = None, **more: object) -> RankFacts:
    """A rank on a GPU of `host` whose peers are these, by default NVLink to 8 GPUs."""
    reached = {f"gpu{i}": "nvlink" for i in range(8) if i != number} if peers is None else peers
    facts = RankFacts(host, 100 + number, 64, "cuda", "H200", f"gpu{number}", number // 4, reached)
    return replace(facts, **more)  # type: ignore[arg-type]


def cpu(host: str, process: int) -> RankFacts:
    return RankFacts(host, process, 2, numa=0)


# -- facts ----------------------------------------------------------------------------------------


def make_adapter(sysfs: Path, name: str, layer: str, state: str, driver: str = "mlx5_core") -> None:
    port = sysfs / "class" / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")
    device = port.parents[1] / "device"
    device.mkdir()
    target = sysfs / "bus" / "pci" / "drivers" / driver
    target.mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(target)


def test_working_ports_count_by_kind(tmp_path: Path) -> None:
    assert adapters(tmp_path) == {}
    make_adapter(tmp_path, "mlx5_0", "InfiniBand", "4: ACTIVE")
    make_adapter(tmp_path, "mlx5_1", "InfiniBand", "4: ACTIVE")
    make_adapter(tmp_path, "mlx5_2", "Ethernet", "4: ACTIVE")
    make_adapter(tmp_path, "mlx5_3", "InfiniBand", "1: DOWN")
    make_adapter(tmp_path, "rdmap0s6", "Unspecified", "4: ACTIVE", "efa")
    (tmp_path / "class" / "infiniband" / "broken").mkdir()
    assert adapters(tmp_path) == {"infiniband": 2, "roce": 1, "efa": 1}


def test_facts_of_this_process(tmp_path: Path) -> None:
    domain = tmp_path / "devices" / "system" / "node"
    for number, cores in ((0, "0-1023"), (1, "2000,2002-2004")):
        (domain / f"node{number}").mkdir(parents=True)
        (domain / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    facts = look_around(torch.device("cpu"), tmp_path)
    assert facts.process == os.getpid() and facts.device == "cpu" and facts.numa == 0
    assert facts.cores == len(os.sched_getaffinity(0))
    (domain / "node0" / "cpulist").write_text("not a list\n")
    assert look_around(torch.device("cpu"), tmp_path).numa == -1
    assert look_around(torch.device("cpu"), tmp_path / "nothing").adapters == {}


def test_facts_travel_as_text() -> None:
    facts = gpu("a", 3, adapters={"efa": 4})
    assert RankFacts.from_json(facts.to_json()) == facts


# -- links ----------------------------------------------------------------------------------------


def test_classes_of_links() -> None:
    assert link_class(gpu("a", 0), gpu("b", 1)) == "network"
    assert link_class(gpu("a", 0), gpu("a", 1)) == "nvlink"
    assert link_class(gpu("a", 0, {"gpu1": "pcie"}), gpu("a", 1)) == "pcie"
    assert link_class(gpu("a", 0, {}), gpu("a", 1)) == "pcie"
    assert link_class(gpu("a", 0), gpu("a", 0, process=7)) == "same_process"
    assert link_class(cpu("a", 1), cpu("a", 2)) == "shared_memory"
    assert link_class(cpu("a", 1), cpu("a", 1)) == "same_process"
    assert link_class(cpu("a", 1), gpu("a", 1)) == "shared_memory"


# -- topologies -----------------------------------------------------------------------------------


def test_two_nodes_of_gpus() -> None:
    facts = [
        gpu(h, i, adapters={"infiniband": n}) for h, n in (("a", 8), ("b", 4)) for i in range(8)
    ]
    place = build_topology(facts)
    assert (place.runs, place.size, place.nodes, place.longest) == ((8, 8), 16, 2, 8)
    assert (place.inside, place.across, place.full_mesh) == ("nvlink", "network", True)
    assert (place.adapters, place.adapter_kind, place.numa) == (4, "infiniband", 2)
    assert place.classes == ("nvlink", "network") and place.heap == "none"
    assert place.pair_of("nvlink") == (0, 1) and place.pair_of("network") == (7, 8)
    assert build_topology([replace(f, nvshmem=True) for f in facts]).heap == "nvshmem"
    text = str(place)
    for words in (
        "16 ranks on 2 nodes: 2 x 8",
        "a, b",
        "H200",
        "nvlink, all pairs",
        "4 infiniband",
    ):
        assert words in text


def test_the_slowest_link_of_a_node_counts() -> None:
    pairs = {"gpu0": {"gpu1": "nvlink", "gpu2": "pcie", "gpu3": "pcie"}}
    pairs |= {"gpu1": {"gpu0": "nvlink", "gpu2": "pcie", "gpu3": "pcie"}}
    pairs |= {"gpu2": {"gpu0": "pcie", "gpu1": "pcie", "gpu3": "nvlink"}}
    pairs |= {"gpu3": {"gpu0": "pcie", "gpu1": "pcie", "gpu2": "nvlink"}}
    place = build_topology([gpu("a", i, pairs[f"gpu{i}"]) for i in range(4)])
    assert place.inside == "pcie" and not place.full_mesh and place.heap == "torch_symm"
    assert build_topology([gpu("a", i, {}) for i in range(2)]).heap == "none"


def test_processes_of_one_host() -> None:
    place = build_topology([cpu("a", i) for i in range(4)])
    assert (place.runs, place.inside, place.heap, place.cores) == (
        (4,),
        "shared_memory",
        "posix_shm",
        2,
    )
    assert place.classes == ("shared_memory",) and "between" not in str(place)
    assert build_topology([cpu("a", 1), cpu("b", 1)]).heap == "none"


def test_nodes_may_be_given() -> None:
    facts = [cpu("a", i) for i in range(5)]
    place = build_topology(facts, [0, 0, 1, 1, 2])
    assert place.runs == (2, 2, 1) and place.across == "shared_memory"
    assert place.classes == ("shared_memory",) and place.pair_of("shared_memory") == (0, 1)
    with pytest.raises(ValueError, match="nodes has 2 entries for 5 ranks"):
        build_topology(facts, [0, 1])


def test_a_host_that_comes_back_is_another_node() -> None:
    place = build_topology([cpu(h, i) for i, h in enumerate("aabab")])
    assert place.runs == (2, 1, 1, 1) and "2 + 1 + 1 + 1" in str(place)
    assert place.pair_of("network") == (1, 2)
    single = build_topology([cpu("a", 1), cpu("b", 1), cpu("c", 1)])
    assert single.classes == ("network",) and single.pair_of("network") == (0, 1)


def test_one_gpu_shared_by_ranks() -> None:
    place = build_topology([gpu("a", 0, process=i) for i in range(3)])
    assert place.inside == "same_process" and place.heap == "torch_symm"


@pytest.mark.parametrize(("runs", "inside"), [((), "nvlink"), ((2, 0), "nvlink"), ((2,), "cable")])
def test_topologies_are_checked(runs: tuple[int, ...], inside: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Topology(runs, inside)


def test_only_links_in_use_have_a_pair() -> None:
    with pytest.raises(ValueError, match="no neighbouring ranks use 'nvlink', only shared_memory"):
        Topology((2,)).pair_of("nvlink")
