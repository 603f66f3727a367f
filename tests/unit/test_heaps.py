"""Blocks, virtual ranks, leftovers, and what heaps refuse."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from flexla_dist.comm.heaps import (
    Block,
    HeapArgumentError,
    HeapError,
    LocalHeap,
    make_heap,
)
from flexla_dist.comm.heaps.leftovers import is_name, new_name, remove_leftovers
from flexla_dist.comm.heaps.place import Place, start_of

TOKEN = "0" * 32


def test_local_heap_parts_lie_in_one_address_space() -> None:
    heap = LocalHeap(3, "cpu")
    block = heap.allocate("panels", 100)
    assert (heap.name, heap.dialect, heap.size, len(block.parts)) == ("local", "p2p", 3, 3)
    assert block.bases.tolist() == [part.local.data_ptr() for part in block.parts]
    assert len({base % 256 for base in block.bases.tolist()}) == 1
    for rank, part in enumerate(block.parts):
        assert part.nbytes == 100 and part.local.shape == (100,) and not part.local.any()
        part.local.fill_(rank + 1)
    assert [int(part.local.sum()) for part in block.parts] == [100, 200, 300]
    heap.barrier()
    heap.close()
    heap.close()
    with pytest.raises(HeapError, match="has been closed; make a new one"):
        heap.allocate("panels", 100)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_local_heap_refuses_sizes(size: object) -> None:
    with pytest.raises(HeapArgumentError, match="whole number of virtual ranks"):
        LocalHeap(size, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("label", "nbytes", "text"),
    [("", 8, "label is ''"), (3, 8, "label is 3"), ("x", 0, "nbytes is 0"), ("x", 8.0, "8.0")],
)
def test_wrong_requests_are_refused(label: object, nbytes: object, text: str) -> None:
    with pytest.raises(HeapArgumentError, match=text):
        LocalHeap(1, "cpu").allocate(label, nbytes)  # type: ignore[arg-type]


def test_views() -> None:
    block = LocalHeap(1, "cpu").allocate("panels", 64).parts[0]
    view = block.view(torch.float32, (2, 3), offset=16)
    view.fill_(1.0)
    assert block.local.view(torch.float32).tolist() == [0.0] * 4 + [1.0] * 6 + [0.0] * 6
    assert block.view(torch.int64, ()).shape == () and block.view(torch.int64, (0, 3)).numel() == 0
    with pytest.raises(HeapArgumentError, match=r"ends at byte 72, and the block has 64"):
        block.view(torch.float64, (8,), offset=8)
    for offset in (-8, 4):
        with pytest.raises(HeapArgumentError, match="a multiple of 8"):
            block.view(torch.float64, (1,), offset=offset)
    assert "owner" not in repr(Block(8, torch.zeros(8), torch.zeros(1), owner="secret"))


def test_leftovers_of_ended_processes_go_and_others_stay(tmp_path: Path) -> None:
    here = Place.here()
    ended = subprocess.Popen(["true"])
    started = start_of(ended.pid)
    ended.wait()
    space = here.pid_namespace
    gone = {
        f"flexla_dist-{space}-{ended.pid}-{started or 1}-{TOKEN}",
        f"flexla_dist-{space}-{here.pid}-{here.started - 1}-{TOKEN}",  # an earlier one of our pid
        f"flexla_dist-{space + 1}-{here.pid}-1-{TOKEN}",  # another container's, and old
    }
    stay = {
        new_name(),
        f"flexla_dist-{space + 1}-{here.pid}-2-{TOKEN}",
        f"flexla_dist-{space}-{ended.pid}-{started or 1}-short",
        "flexla_dist-notes",
        f"other-{space}-{ended.pid}-1-{TOKEN}",
    }
    for name in gone | stay:
        (tmp_path / name).write_bytes(b"")
    old = time.time() - 7200
    os.utime(tmp_path / f"flexla_dist-{space + 1}-{here.pid}-1-{TOKEN}", (old, old))
    assert set(remove_leftovers(tmp_path)) == gone
    assert {path.name for path in tmp_path.iterdir()} == stay
    assert remove_leftovers(tmp_path) == []


def test_names_cannot_be_guessed_and_are_recognised() -> None:
    names = {new_name() for _ in range(100)}
    assert len(names) == 100 and all(map(is_name, names))
    assert not is_name("../etc/passwd") and not is_name(f"{new_name()}/x")


def test_place_sees_the_end_of_a_process() -> None:
    here = Place.here()
    process = subprocess.Popen(["sleep", "60"])
    there = Place(here.host, here.boot, here.pid_namespace, process.pid, start_of(process.pid) or 0)
    assert there.same_host(here) and not there.has_ended(here) and not here.has_ended(here)
    process.kill()
    deadline = time.monotonic() + 5
    while not there.has_ended(here) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there.has_ended(here), "a killed process counts as ended before it was waited for"
    process.wait()
    elsewhere = Place("other", "boot", here.pid_namespace, process.pid, 1)
    assert not elsewhere.has_ended(here), "nothing is known of processes on other hosts"
    assert Place(**here.as_fields()) == here


def test_wrong_kinds_and_devices_are_refused_before_any_rank_is_asked() -> None:
    with pytest.raises(HeapArgumentError, match=r"expected one of auto, .*LocalHeap\(size, device"):
        make_heap(None, "cpu", "local")
    with pytest.raises(HeapArgumentError, match="kind is 'shm'"):
        make_heap(None, "cpu", "shm")
    with pytest.raises(ValueError, match="none here"):
        make_heap(None, "cuda:77")
    with pytest.raises(ValueError, match="init_process_group"):
        make_heap(None, "cpu")
