"""Integers that are copied to a device once."""

import torch
from torch._subclasses import FakeTensorMode

from flexla_dist.compiler.executor.tables import DeviceTables

CPU = torch.device("cpu")


def test_equal_numbers_share_a_table() -> None:
    tables = DeviceTables()
    first = tables.get([1, 2, 3], CPU, torch.int32)
    assert first.dtype == torch.int32 and first.tolist() == [1, 2, 3]
    assert tables.get((1, 2, 3), CPU, torch.int32) is first
    assert tables.get((1, 2, 3), CPU, torch.int64) is not first
    assert tables.get((), CPU, torch.int64).tolist() == [0]


def test_the_least_recently_used_goes() -> None:
    tables = DeviceTables(most=2)
    kept = tables.get([1], CPU, torch.int32)
    gone = tables.get([2], CPU, torch.int32)
    assert tables.get([1], CPU, torch.int32) is kept
    tables.get([3], CPU, torch.int32)
    assert tables.get([1], CPU, torch.int32) is kept
    assert tables.get([2], CPU, torch.int32) is not gone


def test_tables_without_numbers_are_not_kept() -> None:
    tables = DeviceTables()
    with FakeTensorMode(), torch.inference_mode():
        tables.get([1, 2], CPU, torch.int32)
    with torch.inference_mode():
        real = tables.get([1, 2], CPU, torch.int32)
    assert type(real) is torch.Tensor and not real.is_inference()
    meta = tables.get([1, 2], torch.device("meta"), torch.int32)
    assert meta.device.type == "meta"
