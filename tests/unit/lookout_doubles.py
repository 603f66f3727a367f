"""Doubles of what a rank's device waits for: no GPU, no NCCL, no other rank."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flexla_dist.comm.links import GroupRanks
from flexla_dist.comm.lookout import Lookout, own_place
from flexla_dist.comm.stream_works import StreamWorks
from flexla_dist.comm.watch import Watch

GONE = '{"host": "elsewhere", "boot": "", "pid_namespace": 0, "pid": 1, "started": 1}'


class WorkDouble:
    """A work of NCCL: `wait` orders a stream and returns at once; done when it is told so."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def wait(self) -> None:
        """Nothing: the host goes on."""

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        return self.done


class EventDouble:
    """An event behind a work; `order` counts who looked."""

    def __init__(self, work: WorkDouble) -> None:
        self.work = work

    def query(self) -> bool:
        """Whether the work before it is done."""
        return self.work.done


class BackendDouble:
    """A backend whose abort ends the works that were posted, as that of NCCL does."""

    def __init__(self) -> None:
        self.works: list[WorkDouble] = []
        self.aborts = 0
        self.refuses = False

    def abort(self) -> None:
        """End all works."""
        self.aborts += 1
        if self.refuses:
            raise RuntimeError("no abort here")
        for work in self.works:
            work.done = True


class GroupDouble:
    """A group with a store in this process."""

    def __init__(self, store: Any) -> None:
        self.backend = BackendDouble()
        self._store = store

    def get_group_store(self) -> Any:
        """The store of all ranks."""
        return self._store

    def _get_backend(self, device: torch.device) -> BackendDouble:
        return self.backend


class Rank:
    """One of two ranks with works on a stream; the other one is `process`, or on another host."""

    def __init__(self, rank: int = 0, store: Any = None, timeout: float = 60.0) -> None:
        if store is None:
            store = dist.HashStore()
            store.set_timeout(timedelta(seconds=5))
        self.store = store
        self.group = GroupDouble(store)
        self.ranks = GroupRanks(self.group, rank, 2, (0, 1))  # type: ignore[arg-type]
        self.watch = Watch(self.ranks, timeout)
        self.works = StreamWorks(self.ranks, self.watch)
        self.lookout: Lookout | None = None

    def meet(self, other: str = GONE) -> Rank:
        """As the ranks do once: tell each other where they run. other: place of the other rank."""
        places = [own_place(), other]
        self.lookout = Lookout(self.ranks, places if self.ranks.rank == 0 else places[::-1])
        self.works.look_after(self.lookout)
        return self

    def post(self, what: str = "state exchange", *, done: bool = False) -> WorkDouble:
        """A receive that the stream waits for, and its header's event."""
        from flexla_dist.comm.watch import Waiting

        work, waiting = WorkDouble(done), Waiting(1 - self.ranks.rank, what)
        self.group.backend.works.append(work)
        with self.works.starting(waiting, torch.device("cpu")):
            pass
        self.works.wait(work, waiting)  # type: ignore[arg-type]
        return work

    def expect_header(self, work: WorkDouble, compared: list[list[int]]) -> None:
        """A header behind the work; it goes to `compared`."""
        entry = (torch.zeros(2, dtype=torch.int64), EventDouble(work), compared.append)
        self.works._headers.append(entry)  # type: ignore[arg-type]


class Process:
    """A real process that can be ended, and its place as text."""

    def __init__(self) -> None:
        program = (
            "import sys; from flexla_dist.comm.lookout import own_place; "
            "print(own_place(), flush=True); sys.stdin.read()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.place = self._process.stdout.readline().decode().strip()

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        self._process.communicate(timeout=20)
