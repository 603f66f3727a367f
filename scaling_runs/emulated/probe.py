"""Whether an emulated network keeps its rate when all hosts send at once, by plain sockets."""

from __future__ import annotations

import socket
import statistics
import threading
import time

import torch
import torch.distributed as dist

from scaling_runs.emulated.shape import Shape

PORT = 29600
BYTES = 4 << 20
TURNS = 4
_PATIENCE = 60.0


def reached(shape: Shape, rank: int) -> float:
    """The share of the rate that the slowest stream gets while the first rank of every host sends
    to that of the next one, median of three; all ranks of the default group call it.

    A relay that does not keep up, or a busy machine, shows here before anything is measured.
    """
    leads = rank % shape.ranks == 0
    host = shape.host(rank)
    shares = []
    server = socket.create_server((shape.address(host), PORT)) if leads else None
    dist.barrier()
    if server is not None:
        with server, _connect(shape, host) as ahead:
            behind, _ = server.accept()
            with behind:
                shares = [_turn(ahead, behind, shape.rate) for _ in range(TURNS)]
    least = torch.tensor([statistics.median(shares[1:]) if shares else 1.0])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)


def _connect(shape: Shape, host: int) -> socket.socket:
    address = shape.address((host + 1) % shape.hosts)
    return socket.create_connection((address, PORT), timeout=_PATIENCE)


def _turn(ahead: socket.socket, behind: socket.socket, rate: float) -> float:
    """Send to the next host while the one before sends; the share of the rate that arrived."""
    sending = threading.Thread(target=ahead.sendall, args=(bytes(BYTES),))
    sending.start()
    got = len(_receive(behind, 1))
    begin = time.perf_counter()  # the first byte is here: the way of the others is the wire alone
    while got < BYTES:
        got += len(_receive(behind, min(1 << 20, BYTES - got)))
    seconds = time.perf_counter() - begin
    sending.join()
    return 8 * BYTES / rate / seconds


def _receive(stream: socket.socket, size: int) -> bytes:
    stream.settimeout(_PATIENCE)
    data = stream.recv(size)
    if not data:
        raise ConnectionError("the host before closed its end while the network was looked at")
    return data
