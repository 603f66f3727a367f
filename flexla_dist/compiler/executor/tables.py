"""Small tables of integers on a device: where chunks and documents lie.

Contract: equal numbers on one device are copied there once and shared, so that a repeated call
copies nothing: no wait for the device, and nothing that a CUDA graph could not capture. A capture
needs its tables to be there already, from one call before it, and keeps them for good, because
the graph reads them whenever it is replayed. Tables are never written to.

On CUDA a table is copied on a stream of its own, so that the copy waits for no other work, and by
a thread of its own, so that its memory belongs to no pool of a CUDA graph that is being warmed up
(such pools take what their thread allocates, and are used again after the call).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread

import torch
from torch import Tensor

from flexla_dist.errors import ExecutorError

MOST_TABLES = 512
Key = tuple[tuple[int, ...], torch.device, torch.dtype]


@dataclass(frozen=True, eq=False)
class _Table:
    values: Tensor
    readers: set[int] = field(default_factory=set)  # streams that may still read it


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
            return self._recall(key).values
        if torch.cuda.is_current_stream_capturing():
            return self._during_capture(key).values
        table = self._recall(key)
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream not in table.readers:
            table.readers.add(stream.cuda_stream)
            table.values.record_stream(stream)
        return table.values

    def _recall(self, key: Key) -> _Table:
        found = self._recent.pop(key, None) or self._captured.get(key)
        if found is None:
            found = _Table(_copy(key))
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


def _copy(key: Key) -> Tensor:
    numbers, device, dtype = key
    with torch.inference_mode(False):
        host = torch.tensor(numbers, dtype=dtype, device="cpu")
        return _copy_aside(host, device) if device.type == "cuda" else host.to(device)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _copy_aside(host: Tensor, device: torch.device) -> Tensor:
    """Copy to CUDA by another thread on another stream; complete when it returns."""
    done: Future[Tensor] = Future()

    def work() -> None:
        try:
            stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
            with torch.cuda.stream(stream):
                values = host.to(device, non_blocking=True)
                stream.synchronize()
            done.set_result(values)
        except BaseException as error:
            done.set_exception(error)

    Thread(target=work, name="flexla-dist-table").start()
    return done.result()


_TABLES = DeviceTables()


def device_table(
    numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """`numbers` as a shared tensor on a device, see `DeviceTables.get`."""
    return _TABLES.get(numbers, device, dtype)
