"""Whether this machine lets a process make hosts of network namespaces, and with which delay.

Contract: what is missing is found by trying it in a namespace that ends at once; the refusal has
the command that failed and the kernel's words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from scaling_runs.emulated.relay import TUN

TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/bin:/bin"
NETEM, RELAY = "netem", "relay"
_CABLE = "ip link add name trial0 type veth peer name trial1"
_TRIALS = (
    "ip link add name trial type bridge",
    _CABLE,
    f"{_CABLE} && tc qdisc add dev trial0 root tbf rate 1gbit burst 64kb latency 1s",
)
_NETEM_TRIAL = f"{_CABLE} && tc qdisc add dev trial0 root netem delay 1ms"
_TAP_TRIAL = "ip tuntap add dev trial mode tap"


class HostsRefused(RuntimeError):
    """This machine cannot emulate hosts; the message says what it refused, and what to do."""


@dataclass(frozen=True)
class Allowed:
    """unshare: the words that begin a namespace, `-U -r` among them without the right to make one
    directly. delay: "netem" or "relay". why_relay: what the kernel said to netem."""

    unshare: tuple[str, ...]
    delay: str
    why_relay: str = ""


def tool(name: str) -> str:
    """Path of a tool; the system's folders count although a user's PATH may not have them.

    Raises HostsRefused where it is not installed.
    """
    path = os.pathsep.join((os.environ.get("PATH", ""), SYSTEM_FOLDERS))
    found = shutil.which(name, path=path)
    if found is None:
        raise HostsRefused(
            f"the command {name} is not installed; on Debian and Ubuntu it comes with "
            f"`apt-get install {TOOLS[name]}`, which `./launch/setup.sh --extra dev` does for root"
        )
    return found


def look(delay: str = "auto") -> Allowed:
    """What can be done here. delay: "auto", or the one that is wanted.

    Raises HostsRefused with the commands that failed.
    """
    for name in TOOLS:
        tool(name)
    unshare = _way_in()
    for trial in _TRIALS:
        said = attempt(unshare, trial)
        if said is not None:
            raise HostsRefused(
                f"in a new network namespace `{trial}` fails: {said}. Hosts need virtual Ethernet, "
                "bridges and tbf in the kernel (VETH, BRIDGE, NET_SCH_TBF)"
            )
    no_netem = attempt(unshare, _NETEM_TRIAL)
    if no_netem is None and delay in ("auto", NETEM):
        return Allowed(unshare, NETEM)
    if delay == NETEM:
        raise HostsRefused(f"netem was asked for and fails: {no_netem}; --delay relay needs none")
    no_tap = attempt(unshare, _TAP_TRIAL)
    if no_tap is None:
        return Allowed(unshare, RELAY, no_netem or "")
    raise HostsRefused(
        f"no latency can be added: `{_NETEM_TRIAL}` fails ({no_netem}), and the relay needs {TUN}, "
        f"where `{_TAP_TRIAL}` fails ({no_tap})"
    )


def _way_in() -> tuple[str, ...]:
    """How a network namespace can be made: directly, or as root of a user namespace."""
    said = []
    for words in (("-n", "-u"), ("-U", "-r", "-n", "-u")):
        why = attempt(words, "ip link set lo up")
        if why is None:
            return words
        said.append(f"`unshare {' '.join(words)}` fails: {why}")
    raise HostsRefused(
        "no network namespace can be made here: " + "; ".join(said) + ". It takes root with "
        "CAP_NET_ADMIN and CAP_SYS_ADMIN, or user namespaces; in a container start it with "
        "--cap-add NET_ADMIN --cap-add SYS_ADMIN"
    )


def attempt(unshare: Sequence[str], command: str) -> str | None:
    """Run a shell command in a new namespace that ends with it: None, or what was said."""
    words = [tool("unshare"), *unshare, "--", "sh", "-c", command]
    path = os.pathsep.join((os.environ.get("PATH", ""), SYSTEM_FOLDERS))
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=30, env={**os.environ, "PATH": path}
    )
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().replace("\n", "; ")
    return said or f"exit status {done.returncode}"
