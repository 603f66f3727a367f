"""`libshmem_device`, by the interpreter."""

from typing import Any

import triton.language as tl

from ...memory import at_peer, element, number, scalar_pointer


class libshmem_device:
    """The functions of the module of that name."""

    NVSHMEM_SIGNAL_SET = 9
    NVSHMEM_SIGNAL_ADD = 10

    @staticmethod
    def fence() -> None:
        """Order puts to each rank; all is in order here."""

    @staticmethod
    def putmem_block(dest: Any, source: Any, nbytes: Any, pe: Any) -> None:
        """Copy memory of this rank to another one."""
        target = at_peer(scalar_pointer(dest, "putmem: dest"), element(pe))
        source = scalar_pointer(source, "putmem: source")
        size = target.dtype.element_ty.primitive_bitwidth // 8
        inside = tl.arange(0, 32)
        for start in range(0, number(nbytes) // size, 32):
            mask = inside + start < number(nbytes) // size
            tl.store(
                target + start + inside, tl.load(source + start + inside, mask=mask), mask=mask
            )

    @staticmethod
    def putmem_signal_block(
        dest: Any, source: Any, nbytes: Any, sig_addr: Any, signal: Any, sig_op: Any, pe: Any
    ) -> None:
        """Copy memory to another rank, then change its flag."""
        pointer = scalar_pointer(sig_addr, "putmem_signal: sig_addr")
        if pointer.dtype.element_ty not in (tl.int64, tl.uint64):
            raise TypeError(f"putmem_signal: flag is {pointer.dtype}, expected 64 bits")
        libshmem_device.putmem_block(dest, source, nbytes, pe)
        change = {9: tl.atomic_xchg, 10: tl.atomic_add}[number(sig_op)]
        change(at_peer(pointer, element(pe)), signal, sem="release", scope="sys")
