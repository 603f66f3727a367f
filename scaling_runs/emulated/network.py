"""Network namespaces as hosts, joined by cables to a bridge in one more namespace.

Contract: nothing is made in the namespace of the caller, and namespaces have no names: they, their
devices and the bridge are gone when their last process ends. Every process started here ends with
the `with` block, and with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from scaling_runs.emulated.allowed import NETEM, Allowed, HostsRefused, tool
from scaling_runs.emulated.shape import FRAME_BYTES, Shape

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_QUEUE_SECONDS = 5.0  # of tbf: TCP shall wait and lose nothing
_QUEUE_FRAMES = 100_000
_PATIENCE = 5.0
RELAY_PROGRAM = Path(__file__).with_name("relay.py")


def shaping(device: str, shape: Shape) -> str:
    """The command that limits what leaves through a device."""
    limit = max(1 << 20, int(shape.rate / 8 * _QUEUE_SECONDS))
    return (
        f"tc qdisc add dev {device} root handle 1: tbf rate {shape.rate:.0f}bit "
        f"burst {shape.burst} limit {limit}"
    )


def delaying(device: str, shape: Shape) -> list[str]:
    """The commands that also delay it: netem first, tbf below it, as netem's manual has it. A path
    has two cables, and a cable delays on its host's end alone."""
    whole = f"{1e6 * shape.latency:.0f}us"
    below = shaping(device, shape).replace("root handle 1:", "parent 1:1 handle 10:")
    return [
        f"tc qdisc add dev {device} root handle 1: netem delay {whole} limit {_QUEUE_FRAMES}",
        below,
    ]


class Hosts:
    """Running hosts; a context manager."""

    def __init__(self, shape: Shape, allowed: Allowed) -> None:
        self.shape, self.allowed = shape, allowed
        self._running: list[subprocess.Popen[bytes]] = []
        self._hub: subprocess.Popen[bytes] | None = None
        self._hosts: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(
        self, host: int, words: Sequence[str], environment: Mapping[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host; it ends with the hosts at the latest."""
        inside = self._inside(self._hosts[host])
        return self._start([*inside, *words], env={**os.environ, **environment}, **streams)

    def close(self) -> None:
        """End what was started, latest first. The namespaces go with their processes."""
        for process in reversed(self._running):
            if process.poll() is None:
                process.terminate()
        for process in reversed(self._running):
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._running.clear()
        self._hosts.clear()
        self._hub = None

    # -- building -------------------------------------------------------------------------------

    def _build(self) -> None:
        self._hub = self._namespace("hub")
        self._hosts = [self._namespace(f"host{n}") for n in range(self.shape.hosts)]
        self._in(self._hub, "ip link add bridge0 type bridge stp_state 0 forward_delay 0")
        relayed = self.allowed.delay != NETEM
        if relayed:
            self._start_relay()
        for number, host in enumerate(self._hosts):
            if not relayed:
                self._in(self._hub, f"ip link add host{number} type veth peer name port{number}")
            self._in(
                self._hub,
                f"ip link set host{number} mtu {FRAME_BYTES} txqueuelen 10000",
                f"ip link set port{number} mtu {FRAME_BYTES} txqueuelen 10000 "
                "master bridge0 addrgenmode none",
                shaping(f"port{number}", self.shape),
                f"ip link set port{number} up",
                f"ip link set host{number} netns {host.pid}",
            )
            self._set_up_host(number, host, relayed)
        self._in(self._hub, "ip link set bridge0 addrgenmode none up")

    def _set_up_host(self, number: int, host: subprocess.Popen[bytes], relayed: bool) -> None:
        own = [shaping("eth0", self.shape)] if relayed else delaying("eth0", self.shape)
        self._in(
            host,
            f"hostname {self.shape.name(number)}",
            f"ip link set host{number} name eth0 addrgenmode none",
            f"ip address add {self.shape.address(number)}/24 dev eth0",
            *own,
            "ip link set lo up",
            "ip link set eth0 up",
            # A pause between two messages shall not send TCP back to its slow start: what is
            # emulated is a network for ranks, whose transports have none.
            "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle",
        )

    def _namespace(self, name: str) -> subprocess.Popen[bytes]:
        """A process in a new namespace, which is there once it has said its name."""
        words = [tool("unshare"), "-n", "-u", "--", "sh", "-c", f"echo {name}; exec cat"]
        process = self._start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._expect(process, name, "a network namespace cannot be made")
        return process

    def _start_relay(self) -> None:
        """The latency of a path is that of two cables."""
        assert self._hub is not None
        half = f"{0.5e6 * self.shape.latency:.10g}"
        words = [sys.executable, str(RELAY_PROGRAM), "--cables", str(self.shape.hosts)]
        process = self._start(
            [*self._inside(self._hub), *words, "--latency-us", half], stdout=subprocess.PIPE
        )
        self._expect(process, "ready", "the relay does not start")

    @staticmethod
    def _expect(process: subprocess.Popen[bytes], word: str, problem: str) -> None:
        stream: IO[bytes] | None = process.stdout
        said = b"" if stream is None else stream.readline()
        if said.decode().strip() != word:
            raise HostsRefused(f"{problem}: exit status {process.wait()}, see its message above")

    @staticmethod
    def _inside(holder: subprocess.Popen[bytes]) -> list[str]:
        return [tool("nsenter"), "-t", str(holder.pid), "-n", "-u", "--"]

    def _in(self, holder: subprocess.Popen[bytes], *commands: str) -> None:
        """Shell commands in a namespace. Raises HostsRefused with the first that fails."""
        path = os.pathsep.join((str(Path(tool("ip")).parent), os.environ.get("PATH", "")))
        for command in commands:
            done = subprocess.run(
                [*self._inside(holder), "sh", "-c", command],
                capture_output=True,
                text=True,
                timeout=30,
                env={**os.environ, "PATH": path},
            )
            if done.returncode:
                raise HostsRefused(f"`{command}` fails: {done.stderr.strip()}")

    def _start(self, words: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(list(words), preexec_fn=_end_with_parent, **how)
        self._running.append(process)
        return process


def _end_with_parent() -> None:
    """In a new process: be killed when the one that started it ends, even if that is killed."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
