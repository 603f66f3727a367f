"""Integers that are copied to a device once."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flexla_dist.compiler.executor import tables
from flexla_dist.compiler.executor.tables import DeviceTables
from flexla_dist.errors import ExecutorError

CPU = torch.device("cpu")


def test_equal_numbers_share_a_table() -> None:
    found = DeviceTables()
    first = found.get([1, 2, 3], CPU, torch.int32)
    assert first.dtype == torch.int32 and first.tolist() == [1, 2, 3]
    assert found.get((1, 2, 3), CPU, torch.int32) is first
    assert found.get((1, 2, 3), CPU, torch.int64) is not first
    assert found.get((), CPU, torch.int64).tolist() == [0]


def test_the_least_recently_used_goes() -> None:
    found = DeviceTables(most=2)
    kept = found.get([1], CPU, torch.int32)
    gone = found.get([2], CPU, torch.int32)
    assert found.get([1], CPU, torch.int32) is kept
    found.get([3], CPU, torch.int32)
    assert found.get([1], CPU, torch.int32) is kept
    assert found.get([2], CPU, torch.int32) is not gone


def test_tables_without_numbers_are_not_kept() -> None:
    found = DeviceTables()
    with FakeTensorMode(), torch.inference_mode():
        found.get([1, 2], CPU, torch.int32)
    with torch.inference_mode():
        real = found.get([1, 2], CPU, torch.int32)
    assert type(real) is torch.Tensor and not real.is_inference()
    meta = found.get([1, 2], torch.device("meta"), torch.int32)
    assert meta.device.type == "meta"


class FakeStream:
    """A stream of a machine without CUDA."""

    cuda_stream = 7

    def __init__(self, device: torch.device) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_capture_needs_tables_from_before_and_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, capturing, copies, readers = torch.device("cuda", 0), [False], [], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: readers.append(stream))

    def copy(key: tables.Key) -> Tensor:
        copies.append(key)
        return torch.tensor(key[0])

    monkeypatch.setattr(tables, "_copy", copy)
    found = DeviceTables(most=1)
    first = found.get([1], gpu, torch.int32)
    assert found.get([1], gpu, torch.int32) is first and len(readers) == len(copies) == 1
    capturing[0] = True
    assert found.get([1], gpu, torch.int32) is first and len(readers) == 1
    with pytest.raises(ExecutorError, match="call the operator once"):
        found.get([2], gpu, torch.int32)
    capturing[0] = False
    found.get([2], gpu, torch.int32)
    assert found.get([1], gpu, torch.int32) is first  # the graph still reads it


def test_copies_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(tables, "_STREAMS", {})
    host = torch.tensor([1, 2])
    assert tables._copy_aside(host, CPU).tolist() == [1, 2]
    assert tables._STREAMS[CPU].waited == 1
    with pytest.raises(RuntimeError, match="device"):
        tables._copy_aside(host, "no such device")  # type: ignore[arg-type]
