"""Small tables of integers on a device: where chunks and documents lie; and zeros.

Contract: equal numbers on one device are copied there once and shared, so that a repeated call
copies nothing: no wait for the device, and nothing that a CUDA graph could not capture. A capture
needs its tables to be there already, from one call before it, and keeps them for good, because
the graph reads them whenever it is replayed. Tables are never written to.

On CUDA a table is copied on a stream of its own, so that the copy waits for no other work, and by
a thread of its own, so that its memory belongs to no pool of a CUDA graph that is being warmed up
(such pools take what their thread allocates, and are used again after the call).

Zeros that are only read (states before the first token, gradients that did not arrive) are one
run of float32 zeros a device, kept in the same way and seen in many shapes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

import torch
from torch import Tensor

from flexla_dist.errors import ExecutorError

MOST_TABLES = 512
MOST_ZEROS = 1 << 22  # numbers of the run of zeros of a device; larger ones are made each time
LEAST_ZEROS = 1 << 16
MOST_VIEWS = 256
Key = tuple[tuple[int, ...], torch.device, torch.dtype]


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers on a device, and the streams that may still read them."""

    key: Key
    values: Tensor
    readers: set[int] = field(default_factory=set)


class DeviceTables:
    """The most recently used tables, and those that captured graphs read."""

    def __init__(self, most: int = MOST_TABLES):
        self._most = most
        self._recent: OrderedDict[Key, Table] = OrderedDict()
        self._captured: dict[Key, Table] = {}

    def get(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """`numbers` as a tensor [n] on a device; [0] if there are none.

        Raises:
            ExecutorError: a CUDA graph is being captured and no call was made before it.
        """
        return self.find(numbers, device, dtype).values

    def find(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Table:
        """The table of `get`, to be kept; whoever reads it in a later call says so with `use`."""
        key = (tuple(numbers) or (0,), device, dtype)
        if device.type != "cuda":
            return self._recall(key)
        if torch.cuda.is_current_stream_capturing():
            return self._during_capture(key)
        table = self._recall(key)
        _read_here(table, device)
        return table

    def use(self, tables: Sequence[Table], device: torch.device, stream: int) -> None:
        """The current stream, of that number, is about to read tables that were found before."""
        if device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            self._captured.update((table.key, table) for table in tables)
            return
        for table in tables:
            if stream not in table.readers:
                _read_here(table, device)

    def _recall(self, key: Key) -> Table:
        found = self._recent.pop(key, None) or self._captured.get(key)
        if found is None:
            found = Table(key, _copy(key))
            if type(found.values) is not Tensor:  # a mode that computes shapes alone is active
                return found
        self._recent[key] = found
        if len(self._recent) > self._most:
            self._recent.popitem(last=False)
        return found

    def _during_capture(self, key: Key) -> Table:
        found = self._captured.get(key) or self._recent.get(key)
        if found is None:
            raise ExecutorError(
                "a CUDA graph is captured around a call of these shapes that was never made "
                "before; call the operator once, forward and backward, then capture"
            )
        self._captured[key] = found
        return found


def _read_here(table: Table, device: torch.device) -> None:
    """Note the current stream as a reader, so that the memory is not used again before it is."""
    stream = torch.cuda.current_stream(device)
    if stream.cuda_stream not in table.readers:
        table.readers.add(stream.cuda_stream)
        table.values.record_stream(stream)


def _copy(key: Key) -> Tensor:
    numbers, device, dtype = key
    with torch.inference_mode(False):
        host = torch.tensor(numbers, dtype=dtype, device="cpu")
        return _copy_aside(host, device) if device.type == "cuda" else host.to(device)


def _copy_aside(host: Tensor, device: torch.device) -> Tensor:
    return _aside(device, lambda: host.to(device, non_blocking=True))


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _aside(device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """Make a CUDA tensor by another thread on another stream; complete when it returns."""
    done: Future[Tensor] = Future()

    def work() -> None:
        try:
            stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
            with torch.cuda.stream(stream):
                values = make()
                stream.synchronize()
            done.set_result(values)
        except BaseException as error:
            done.set_exception(error)

    Thread(target=work, name="flexla-dist-table").start()
    return done.result()


class DeviceZeros:
    """Zeros that nobody writes: views of one run of float32 zeros a device."""

    def __init__(self) -> None:
        self._runs: dict[torch.device, Table] = {}
        self._views: dict[tuple[tuple[int, ...], torch.device], tuple[Tensor, Table]] = {}
        self._captured: list[Table] = []  # graphs read them whenever they are replayed

    def get(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros [*shape], shared where they are float32 and few; the caller must not write."""
        found = self._views.get((shape, device)) if dtype == torch.float32 else None
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if found is None:
            count = math.prod(shape)
            if dtype != torch.float32 or count > MOST_ZEROS or capturing:
                return torch.zeros(shape, dtype=dtype, device=device)
            found = self._view(shape, count, device)
        view, run = found
        if capturing:
            if run not in self._captured:
                self._captured.append(run)
        elif device.type == "cuda":
            _read_here(run, device)
        return view

    def _view(
        self, shape: tuple[int, ...], count: int, device: torch.device
    ) -> tuple[Tensor, Table]:
        run = self._runs.get(device)
        if run is None or run.values.numel() < count:
            size = max(LEAST_ZEROS, 1 << max(count - 1, 0).bit_length())
            run = self._runs[device] = Table(((size,), device, torch.float32), _zeros(size, device))
            self._views = {key: x for key, x in self._views.items() if key[1] != device}
        if len(self._views) >= MOST_VIEWS:
            self._views = {}
        with _outside_modes():
            view = run.values[:count].view(shape)
        found = self._views[shape, device] = (view, run)
        return found


@contextmanager
def _outside_modes() -> Iterator[None]:
    """Tensors made within are plain, whatever mode surrounds a call."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


def _zeros(size: int, device: torch.device) -> Tensor:
    def make() -> Tensor:
        with _outside_modes():
            return torch.zeros(size, dtype=torch.float32, device=device)

    return _aside(device, make) if device.type == "cuda" else make()


_TABLES = DeviceTables()


def device_table(
    numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """`numbers` as a shared tensor on a device, see `DeviceTables.get`."""
    return _TABLES.get(numbers, device, dtype)


_ZEROS = DeviceZeros()


def device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that must not be written, see `DeviceZeros.get`."""
    return _ZEROS.get(shape, dtype, device)


def found_table(
    numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> Table:
    """The table of `device_table`, for calls to come; see `use_tables`."""
    return _TABLES.find(numbers, device, dtype)


def use_tables(tables: Sequence[Table], device: torch.device, stream: int) -> None:
    """The current stream reads tables found before, see `DeviceTables.use`."""
    _TABLES.use(tables, device, stream)
