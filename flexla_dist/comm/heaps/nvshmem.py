"""`NvshmemHeap`: symmetric memory of GPUs on one or more hosts, by NVSHMEM.

Kernels write to peers of the same host by address where NVSHMEM gives one (`bases`), to the others
by its functions; stock Triton calls these through extern functions and NVSHMEM's device library.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from flexla_dist.comm.heaps.block import Block, Dialect
from flexla_dist.comm.heaps.errors import HeapArgumentError, HeapError
from flexla_dist.comm.heaps.group_heap import GroupHeap
from flexla_dist.comm.heaps.meeting import Meeting
from flexla_dist.comm.heaps.nvshmem_runtime import (
    import_nvshmem,
    is_started,
    prepare_kernels,
    start_by_mpi,
    start_by_uid,
    told,
)

Bootstrap = Literal["uid", "emulated_mpi"]


class NvshmemHeap(GroupHeap):
    """Memory of all processing elements of NVSHMEM, which are the ranks of the group.

    bootstrap: how NVSHMEM starts, if it does not run yet: "uid" passes its unique id through the
        group's store, "emulated_mpi" through `communicator`, an mpi4py communicator of the same
        ranks.
    dialect: "p2p" if every rank can address every other, else "nvshmem"; "nvshmem" may be forced.

    One GPU for each rank: NVSHMEM does not share one. Environment variables of NVSHMEM are the
    caller's; see `nvshmem_runtime`.
    """

    name = "nvshmem"

    def __init__(
        self,
        meeting: Meeting,
        device: torch.device,
        *,
        bootstrap: Bootstrap = "uid",
        communicator: Any = None,
        dialect: Dialect | None = None,
    ) -> None:
        super().__init__(meeting, device)
        _check_bootstrap(bootstrap, communicator)
        refused = refusals(meeting, device)
        if refused:
            raise HeapError(f"a heap of kind 'nvshmem' cannot be had: {refused}")
        self._core = import_nvshmem()
        torch.zeros(1, device=device)  # makes the context that NVSHMEM uses
        with torch.cuda.device(device):
            self._start(bootstrap, communicator)
        prepare_kernels()
        probe = self._allocate("probe of the peers' addresses", 8)
        reached = meeting.gather("addresses of peers", bool((probe.bases != 0).all().item()))
        self.dialect = dialect or ("p2p" if all(reached) else "nvshmem")
        self._free(probe)

    def _start(self, bootstrap: Bootstrap, communicator: Any) -> None:
        running = self.meeting.attempt("look at NVSHMEM", told(partial(is_started, self._core)))
        self.meeting.compare("whether NVSHMEM runs already", running)
        if not running[0]:
            if bootstrap == "uid":
                start_by_uid(self._core, self.meeting, self.device)
            else:
                start_by_mpi(self._core, self.meeting, self.device, communicator)
        self.meeting.attempt("comparison of the group with NVSHMEM", self._check_elements)

    def _check_elements(self) -> None:
        rank, size = int(self._core.my_pe()), int(self._core.n_pes())
        if (rank, size) != (self.rank, self.size):
            raise HeapError(
                f"NVSHMEM says element {rank} of {size}, the group rank {self.rank} of {self.size};"
                " NVSHMEM starts once in a process and allocates on all its elements: make the "
                "heap for the group it was started with"
            )

    def _allocate(self, label: str, nbytes: int) -> Block:
        # Agreed first: NVSHMEM's own allocation waits for all ranks and cannot be ended.
        self.meeting.agree("allocate", f"allocate({label!r}, {nbytes} bytes)")
        found: list[tuple[torch.Tensor, list[int]]] = []

        def make() -> None:
            # Ours to free: NVSHMEM's collective free must not run when an object happens to go.
            with torch.cuda.device(self.device):
                tensor = self._core.tensor(
                    (nbytes,), dtype=torch.uint8, release=True, except_on_del=False
                )
            tensor.zero_()
            torch.cuda.synchronize(self.device)
            found.append((tensor, self._addresses(tensor.data_ptr())))

        self.meeting.attempt(f"allocation of NVSHMEM memory for {label!r}", told(make))
        [(tensor, addresses)] = found
        bases = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return Block(nbytes, tensor, bases)

    def _addresses(self, own: int) -> list[int]:
        from nvshmem.bindings import nvshmem as bindings

        peers = range(self.size)
        return [own if peer == self.rank else int(bindings.ptr(own, peer)) for peer in peers]

    def _complete_writes(self) -> None:
        from nvshmem.bindings import nvshmem as bindings

        with torch.cuda.device(self.device):
            bindings.quiet_on_stream(torch.cuda.current_stream(self.device).cuda_stream)
        super()._complete_writes()

    def _release(self) -> None:
        """Free all blocks: together if all ranks are here, else they go with the process."""
        if not self.meeting.failed:
            for block in self._blocks:
                self._free(block)
        super()._release()

    def _free(self, block: Block) -> None:
        with torch.cuda.device(self.device):
            told(partial(self._core.free_tensor, block.local))()


def refusals(meeting: Meeting, device: torch.device) -> str:
    """Why the ranks cannot have such a heap, "" if they can; the same text on every rank."""
    own = f"it lives on a GPU, got device {device}" if device.type != "cuda" else ""
    if not own:
        try:
            import_nvshmem()
        except HeapError as error:
            own = str(error)
    uuid = "" if own else str(torch.cuda.get_device_properties(device).uuid)
    said = meeting.gather("look for NVSHMEM", [own, uuid])
    name = meeting.ranks.name
    for rank, (refusal, _) in enumerate(said):
        if refusal:
            return f"{name(rank)}: {refusal}"
    for rank, (_, other) in enumerate(said):
        first = next(i for i, (_, uuid) in enumerate(said) if uuid == other)
        if first != rank:
            return (
                f"{name(first)} and {name(rank)} share one GPU, which NVSHMEM does not support: "
                "give each rank a GPU of its own"
            )
    return ""


def _check_bootstrap(bootstrap: str, communicator: Any) -> None:
    if bootstrap not in ("uid", "emulated_mpi"):
        raise HeapArgumentError(f"bootstrap is {bootstrap!r}, expected 'uid' or 'emulated_mpi'")
    if (bootstrap == "emulated_mpi") != (communicator is not None):
        raise HeapArgumentError(
            f"bootstrap {bootstrap!r} with communicator {communicator!r}: 'emulated_mpi' wants an "
            "mpi4py communicator, 'uid' none"
        )
