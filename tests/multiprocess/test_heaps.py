"""Symmetric heaps of real processes: shared memory, ranks that disagree, are late or killed."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flexla_dist.comm import ExchangeTimeout, RemoteRankError, StateExchanger
from flexla_dist.comm.heaps import HeapError, HeapMismatch, Meeting, PosixShmHeap, make_heap
from flexla_dist.comm.heaps.leftovers import is_name
from flexla_dist.comm.links import GroupRanks
from flexla_dist.testing.ranks import run_ranks

from ..shmem.exercise import check_heap, check_written, write_all

SHARED_MEMORY = Path("/dev/shm")


def files_of(pid: int) -> list[str]:
    """Names of files in shared memory that a process made."""
    names = (path.name for path in SHARED_MEMORY.glob("flexla_dist-*"))
    return [name for name in names if int(name.split("-")[2]) == pid]


def exercise(rank: int, size: int) -> list[str]:
    heap = make_heap(None, "cpu")
    assert (heap.name, heap.dialect, heap.rank, heap.size) == ("posix_shm", "p2p", rank, size)
    check_heap(heap)
    return files_of(os.getpid())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_posix_shm(size: int) -> None:
    assert run_ranks(exercise, size) == [[]] * size


def two_heaps(rank: int, size: int) -> None:
    """Two heaps of one group and one of a part of it, used in turns with an exchanger."""
    pair = dist.new_group([0, 2])
    whole, again = make_heap(None, "cpu"), make_heap(None, "cpu", "posix_shm")
    heaps = [whole, again] + ([make_heap(pair, "cpu")] if rank != 1 else [])
    blocks = [heap.allocate("panels", 8 * heap.size) for heap in heaps]
    exchanger = StateExchanger(None, timeout=20.0)
    for epoch in range(5):
        for heap, block in zip(heaps, blocks, strict=True):
            write_all(heap, block, epoch + heap.size)
        exchanger.agree("epoch", [epoch])
        for heap, block in zip(heaps, blocks, strict=True):
            heap.barrier()
            check_written(heap, block, epoch + heap.size)
            heap.barrier()
    whole.close()
    write_all(again, blocks[1], 99)
    again.barrier()
    check_written(again, blocks[1], 99)
    # A block outlives its heap as long as it is held.
    again.close()
    assert blocks[1].view(torch.int64, (size,))[rank] == 99_000_000 + 101 * rank


def test_heaps_beside_each_other() -> None:
    run_ranks(two_heaps, 3)


def look_at_files(rank: int, size: int) -> tuple[list[str], list[int]]:
    """Rank 1 comes late and looks at the file that rank 0 has made meanwhile."""
    heap = make_heap(None, "cpu")
    pids: list[int] = [0] * size
    dist.all_gather_object(pids, os.getpid())
    names, modes = [], []
    if rank == 1:
        deadline = time.monotonic() + 20
        while not names and time.monotonic() < deadline:
            time.sleep(0.01)
            names = files_of(pids[0])
        modes = [stat.S_IMODE((SHARED_MEMORY / name).stat().st_mode) for name in names]
    os.umask(0)
    heap.allocate("panels", 100)
    assert not files_of(os.getpid())
    return names, modes


def test_files_are_private_and_gone_once_mapped() -> None:
    names, modes = run_ranks(look_at_files, 2)[1]
    assert len(names) == 1 and is_name(names[0]) and len(names[0]) > 60
    assert modes == [0o600]


def other_operation(rank: int, size: int) -> str:
    heap = make_heap(None, "cpu", timeout=20.0)
    with pytest.raises(HeapMismatch) as caught:
        if rank == 1:
            heap.barrier()
        else:
            heap.allocate("panels", 8)
    block = heap.allocate("panels", 8 * size)
    write_all(heap, block, 1)
    heap.barrier()
    check_written(heap, block, 1)
    return str(caught.value)


def test_different_operations_are_told_on_every_rank() -> None:
    for text in run_ranks(other_operation, 3):
        assert "rank 0, rank 2: allocation of shared memory" in text and "rank 1: barrier" in text


def other_kind(rank: int, size: int) -> None:
    make_heap(None, "cpu", "auto" if rank else "posix_shm")


def test_different_kinds_are_told_on_every_rank() -> None:
    for outcome in run_ranks(other_kind, 2, expect_errors=True):
        assert outcome is not None and outcome.type == HeapMismatch.__name__
        assert "rank 0: kind 'posix_shm' on cpu" in outcome.message


def no_space(rank: int, size: int) -> None:
    heap = make_heap(None, "cpu")
    with pytest.raises(HeapError, match=r"on 2 of 2 ranks(.|\n)*rank 1(.|\n)*free: make it larger"):
        heap.allocate("panels", 1 << 50)
    assert not files_of(os.getpid())
    assert not heap.allocate("panels", 8).local.any()


def test_full_memory_is_told() -> None:
    run_ranks(no_space, 2)


def killed_before(rank: int, size: int) -> float:
    """Rank 1 is killed; the others notice without waiting for their limit."""
    heap = make_heap(None, "cpu", timeout=60.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RemoteRankError, match=r"rank 1"):
        heap.allocate("panels", 8)
    assert not files_of(os.getpid())
    heap.close()
    return time.monotonic() - start


def watched_kill(rank: int, size: int) -> None:
    """Fails on every rank, so that the outcomes can be looked at."""
    seconds = killed_before(rank, size)
    raise RuntimeError(f"noticed after {seconds:.1f} s")


def test_a_killed_rank_is_noticed() -> None:
    outcomes = run_ranks(watched_kill, 3, expect_errors=True)
    assert outcomes[1] is not None and outcomes[1].type == "Died"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome is not None and outcome.type == "RuntimeError", outcome
        assert float(outcome.message.split()[-2]) < 5.0


def killed_within(rank: int, size: int, folder: str) -> None:
    """Rank 0 is killed when it has made its file and rank 1 has not yet come."""
    heap = PosixShmHeap(Meeting(GroupRanks.of(None)), Path(folder))
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(1.0)
    heap.allocate("panels", 8)


def make_only(rank: int, size: int, folder: str) -> None:
    PosixShmHeap(Meeting(GroupRanks.of(None)), Path(folder)).close()


def test_leftovers_of_a_killed_rank_are_removed_at_the_next_start(tmp_path: Path) -> None:
    first, second = run_ranks(killed_within, 2, str(tmp_path), expect_errors=True)
    assert first is not None and first.type == "Died"
    assert second is not None and second.type == "RemoteRankError", second
    assert len(list(tmp_path.iterdir())) == 1
    run_ranks(make_only, 1, str(tmp_path))
    assert not list(tmp_path.iterdir())


def late(rank: int, size: int) -> str:
    heap = make_heap(None, "cpu", timeout=0.5)
    if rank == 1:
        time.sleep(1.5)
    with pytest.raises((ExchangeTimeout, RemoteRankError)) as caught:
        heap.barrier()
    assert not files_of(os.getpid())
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_late_rank_is_named_and_told() -> None:
    first, second = run_ranks(late, 2)
    assert first.startswith("ExchangeTimeout: rank 0 waited 0.5 s in [heap: barrier], and rank 1")
    assert second.startswith("RemoteRankError: rank 0 failed in heap: barrier: ExchangeTimeout")


def impossible(rank: int, size: int) -> None:
    for kind in ("torch_symm", "nvshmem"):
        with pytest.raises(HeapError, match=rf"kind '{kind}' cannot be had: rank 0: .*cpu"):
            make_heap(None, "cpu", kind)


def test_what_cannot_be_had_is_refused_with_its_reason() -> None:
    run_ranks(impossible, 2)
