"""Opens the device engine of a group, or says on every rank why that cannot be done."""

from __future__ import annotations

import torch

from flexla_dist.comm.engines import DeviceEngine, seconds_to_meet
from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.heaps import HeapError, SymmetricHeap, make_heap
from flexla_dist.errors import ShardingError


class EngineRefused(HeapError, ShardingError):
    """The device engine was asked for and cannot run here; every rank raises it."""


def open_engine(
    exchanger: StateExchanger,
    device: torch.device,
    timeout: float,
    heap: SymmetricHeap | None = None,
) -> DeviceEngine:
    """The device engine of the exchanger's group for tensors on `device`; collective.

    heap: to use instead of one that is made. EngineRefused, on every rank, names what is missing.
    """
    own = _missing(device, heap)
    reasons = exchanger.gather_texts("whether kernels can run here", own)
    for rank, reason in enumerate(reasons):
        if reason:
            raise EngineRefused(f"{exchanger.ranks.name(rank)}: {reason}")
    if heap is None:
        try:
            heap = make_heap(exchanger.ranks.group, device, timeout=seconds_to_meet(timeout))
        except HeapError as error:
            raise EngineRefused(str(error)) from error
    engine = DeviceEngine(heap, timeout)
    engine.lookout = exchanger.lookout()
    engine.lookout.add(engine.waits, first=True)
    return engine


def _missing(device: torch.device, heap: SymmetricHeap | None) -> str:
    """What keeps this process from running kernels on `device`, "" if nothing does."""
    if heap is not None and heap.device != device:
        return (
            f"the heap that was given lives on {heap.device}, the tensors on {device}: make it for "
            "their device"
        )
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}): install triton, or use backend='host'"
    interpreted = bool(triton.knobs.runtime.interpret)
    if device.type == "cpu" and not interpreted:
        return (
            "the tensors are on the CPU, where kernels run only in Triton's interpreter: move them "
            "to a GPU, use backend='host', or, for tests, set TRITON_INTERPRET=1 before Triton is "
            "imported"
        )
    if device.type == "cuda" and interpreted:
        return (
            "the tensors are on a GPU and Triton's interpreter is on: unset TRITON_INTERPRET "
            "before Triton is imported"
        )
    if device.type not in ("cpu", "cuda"):
        return f"the tensors are on {device}, expected a CUDA device: use backend='host'"
    return ""
