"""Symmetric heaps of GPUs: virtual ranks, two processes on one GPU, NVSHMEM, several GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from flexla_dist.comm.heaps import HeapError, LocalHeap, NvshmemHeap, make_heap
from flexla_dist.comm.heaps.nvshmem_runtime import device_library
from flexla_dist.comm.heaps.torch_symm import OVERLAP
from flexla_dist.testing.ranks import run_ranks

from ..shmem.exercise import check_heap
from ..shmem.launchers import mpirun, needs_mpirun

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
ALONE = {"NVSHMEM_REMOTE_TRANSPORT": "none"}
SHARED = {OVERLAP: "1"}
EPOCHS = 20
needs_nvshmem = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed"
)


def test_virtual_ranks() -> None:
    from ..shmem.ring_kernel import write_to_all

    heap = LocalHeap(4, "cuda")
    block = heap.allocate("panels", 100)
    for rank in range(4):
        write_to_all[(1,)](block.bases, rank, 4, 100 * rank)
    heap.barrier()
    for rank, part in enumerate(block.parts):
        got = part.view(torch.int64, (4,)).tolist()
        assert got == [100 * other + rank for other in range(4)]
    heap.close()


def torch_symm(rank: int, size: int, apart: bool, kind: str) -> None:
    from ..shmem.ring_kernel import RING_BYTES, check_ring

    device = torch.device("cuda", rank if apart else 0)
    torch.cuda.set_device(device)
    heap, other = make_heap(None, device, kind), make_heap(None, device, "torch_symm")
    assert (heap.name, heap.dialect) == ("torch_symm", "p2p")
    check_ring(heap, heap.allocate("ring", RING_BYTES), EPOCHS)
    check_heap(other)
    heap.close()


@pytest.mark.parametrize("kind", ["torch_symm", "auto"])
def test_two_processes_on_one_gpu(kind: str) -> None:
    run_ranks(torch_symm, 2, False, kind, environment=SHARED)


@pytest.mark.multigpu
def test_torch_symm_on_two_gpus() -> None:
    run_ranks(torch_symm, 2, True, "auto")


def refused(rank: int, size: int) -> None:
    with pytest.raises(HeapError, match=rf"rank 0 and rank 1 are on one GPU(.|\n)*{OVERLAP}=1"):
        make_heap(None, "cuda:0", "torch_symm")


def test_a_shared_gpu_is_refused_without_permission() -> None:
    run_ranks(refused, 2, environment={OVERLAP: "0"})


def check_nvshmem(heap: NvshmemHeap) -> None:
    """Writes by address where peers have one; put, signal and wait from a stock Triton kernel."""
    from .nvshmem_kernel import SIGNAL_BYTE, TILE, put_to_next

    before = (heap.rank - 1) % heap.size
    block = heap.allocate("tiles", SIGNAL_BYTE + 8)
    result = torch.empty(TILE, device=heap.device)
    libraries = {"libnvshmem_device": device_library()}
    if heap.size > 1:
        # Compiled everywhere before anyone waits for anyone.
        put_to_next.warmup(block.local, result, 0, 1, 1, TILE, grid=(1,), extern_libs=libraries)
        heap.barrier()
    for epoch in range(1, EPOCHS + 1):
        put_to_next[(1,)](
            block.local, result, heap.rank, heap.size, epoch, TILE, extern_libs=libraries
        )
        got, wanted = result.cpu(), torch.full((TILE,), 100.0 * before + epoch)
        assert torch.equal(got, wanted), (heap.rank, epoch, got[:4], wanted[:4])
        heap.barrier()


def nvshmem(rank: int, size: int) -> str:
    heap = make_heap(None, torch.device("cuda", rank), "nvshmem")
    assert isinstance(heap, NvshmemHeap) and heap.name == "nvshmem"
    check_nvshmem(heap)
    dialect = heap.dialect
    again = make_heap(None, torch.device("cuda", rank), "nvshmem")
    if dialect == "p2p":
        check_heap(again)
    heap.close()
    return dialect


@needs_nvshmem
def test_nvshmem_with_one_rank() -> None:
    assert run_ranks(nvshmem, 1, environment=ALONE) == ["p2p"]


@needs_nvshmem
@pytest.mark.multigpu
def test_nvshmem_on_two_gpus() -> None:
    dialects = run_ranks(nvshmem, 2, environment=ALONE)
    assert dialects[0] == dialects[1]


@needs_nvshmem
@needs_mpirun
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.multigpu)])
def test_nvshmem_over_mpi(ranks: int, tmp_path: Path) -> None:
    output = mpirun(
        ranks, "tests.gpu.nvshmem_program", str(tmp_path), interpret=False, environment=ALONE
    )
    assert output.count("is right") == ranks


def shared_nvshmem(rank: int, size: int) -> None:
    with pytest.raises(HeapError, match="share one GPU, which NVSHMEM does not support"):
        make_heap(None, "cuda:0", "nvshmem")


@needs_nvshmem
def test_nvshmem_refuses_a_shared_gpu() -> None:
    run_ranks(shared_nvshmem, 2)
