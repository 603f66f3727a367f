"""Where a process runs: told to the other ranks, so that they notice when it ends."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"
_ENDED = ("Z", "X", "x")


@dataclass(frozen=True)
class Place:
    """A process: its host, since which start of it, its pid there and when it began.

    pid_namespace: pids of another namespace (a container) mean nothing here.
    started: clock ticks since the host's start; tells a process from a later one of the same pid.
    """

    host: str
    boot: str
    pid_namespace: int
    pid: int
    started: int

    @classmethod
    def here(cls) -> Place:
        """That of the calling process."""
        boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
        pid = os.getpid()
        return cls(socket.gethostname(), boot, pid_namespace(), pid, start_of(pid) or 0)

    def as_fields(self) -> dict[str, Any]:
        """For `Place(**fields)` on another rank."""
        return asdict(self)

    def same_host(self, other: Place) -> bool:
        """Whether both are processes of one host."""
        return (self.host, self.boot) == (other.host, other.boot)

    def has_ended(self, here: Place) -> bool:
        """Whether this process is known to have ended; False where that cannot be seen."""
        known = self.same_host(here) and self.pid_namespace == here.pid_namespace
        return known and here.started != 0 and start_of(self.pid) != self.started


def pid_namespace() -> int:
    """Number of the calling process's pid namespace, 0 where there are none."""
    try:
        return os.stat(_NAMESPACE).st_ino
    except OSError:
        return 0


def start_of(pid: int) -> int | None:
    """When the process began, in clock ticks since the host's start; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces and brackets
    return None if fields[0] in _ENDED else int(fields[19])
