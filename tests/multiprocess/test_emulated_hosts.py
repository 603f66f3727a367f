"""Hosts of network namespaces, made and taken away again, where this machine allows them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scaling_runs.emulated.allowed import SYSTEM_FOLDERS, HostsRefused, look  # noqa: E402
from scaling_runs.model.emulated import EmulatedRows  # noqa: E402

PROGRAM = [sys.executable, str(ROOT / "scaling_runs" / "namespaces.py")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PATH = f"{os.environ['PATH']}:{SYSTEM_FOLDERS}"

# A rank that says where it is, and how long a byte takes to the first host and back.
PING = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], 5000)
if rank == 0:
    with socket.create_server(address) as server:
        for _ in range(size - 1):
            other, _ = server.accept()
            for _ in range(5):
                other.sendall(other.recv(1))
            other.recv(1)
else:
    for _ in range(100):
        try:
            stream = socket.create_connection(address, 5)
            break
        except OSError:
            time.sleep(0.1)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        stream.sendall(b"x")
        stream.recv(1)
        times.append(time.perf_counter() - begin)
    os.write(1, f"{socket.gethostname()} {rank} {1e3 * min(times):.3f}\\n".encode())
    stream.close()
"""


@pytest.fixture(scope="module", autouse=True)
def allowed_here() -> None:
    try:
        look()
    except HostsRefused as why:
        pytest.skip(str(why))


def start(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *words], capture_output=True, text=True, timeout=200, env=ENVIRONMENT, cwd=ROOT
    )


def devices() -> str:
    """The network devices of this namespace."""
    names = subprocess.run(
        ["ip", "-br", "link"], env={"PATH": PATH}, capture_output=True, text=True
    )
    return names.stdout


def test_hosts_are_apart_by_the_latency() -> None:
    before = devices()
    words = ["--hosts", "3", "--latency-us", "20000"]
    done = start(*words, "--", sys.executable, "-c", PING)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("host"))
    assert [line[:2] for line in lines] == [
        ["host1-200mbit-20000us-3x1", "1"],
        ["host2-200mbit-20000us-3x1", "2"],
    ]
    assert all(float(line[2]) >= 40 for line in lines)
    assert devices() == before


def test_a_rank_that_fails_ends_all() -> None:
    rank = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    begin = time.monotonic()
    done = start("--", sys.executable, "-c", rank)
    assert done.returncode == 7 and "rank 1 ended with status 7" in done.stderr
    assert time.monotonic() - begin < 60
    late = start("--limit", "1", "--", sys.executable, "-c", "import time; time.sleep(600)")
    assert late.returncode == 124 and "not done after 1 seconds" in late.stderr


def running(mark: str) -> list[str]:
    """Command lines of processes with this word in them, or with the hosts' relay."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(how: signal.Signals) -> None:
    """Ranks, relay and holders of namespaces are gone, and with them the namespaces."""
    mark = f"mark_{uuid.uuid4().hex}"
    rank = f"import os, time; os.write(1, b'there\\n'); time.sleep(600)  # {mark}"
    latency = 3000 + 2 * random.randrange(1000000)  # tells this relay from others
    relay = f"--cables 2 --latency-us {latency // 2}"
    process = subprocess.Popen(
        [*PROGRAM, "--latency-us", str(latency), "--", sys.executable, "-c", rank],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert any("there" in line for line in iter(process.stdout.readline, ""))
    own = [line for line in running(mark) if "namespaces.py" not in line]
    assert len(own) >= 1 and (not look().why_relay or running(relay))
    process.send_signal(how)
    process.communicate(timeout=60)
    end = time.monotonic() + 20
    while (running(mark) or running(relay)) and time.monotonic() < end:
        time.sleep(0.1)
    assert running(mark) == [] and running(relay) == []
    if how is signal.SIGINT:
        assert process.returncode == 130


def test_the_kernels_refusal_is_told() -> None:
    """A user namespace that may hold no network namespaces, as of a container without the right."""
    inside = f"echo 0 > /proc/sys/user/max_net_namespaces && exec {' '.join(PROGRAM)} --hosts 2"
    done = subprocess.run(
        ["unshare", "-U", "-r", "--", "sh", "-c", inside],
        capture_output=True, text=True, timeout=100, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip
    if "max_net_namespaces" in done.stderr or "unshare: unshare failed: Op" in done.stderr[:40]:
        pytest.skip(f"no user namespace with limits can be made here: {done.stderr}")
    assert done.returncode == 2
    assert "no network namespace can be made here: `unshare -n -u` fails" in done.stderr
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_user_namespaces_are_enough() -> None:
    """Without the right to make network namespaces, as the root of a user namespace."""
    rank = "import os, socket; os.write(1, f'on {socket.gethostname()}\\n'.encode())"
    words = [*PROGRAM, "--", sys.executable, "-c", rank]
    if os.geteuid() == 0:
        words = ["setpriv", "--bounding-set=-net_admin,-sys_admin", *words]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=100, env=ENVIRONMENT, cwd=ROOT
    )
    if "no network namespace can be made" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with the rights of a user namespace" in done.stdout
    assert "on host0-" in done.stdout and "on host1-" in done.stdout


def test_systems_are_measured_and_compared(tmp_path: Path) -> None:
    words = ["--systems", "chain,ulysses,ideal_best", "--seconds", "0.05", "--heads", "2"]
    words += ["--width", "16", "--tokens", "16", "--rate", "500mbit", "--latency-us", "500"]
    done = start(*words, "--results", str(tmp_path))
    if "of its rate when all hosts send at once" in done.stderr:
        pytest.skip("this machine is too busy: an emulated network does not keep its rate")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "pairs of systems in the measured order on emulated hosts" in done.stdout
    store = EmulatedRows.of(tmp_path, "cpu")
    rows = store.systems.rows()
    assert [(r["system"], r["direction"]) for r in rows] == [
        (s, d) for d in ("fwd", "fwdbwd") for s in ("chain", "ulysses", "ideal_best")
    ]
    assert all(r["hosts"] == "2" and float(r["median_ms"]) >= 20 for r in rows)
    assert all(float(r["rel_err"]) < 1e-9 for r in rows if r["system"] != "ideal_best")
    assert {link["where"] for link in store.links.rows()} == {"between"}
    assert all(float(link["alpha_us"]) > 100 for link in store.links.rows())
