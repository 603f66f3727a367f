"""How NVSHMEM is started and told about kernels, with stand-ins for its modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexla_dist.comm.heaps import HeapArgumentError, HeapError, Meeting, NvshmemHeap
from flexla_dist.comm.heaps import nvshmem_runtime as runtime
from flexla_dist.comm.links import GroupRanks
from flexla_dist.testing.ranks import run_ranks

ID = np.dtype([("version", np.int32), ("internal", np.int8, (124,))], align=True)


class Core:
    """Stands in for `nvshmem.core`: unique ids of its layout, and what `init` was called with."""

    def __init__(self, rank: int, broken: bool = False) -> None:
        self.rank, self.broken = rank, broken
        self.started: dict[str, Any] = {}

    def get_unique_id(self, empty: bool = False) -> SimpleNamespace:
        data = np.zeros(1, dtype=ID).view(np.recarray)
        if not empty:
            assert self.rank == 0, "only rank 0 makes the unique id"
            data.version, data.internal = 7, np.arange(124) - 60
        return SimpleNamespace(_data=data)

    def init(self, **given: Any) -> None:
        if self.broken:
            raise LookupError("no device library")
        self.started = given


def stand_in_device(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ModuleType("cuda.core")
    core.Device = lambda index: SimpleNamespace(index=index, set_current=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)


def start(rank: int, size: int) -> tuple[list[int], int, int, str]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in_device(patch)
        core = Core(rank)
        meeting = Meeting(GroupRanks.of(None))
        runtime.start_by_uid(core, meeting, torch.device("cuda", 0))
    given = core.started
    id_bytes = given["uid"]._data.view(np.int8).tolist()
    return id_bytes, given["rank"], given["nranks"], given["initializer_method"]


def test_the_unique_id_of_rank_0_reaches_every_rank() -> None:
    outcomes = run_ranks(start, 3)
    wanted = Core(0).get_unique_id()._data.view(np.int8).tolist()
    assert outcomes == [(wanted, rank, 3, "uid") for rank in range(3)]


class Communicator:
    """Stands in for an mpi4py communicator."""

    def __init__(self, rank: int, size: int) -> None:
        self.Get_rank, self.Get_size = lambda: rank, lambda: size


def start_by_mpi(rank: int, size: int) -> None:
    meeting = Meeting(GroupRanks.of(None))
    with pytest.MonkeyPatch.context() as patch:
        stand_in_device(patch)
        core, device = Core(rank), torch.device("cuda", 0)
        communicator = Communicator(rank, size)
        runtime.start_by_mpi(core, meeting, device, communicator)
        assert core.started["initializer_method"] == "emulated_mpi"
        assert core.started["mpi_comm"] is communicator
        with pytest.raises(HeapError, match=r"says rank \d of 2, the group rank"):
            runtime.start_by_mpi(core, meeting, device, Communicator(size - 1 - rank, size))
        with pytest.raises(HeapError, match=r"on 1 of 2 ranks(.|\n)*rank 1(.|\n)*LookupError"):
            broken = Core(rank, broken=rank == 1)
            runtime.start_by_mpi(broken, meeting, device, communicator)


def test_start_over_mpi_checks_the_ranks_and_tells_failures_to_all() -> None:
    run_ranks(start_by_mpi, 2)


def wrong_bootstrap(rank: int, size: int) -> None:
    meeting = Meeting(GroupRanks.of(None))
    device = torch.device("cuda", 0)
    with pytest.raises(HeapArgumentError, match="expected 'uid' or 'emulated_mpi'"):
        NvshmemHeap(meeting, device, bootstrap="mpi")  # type: ignore[arg-type]
    with pytest.raises(HeapArgumentError, match="wants an mpi4py communicator"):
        NvshmemHeap(meeting, device, bootstrap="emulated_mpi")


def test_wrong_bootstraps_are_refused() -> None:
    run_ranks(wrong_bootstrap, 1)


def test_versions_are_compared_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = ["nvidia-nccl-cu13==2.28", 'nvidia-nvshmem-cu13==3.4.5; platform_system == "Linux"']
    assert runtime.wanted_version(pins, "nvidia-nvshmem-cu13") == "3.4.5"
    assert runtime.wanted_version(pins, "nvidia-nvshmem-cu12") == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(HeapError, match="built without CUDA"):
        runtime.import_nvshmem()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    metadata = runtime.importlib.metadata
    monkeypatch.setattr(metadata, "requires", lambda _: pins)
    monkeypatch.setattr(metadata, "version", lambda _: "3.8.0")
    with pytest.raises(
        HeapError, match=r"is 3\.8\.0, expected 3\.4\.5.*pip install nvidia-nvshmem"
    ):
        runtime.import_nvshmem()
    monkeypatch.setattr(metadata, "version", lambda _: "3.4.5")
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(HeapError, match=r"install nvshmem4py-cu13 \(the extra 'nvshmem'\)"):
        runtime.import_nvshmem()


def files(folder: Path, ptx: bytes) -> dict[str, str]:
    for name, data in (("k.ptx", ptx), ("k.cubin", b"\x7fELF")):
        (folder / name).write_bytes(data)
    return {path.name: str(path) for path in folder.iterdir()}


def test_kernels_that_call_nvshmem_get_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    told: list[int] = []
    bindings = ModuleType("nvshmem.bindings.nvshmem")
    bindings.cumodule_init = lambda module: told.append(module) or int(module == 13)  # type: ignore[attr-defined]
    for name in ("nvshmem", "nvshmem.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "nvshmem.bindings.nvshmem", bindings)
    seen: list[str] = []

    def other(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        seen.append(name)

    chain = type(triton.knobs.runtime.kernel_load_end_hook)()
    chain.add(other)
    calls = files(tmp_path, b".extern .global nvshmemi_device_state_d;")
    for before in (chain, other, None):
        monkeypatch.setattr(triton.knobs.runtime, "kernel_load_end_hook", before)
        runtime.prepare_kernels()
        runtime.prepare_kernels()
        hook = triton.knobs.runtime.kernel_load_end_hook
        hook(12, None, "calls", calls, "hash")
    assert told == [12, 12, 12] and seen == ["calls", "calls"]
    with pytest.raises(HeapError, match=r"could not take in the kernel calls \(status 1\)"):
        hook(13, None, "calls", calls, "hash")
    hook(14, None, "plain", files(tmp_path, b".visible .entry plain"), "hash")
    assert told == [12, 12, 12, 13]
