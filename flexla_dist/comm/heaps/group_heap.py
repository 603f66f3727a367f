"""What the heaps of a process group share: agreed requests, barrier, closing."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from flexla_dist.comm.errors import ExchangeError
from flexla_dist.comm.heaps.block import Block, Dialect, check_request
from flexla_dist.comm.heaps.errors import HeapError, HeapMismatch
from flexla_dist.comm.heaps.meeting import Meeting


class GroupHeap(ABC):
    """A heap whose ranks are the ranks of a process group; see `SymmetricHeap`."""

    name: str = ""
    dialect: Dialect = "p2p"

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.meeting = meeting
        self.device = device
        self.closed = False
        self._blocks: list[Block] = []

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.meeting.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self.meeting.ranks.size

    def allocate(self, label: str, nbytes: int) -> Block:
        """A zeroed part of `nbytes` bytes on every rank; see `SymmetricHeap.allocate`.

        Raises HeapMismatch, HeapError (no memory, no access to a peer), ExchangeTimeout and
        RemoteRankError.
        """
        check_request(label, nbytes)
        self._check_open(f"allocate({label!r}, {nbytes})")
        block = self._allocate(label, nbytes)
        self._blocks.append(block)
        return block

    def barrier(self) -> None:
        """Wait for all ranks; what they wrote to heap memory before is visible afterwards."""
        self._check_open("barrier")
        self._complete_writes()
        self.meeting.gather("barrier", None)

    def close(self) -> None:
        """Give the memory back once all ranks have come here; a second call does nothing.

        A rank that failed or has ended is not waited for: the memory is given back all the same.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self._complete_writes()
            if not self.meeting.failed:
                self.meeting.gather("close", None)
        except HeapMismatch:
            raise
        except ExchangeError:
            return  # a rank is gone; nobody will read this memory
        finally:
            self._release()

    @abstractmethod
    def _allocate(self, label: str, nbytes: int) -> Block:
        """Memory on every rank, after they agreed on label and size."""

    def _complete_writes(self) -> None:
        """Return when this rank's writes to heap memory have been done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release(self) -> None:
        """Give back the memory."""
        self._blocks.clear()

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise HeapError(f"{what}: this {self.name} heap has been closed; make a new one")
