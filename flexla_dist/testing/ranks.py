"""`run_ranks`: run a function on P real processes that form a `torch.distributed` world."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

from flexla_dist.testing.rank_server import Reply, Request

SERVER_START_SECONDS = 60.0
LOG_TAIL_CHARACTERS = 6000


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message holds the first failing rank's traceback."""


class RankError(NamedTuple):
    """How one rank failed: the exception's type name (`Died`, `TimedOut` included) and text."""

    type: str
    message: str


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str | None = "gloo",
    expect_errors: bool = False,
    preload: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` processes; results in rank order.

    `fn` is a module-level function; arguments and results are pickled by value (tensors too).
    Every process has one torch thread, torchrun's environment variables and, unless `backend` is
    None, an initialised default process group. The store lives in the calling process and so
    outlives every rank. Modules in `preload` are imported once, before the processes fork.

    When a rank raises or dies the others get one second, then are ended, and `RanksFailed` is
    raised with the first failing rank's traceback; after `timeout` seconds every rank that still
    runs writes its stack and is ended. `expect_errors=True` waits for all ranks and returns per
    rank a `RankError(type, message)`, or None for a rank that succeeded.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size is {world_size}, expected at least 1")
    limit = timedelta(seconds=timeout)
    store = _open_store(limit)
    folder = Path(tempfile.mkdtemp(prefix="flexla_ranks_"))
    try:
        request = Request(
            *_locate(fn),
            arguments=pickle.dumps(args),
            world_size=world_size,
            backend=backend,
            port=store.port,
            timeout=timeout,
            wait_for_all=expect_errors,
            folder=str(folder),
            sys_path=[entry or os.getcwd() for entry in sys.path],
            working_directory=os.getcwd(),
            environment=dict(environment or {}),
            preload=preload,
        )
        reply = _SERVERS.call(request)
        return _collect(request, reply, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        del store


def _open_store(limit: timedelta) -> Any:
    """A TCP store on an IPv4 socket of the loopback.

    The store's own socket is IPv6, on which it looks up the names of IPv4 peers in DNS: seconds,
    where no DNS server answers.
    """
    import torch.distributed as dist

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),
    )


def _locate(fn: Callable[..., Any]) -> tuple[str, str | None, str]:
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<lambda>")
    if module is None or "<" in qualname:
        raise ValueError(
            f"run_ranks: got {fn!r}, expected a function defined at the top of a module, because "
            "other processes find it by name; move it there and pass its data as arguments"
        )
    return module, getattr(sys.modules.get(module), "__file__", None), qualname


def _collect(request: Request, reply: Reply, folder: Path) -> list[Any]:
    if reply.error is not None:
        raise RanksFailed(f"the ranks could not be started:\n{reply.error}")
    outcomes = [_outcome(request, reply, folder, rank) for rank in range(request.world_size)]
    failed = [(rank, item) for rank, item in enumerate(outcomes) if item[0] == "error"]
    if request.wait_for_all:
        return [RankError(*item[1][:2]) if item[0] == "error" else None for item in outcomes]
    for rank in range(request.world_size):
        text = _log(folder, rank)
        if text.strip() and not failed:
            print(f"[rank {rank}] {text}", end="")
    if not failed:
        return [item[1] for item in outcomes]
    rank, (_, (kind, message, trace, _)) = min(failed, key=lambda entry: entry[1][1][3])
    others = ", ".join(f"rank {r}: {item[1][0]}" for r, item in failed if r != rank)
    parts = [
        f"rank {rank} of {request.world_size} failed: {kind}: {message}",
        trace,
        f"output of rank {rank}:\n{_log(folder, rank)}",
        f"then also {others}" if others else "no other rank failed",
    ]
    if reply.timed_out:
        stuck = [r for r, code in enumerate(reply.exit_codes) if code is None and r != rank]
        parts += [f"rank {r} was ended here:\n{_log(folder, r)}" for r in stuck]
    raise RanksFailed("\n".join(parts))


def _outcome(request: Request, reply: Reply, folder: Path, rank: int) -> tuple[str, Any]:
    for name in (f"rank{rank}.pkl", f"failed{rank}.pkl"):
        if (folder / name).exists():
            return pickle.loads((folder / name).read_bytes())
    code = reply.exit_codes[rank]
    if code is None:
        text = f"still running after the limit ({request.timeout:g} s, or 1 s after a failure)"
        return "error", ("TimedOut", text, "", float("inf"))
    text = f"signal {-code}" if code < 0 else f"exit code {code}"
    return "error", ("Died", text, "", 0.0)


def _log(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    return path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:] if path.exists() else ""


class _ServerHandle:
    """Starts the fork server at first use, and again after it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None

    def call(self, request: Request) -> Reply:
        """Send one request and wait for its answer, a little longer than its own limit."""
        with self._lock:
            if not self._alive():
                self._start()
            try:
                self._connection.send(request)
                if self._connection.poll(request.timeout + SERVER_START_SECONDS):
                    return self._connection.recv()
                text = "the rank server did not answer"
            except (EOFError, OSError) as error:
                text = f"the rank server was lost: {error!r}"
            self._end()
            raise RanksFailed(f"{text} while {request.module}.{request.qualname} ran")

    def _alive(self) -> bool:
        if self._owner != os.getpid() or self._process is None:
            return False
        return self._process.poll() is None

    def _start(self) -> None:
        here, there = Pipe(duplex=True)
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flexla_dist.testing.rank_server", str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        there.close()
        self._owner, self._connection = os.getpid(), here
        if not here.poll(SERVER_START_SECONDS) or here.recv() != "ready":
            self._end()
            raise RanksFailed("the rank server did not start")
        atexit.register(self._end)

    def _end(self) -> None:
        if self._process is None or self._owner != os.getpid():
            return
        process, self._process = self._process, None
        self._connection.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_SERVERS = _ServerHandle()
