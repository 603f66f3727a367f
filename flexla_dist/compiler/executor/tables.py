"""Small tables of integers on a device: where chunks and documents lie.

Contract: equal numbers on one device are copied there once and shared, so that a repeated call
copies nothing: no wait for the device, and nothing that a CUDA graph could not capture. A capture
needs its tables to be there already, from one call before it, and keeps them for good, because
the graph reads them whenever it is replayed. Tables are never written to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.errors import ExecutorError

MOST_TABLES = 512
Key = tuple[tuple[int, ...], torch.device, torch.dtype]


@dataclass(frozen=True, eq=False)
class _Table:
    values: Tensor
    stream: torch.cuda.Stream | None
    copied: torch.cuda.Event | None


class DeviceTables:
    """The most recently used tables, and those that captured graphs read."""

    def __init__(self, most: int = MOST_TABLES):
        self._most = most
        self._recent: OrderedDict[Key, _Table] = OrderedDict()
        self._captured: dict[Key, _Table] = {}

    def get(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """`numbers` as a tensor [n] on a device; [0] if there are none.

        Raises:
            ExecutorError: a CUDA graph is being captured and no call was made before it.
        """
        key = (tuple(numbers) or (0,), device, dtype)
        if device.type != "cuda":
            return self._recall(key, None).values
        if torch.cuda.is_current_stream_capturing():
            return self._during_capture(key).values
        stream = torch.cuda.current_stream(device)
        table = self._recall(key, stream)
        if table.stream != stream:
            assert table.copied is not None
            stream.wait_event(table.copied)
            table.values.record_stream(stream)
        return table.values

    def _recall(self, key: Key, stream: torch.cuda.Stream | None) -> _Table:
        found = self._recent.pop(key, None) or self._captured.get(key)
        if found is None:
            found = _copy(key, stream)
            if type(found.values) is not Tensor:  # a mode that computes shapes alone is active
                return found
        self._recent[key] = found
        if len(self._recent) > self._most:
            self._recent.popitem(last=False)
        return found

    def _during_capture(self, key: Key) -> _Table:
        found = self._captured.get(key) or self._recent.get(key)
        if found is None:
            raise ExecutorError(
                "a CUDA graph is captured around a call of these shapes that was never made "
                "before; call the operator once, forward and backward, then capture"
            )
        self._captured[key] = found
        return found


def _copy(key: Key, stream: torch.cuda.Stream | None) -> _Table:
    numbers, device, dtype = key
    with torch.inference_mode(False):
        host = torch.tensor(numbers, dtype=dtype, device="cpu")
        values = host.to(device, non_blocking=stream is not None)
    if stream is None:
        return _Table(values, None, None)
    copied = torch.cuda.Event()
    copied.record(stream)
    return _Table(values, stream, copied)


_TABLES = DeviceTables()


def device_table(
    numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """`numbers` as a shared tensor on a device, see `DeviceTables.get`."""
    return _TABLES.get(numbers, device, dtype)
