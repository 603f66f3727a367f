#!/usr/bin/env python3
"""Hosts of network namespaces on this machine, and ranks on them as on a cluster.

    python scaling_runs/namespaces.py --hosts 2
    python scaling_runs/namespaces.py --hosts 4 --ranks-per-host 2 --rate 100mbit --latency-us 2000
    python scaling_runs/namespaces.py --hosts 4 -- python scaling_runs/links.py --results /tmp/here
    python scaling_runs/namespaces.py --check          what this machine allows

Each host is a network namespace with a name of its own, joined by a cable to a bridge. The rate of
its port is kept by tbf in both directions; latency is added by netem, or where the kernel has none
by a relay between two TAP devices. Every rank gets the variables of torchrun. Without a program the
ranks time our strategies and the baselines and compare their order, and up to the number of cores
their medians, with the model; rows go to scaling_runs/results/emulated_hosts_<gpu>.csv. The exit
status is 1 where they differ, 2 where this machine refuses.

It takes root, or user namespaces. Nothing is made outside of the new namespaces, and everything is
gone when the program ends, however it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling_runs.emulated.allowed import NETEM, RELAY, Allowed, HostsRefused, look, tool
from scaling_runs.emulated.network import Hosts
from scaling_runs.emulated.shape import Shape, rate_of

ROOT = Path(__file__).resolve().parents[1]
PORT = 29500  # free in a new namespace
MAPPED = "--mapped"
_LOOK_SECONDS = 0.1


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """(options, options of the ranks' own program, another program after `--`)."""
    words = list(words)
    program: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, program = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Other options go to the measurement, see python -m scaling_runs.emulated.ranks -h.",
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="default 2")
    add("--ranks-per-host", type=int, default=1, help="default 1")
    add("--rate", type=rate_of, default=2e8, help="of a host's port, default 200mbit")
    add("--latency-us", type=float, default=1000.0, help="from host to host, default 1000")
    add("--delay", choices=("auto", NETEM, RELAY), default="auto", help="what adds the latency")
    add("--limit", type=float, default=900.0, help="seconds for all ranks, default 900")
    add("--check", action="store_true", help="say what this machine allows, start nothing")
    add(MAPPED, action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(words)
    if program and rest:
        parser.error(f"{' '.join(rest)}: options of the program come after its name")
    return options, rest, program


def run(
    shape: Shape, allowed: Allowed, own: Sequence[str], program: Sequence[str], limit: float
) -> int:
    """Start the ranks, wait for them; the largest exit status."""
    words = list(program) or [
        *(sys.executable, "-m", "scaling_runs.emulated.ranks"),
        *("--rate", f"{shape.rate:g}", "--latency-us", f"{1e6 * shape.latency:g}"),
        *("--delay", allowed.delay, *own),
    ]
    with Hosts(shape, allowed) as hosts:
        ranks = [
            hosts.start(
                shape.host(rank),
                words,
                {"OMP_NUM_THREADS": "1", **shape.variables(rank, PORT)},
                cwd=ROOT,
            )
            for rank in range(shape.world)
        ]
        end = time.monotonic() + limit
        while True:
            found = [rank.poll() for rank in ranks]
            bad = [(number, status) for number, status in enumerate(found) if status]
            if bad and None in found:
                # The others wait for it: give them the time to say so, then end them all.
                time.sleep(2.0)
            if bad or None not in found:
                for number, status in bad:
                    print(f"rank {number} ended with status {status}", file=sys.stderr)
                return max((abs(status) for _, status in bad), default=0)
            if time.monotonic() > end:
                print(f"not done after {limit:g} seconds", file=sys.stderr)
                return 124
            time.sleep(_LOOK_SECONDS)


def main(words: Sequence[str] | None = None) -> int:
    """Look, build, run."""
    given = sys.argv[1:] if words is None else list(words)
    options, own, program = parse(given)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        rate, latency = options.rate, 1e-6 * options.latency_us
        shape = Shape(options.hosts, options.ranks_per_host, rate, latency)
        allowed = look(options.delay)
        if options.check:
            _say(allowed, options.mapped)
            return 0
        if "-U" in allowed.unshare:
            if options.mapped:
                raise HostsRefused("root of a new user namespace cannot make network namespaces")
            here = [sys.executable, str(Path(__file__).resolve()), MAPPED, *given]
            os.execv(tool("unshare"), ["unshare", "-U", "-r", "--", *here])
        _say(allowed, options.mapped)
        print(shape.words(), flush=True)
        return run(shape, allowed, own, program, options.limit)
    except (HostsRefused, ValueError) as why:
        print(f"namespaces.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("namespaces.py: interrupted; all hosts are gone", file=sys.stderr)
        return 130


def _say(allowed: Allowed, mapped: bool) -> None:
    """How hosts are made here, in a line."""
    mapped = mapped or "-U" in allowed.unshare
    rights = "of a user namespace" if mapped else "of this user"
    how = "netem" if allowed.delay == NETEM else f"a relay, because netem: {allowed.why_relay}"
    print(f"namespaces with the rights {rights}; rate by tbf, latency by {how}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
