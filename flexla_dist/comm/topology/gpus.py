"""How the GPUs of a host reach each other: NVML if the driver's library is there, else PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

NVML_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _NVLINK_CAPABILITY, _STATUS_OK = 0, 2, 0


def bus_id(index: int) -> str:
    """PCI address of a GPU that PyTorch sees, `0000:1b:00.0`; the same for every process."""
    found = torch.cuda.get_device_properties(index)
    domain, bus, device = (
        getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    )
    if domain is None or bus is None or device is None:
        return f"gpu{index}"
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def peers_of(index: int) -> dict[str, str]:
    """{PCI address: "nvlink" or "pcie"} of the visible GPUs whose memory this GPU reaches.

    Peer access without NVML counts as PCIe, because it cannot be told from NVLink then.
    """
    others = [i for i in range(torch.cuda.device_count()) if i != index]
    reached = [i for i in others if torch.cuda.can_device_access_peer(index, i)]
    by_nvlink = _nvlink_peers(bus_id(index), [bus_id(i) for i in reached])
    return {bus_id(i): "nvlink" if bus_id(i) in by_nvlink else "pcie" for i in reached}


def _nvlink_peers(own: str, others: Sequence[str]) -> set[str]:
    """Those of `others` that NVML says NVLink joins with `own`; empty without NVML."""
    try:
        with _nvml() as library:
            mine = _handle(library, own)
            return {other for other in others if _joined(library, mine, _handle(library, other))}
    except OSError:
        return set()


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(NVML_LIBRARY)
    if library.nvmlInit_v2() != _SUCCESS:
        raise OSError("NVML does not start: the driver is not loaded")
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _handle(library: ctypes.CDLL, address: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    found = library.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(handle))
    if found != _SUCCESS:
        raise OSError(f"NVML knows no GPU at {address}")
    return handle


def _joined(library: ctypes.CDLL, one: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
    status = ctypes.c_int(-1)
    asked = library.nvmlDeviceGetP2PStatus(one, other, _NVLINK_CAPABILITY, ctypes.byref(status))
    return asked == _SUCCESS and status.value == _STATUS_OK
