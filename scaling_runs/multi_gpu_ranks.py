"""Processes of one step: started together, ended together, never waited for without end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOK_SECONDS = 0.05
GRACE_SECONDS = 8.0  # for the others to tell what they know of a rank that failed
TAIL = 4000
WRONG = 3  # exit code of a rank that went to its end and found something wrong


@dataclass(frozen=True)
class Outcome:
    """How a step ended: "ok", "wrong" (to its end, something was wrong), "failed", "late" (over its
    limit) or "stuck" (it wrote nothing)."""

    status: str
    seconds: float
    codes: tuple[int | None, ...]


@dataclass(frozen=True)
class Limits:
    """total: seconds of the step. stall: seconds in which something must be written to a log or
    into the folder of results."""

    total: float
    stall: float


def run_ranks(
    words: Sequence[str],
    ranks: int,
    environment: Mapping[str, str],
    logs: Sequence[Path],
    limits: Limits,
    watched: Path,
    one_may_die: bool = False,
) -> Outcome:
    """Run `python WORDS` on so many processes with torchrun's variables; output goes to the logs.

    one_may_die: a rank that ends with an error does not end the others.
    """
    begin = time.monotonic()
    port = str(_free_port())
    processes: list[subprocess.Popen[bytes]] = []
    for rank, log in enumerate(logs[:ranks]):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        with log.open("ab") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    env={**environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        status = _wait(processes, begin, limits, [watched, *logs], one_may_die)
    finally:
        _end(processes)
    return Outcome(status, time.monotonic() - begin, tuple(p.poll() for p in processes))


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    begin: float,
    limits: Limits,
    watched: Sequence[Path],
    one_may_die: bool,
) -> str:
    failed_at: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        now = time.monotonic()
        bad = [code for code in codes if code not in (None, 0, WRONG)]
        if all(code is not None for code in codes):
            if len(bad) > one_may_die:
                return "failed"
            return "wrong" if WRONG in codes else "ok"
        if bad and not one_may_die:
            failed_at = now if failed_at is None else failed_at
            if now - failed_at > GRACE_SECONDS:
                return "failed"
        if now - begin > limits.total:
            return "late"
        if time.time() - max(_last_written(watched), time.time() - (now - begin)) > limits.stall:
            return "stuck"
        time.sleep(LOOK_SECONDS)


def _last_written(places: Sequence[Path]) -> float:
    """When a file, or one in a folder, was last written."""
    found = [0.0]
    for place in places:
        for path in [place, *place.glob("*.csv")] if place.is_dir() else [place]:
            try:
                found.append(path.stat().st_mtime)
            except FileNotFoundError:
                continue  # being replaced
    return max(found)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with all that it started."""
    for process in processes:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(LOOK_SECONDS)
    for process in processes:
        if process.poll() is None:
            _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # nothing of its group is left


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-TAIL:] if log.exists() else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
