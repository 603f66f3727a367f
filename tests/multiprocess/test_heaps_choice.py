"""Which heap GPUs get, and the reasons for none; GPUs and hosts are made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from flexla_dist.comm.heaps import HeapError, Meeting, choose, nvshmem, torch_symm
from flexla_dist.comm.heaps.torch_symm import OVERLAP, Gpu
from flexla_dist.comm.links import GroupRanks
from flexla_dist.testing.ranks import run_ranks

DEVICE = torch.device("cuda", 0)


@contextmanager
def machine(
    rank: int, gpus: Sequence[Gpu], blocked: Sequence[int] = (), overlap: str = "0"
) -> Iterator[None]:
    """A host on which this rank has GPU number `rank` of `gpus` and cannot reach the blocked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OVERLAP, overlap)
        patch.setattr(torch_symm, "_local_refusal", lambda device: "")
        numbers = {0: rank} if len({gpu.index for gpu in gpus}) == 1 else {}
        patch.setattr(Gpu, "of", lambda device: gpus[numbers.get(device.index, device.index)])
        patch.setattr(torch.cuda, "device_count", lambda: 1 if numbers else len(gpus))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b not in blocked)
        yield


def refusal(rank: int, size: int, case: str) -> str:
    apart = [Gpu(i, f"uuid {i}", "a GPU") for i in range(size)]
    same = [replace(gpu, index=0, uuid="uuid") for gpu in apart]
    numbered_alike = [replace(gpu, index=0) for gpu in apart]
    gpus = {"shared": same, "allowed": same, "alike": numbered_alike}.get(case, apart)
    meeting = Meeting(GroupRanks.of(None))
    if case == "hosts":
        first, second = meeting.places
        meeting._places = (first, replace(second, host="elsewhere"))
    device = DEVICE if gpus is not apart else torch.device("cuda", rank)
    blocked = (1,) if case == "blocked" else ()
    with machine(rank, gpus, blocked, "1" if case == "allowed" else "0"):
        return torch_symm.refusals(meeting, device)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("apart", ""),
        ("allowed", ""),
        ("shared", "rank 0 and rank 1 are on one GPU (a GPU, number 0); give each rank a GPU of"),
        ("alike", "rank 0 and rank 1 both call their GPU number 0"),
        ("blocked", "the GPU of rank 0 has no peer access to that of rank 1"),
        ("hosts", "the ranks are on 2 hosts"),
    ],
)
def test_torch_symm_says_why_not(case: str, text: str) -> None:
    first, second = run_ranks(refusal, 2, case)
    assert first == second and first.startswith(text) and bool(first) == bool(text)


def choice(rank: int, size: int, first: str, second: str) -> str:
    """Refusals of the two kinds, and stand-ins for the heaps themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_symm, "refusals", lambda meeting, device: first)
        patch.setattr(nvshmem, "refusals", lambda meeting, device: second)
        patch.setattr(choose, "TorchSymmHeap", lambda meeting, device: "torch_symm")
        patch.setattr(choose, "NvshmemHeap", lambda meeting, device: "nvshmem")
        try:
            return choose._of_gpus(Meeting(GroupRanks.of(None)), DEVICE)  # type: ignore[return-value]
        except HeapError as error:
            return str(error)


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [("", "", "torch_symm"), ("", "no", "torch_symm"), ("two hosts", "", "nvshmem")],
)
def test_automatic_choice(first: str, second: str, wanted: str) -> None:
    assert run_ranks(choice, 1, first, second) == [wanted]


def test_both_reasons_are_named() -> None:
    [text] = run_ranks(choice, 1, "two hosts", "not installed")
    assert "torch_symm: two hosts\n" in text and "nvshmem: not installed\n" in text
