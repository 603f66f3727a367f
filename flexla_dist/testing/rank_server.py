"""Fork server behind `run_ranks`: imports torch once, then forks one process per rank.

Started by `flexla_dist.testing.ranks` as `python -m flexla_dist.testing.rank_server FD`. It never
runs tensor code itself, so that a fork costs milliseconds and copies no thread. It leaves when
the other end of its connection closes, and its children leave with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

POLL_SECONDS = 0.002
GRACE_SECONDS = 1.0
PARENT_DEATH_SIGNAL = 1  # prctl option PR_SET_PDEATHSIG


@dataclass
class Request:
    """One case: which function runs, on how many ranks, and for how long at most."""

    module: str
    file: str | None
    qualname: str
    arguments: bytes
    world_size: int
    backend: str | None
    port: int
    timeout: float
    wait_for_all: bool
    folder: str
    sys_path: list[str]
    working_directory: str
    environment: dict[str, str]
    preload: tuple[str, ...]


@dataclass
class Reply:
    """How each rank ended: its exit code (negative: a signal), None when it had to be stopped."""

    exit_codes: list[int | None] = field(default_factory=list)
    timed_out: bool = False
    error: str | None = None


def serve(connection: Connection) -> None:
    """Answer requests until the other end closes the connection."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        try:
            reply = _run_case(connection, request)
        except Exception:
            reply = Reply(error=traceback.format_exc())
        connection.send(reply)


def load_module(name: str, file: str | None) -> ModuleType:
    """Import `name`; one that only pytest or `python file.py` knows is loaded by its path."""
    if name != "__main__":
        loaded = sys.modules.get(name)
        if loaded is None:
            try:
                loaded = importlib.import_module(name)
            except ModuleNotFoundError:
                loaded = None
        if loaded is not None and (file is None or _same_file(loaded, file)):
            return loaded
    if file is None:
        raise ModuleNotFoundError(f"module {name!r} cannot be imported and has no file")
    alias = "__mp_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"module {name!r} cannot be loaded from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    if name == "__main__":
        sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


def _same_file(module: ModuleType, file: str) -> bool:
    own = getattr(module, "__file__", None)
    return own is not None and os.path.realpath(own) == os.path.realpath(file)


def _run_case(connection: Connection, request: Request) -> Reply:
    sys.path[:] = request.sys_path
    os.chdir(request.working_directory)
    for name in request.preload:
        importlib.import_module(name)
    load_module(request.module, request.file)
    pids: list[int] = []
    for rank in range(request.world_size):
        pid = os.fork()
        if pid == 0:
            _child(connection, request, rank)
        pids.append(pid)
    return _supervise(pids, request)


def _supervise(pids: list[int], request: Request) -> Reply:
    """Wait for every rank; after the first failure the others get a short grace, then end.

    A rank that wrote its result stays alive, its connections open, until all are done, so that
    what it sent last can still be received; then it is ended.
    """
    reply = Reply(exit_codes=[None] * len(pids))
    running, lingering = dict(enumerate(pids)), {}
    deadline = time.monotonic() + request.timeout
    while running and time.monotonic() < deadline:
        for rank, pid in list(running.items()):
            code = _exit_code(pid)
            if code is None and (Path(request.folder) / f"rank{rank}.pkl").exists():
                lingering[rank] = pid
                code = 0
            if code is None:
                continue
            del running[rank]
            reply.exit_codes[rank] = code
            if code != 0 and not request.wait_for_all:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    reply.timed_out = bool(running)
    _stop(running, lingering)
    return reply


def _exit_code(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return None if done == 0 else os.waitstatus_to_exitcode(status)


def _stop(running: dict[int, int], lingering: dict[int, int]) -> None:
    """Let the stuck ranks write where they are, then end them and those that wait for the end."""
    for pid in running.values():
        os.kill(pid, signal.SIGUSR1)
    if running:
        time.sleep(0.3)
    for pid in (*running.values(), *lingering.values()):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(connection: Connection, request: Request, rank: int) -> None:
    """Body of one rank; never returns."""
    code = 1
    try:
        connection.close()
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _redirect_output(Path(request.folder) / f"rank{rank}.log")
        outcome = _run_rank(request, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        if outcome[0] == "value":
            _write_outcome(Path(request.folder) / f"rank{rank}.pkl", outcome)
            while True:
                signal.pause()
        _write_outcome(Path(request.folder) / f"failed{rank}.pkl", outcome)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _run_rank(request: Request, rank: int) -> tuple[str, Any]:
    """("value", result) or ("error", (type name, message, traceback, time))."""
    try:
        _set_environment(request, rank)
        _initialise(request, rank)
        target: Any = load_module(request.module, request.file)
        for part in request.qualname.split("."):
            target = getattr(target, part)
        arguments = pickle.loads(request.arguments)
        value = target(rank, request.world_size, *arguments)
        _check_result(value)
        return "value", value
    except BaseException as error:
        text = traceback.format_exc()
        return "error", (type(error).__name__, str(error), text, time.monotonic())


def _set_environment(request: Request, rank: int) -> None:
    """The variables torchrun sets, so that programs that read them run unchanged."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request.world_size),
        LOCAL_WORLD_SIZE=str(request.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(request.environment)


def _initialise(request: Request, rank: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if request.backend is None:
        return
    limit = timedelta(seconds=request.timeout)
    store = dist.TCPStore("127.0.0.1", request.port, is_master=False, timeout=limit)
    dist.init_process_group(
        request.backend, store=store, rank=rank, world_size=request.world_size, timeout=limit
    )


def _check_result(value: Any) -> None:
    try:
        pickle.dumps(value)
    except Exception as error:
        raise TypeError(f"the result of the rank cannot be pickled: {error}") from error


def _write_outcome(path: Path, outcome: tuple[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(pickle.dumps(outcome))
    scratch.replace(path)


if __name__ == "__main__":
    # The pickled requests name this module by its import path.
    from flexla_dist.testing import rank_server

    rank_server.serve(Connection(int(sys.argv[1])))
