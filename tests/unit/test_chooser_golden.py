"""The decisions of the cost model over a grid, read and accepted by hand.

`pytest --accept-golden tests/unit/test_chooser_golden.py` writes the table anew; read its diff. Why
the rows are as they are, and what would be wrong otherwise:

* One node with NVLink. A chain of 8 makes 7 hops of about 5 us; recursive doubling makes 3 rounds
  of about 7, as each waits for credits, and whole elements travel. With 0.5 MiB latency decides:
  log_scan. With 2 MiB and more every link carries the element three times, in a chain the state
  once: chain. With a dense M it is a chain from 0.5 MiB on: doublings copy M with every panel of a
  head, 13 us each time, and compose it; a chain never sends it. On one H200 this was measured: 66
  us for a chain of 8 with one head, 95 us for log_scan; with 32 heads 115 and 379 us.
* PCIe. A byte costs 15 times as much and the ranks of a node share the way, so sending the state
  once wins from 0.5 MiB on, on one node. On several nodes the three rounds inside them cost
  hierarchical more than the latencies of a chain as soon as a state has some MiB.
* Several nodes with NVLink. A chain of 32 makes 28 NVLink hops, one after the other; hierarchical
  makes 3 rounds in their place and stripes the 3 network hops over the ports of a node. At P = 128
  these are 15 network hops of 12 us: 0.5 MiB is cheaper by 7 rounds of log_scan, 2 MiB and more is
  not, because log_scan sends a whole element over one port of each rank in every round. Nor is a
  dense M, which 7 rounds copy and compose. 32 MiB with a dense M on 32 ranks is a chain: 8 panels
  for every program, each copied and composed in 3 rounds.
* EFA differs from InfiniBand by latency: more network hops to avoid, so log_scan also with full M.
* H20 against H200: 7 times slower products, of which a chain makes P - 2 one after the other. Four
  of M with a state and one of M with M are what 3 rounds make, as long as the 6 of a chain of 8, so
  that it stays a chain; hierarchical gives way to one where there are more panels than programs.
* 5 ms of work hide all exchanges of the device engine but a chain of 128 on PCIe. What remains is
  what composing takes from the work itself, least for a chain: every row with work is a chain.
* The host engine starts its messages from the host, 25 us or more each, and pipelines nothing, so
  hops cost more than bytes: doublings where the device engine has a chain. all_gather with 8 ranks
  and small states, as NCCL does it in one launch, and where 32 MiB would leave a node by one port.
  Over TCP every hop of a chain carries the whole state: doublings, inside nodes where few ranks
  share the network, everywhere else over all.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from flexla_dist.comm.chooser.choose import Choice, choose, engines_of
from flexla_dist.comm.chooser.links import DEVICE, HOST
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.presets import described_settings, get_preset

GOLDEN = Path(__file__).parent / "golden" / "chooser.txt"
CLUSTERS = ("h200-nvlink-8", "h20-ib400", "l20-pcie", "efa", "cpu")
RANKS = (8, 32, 128)
HEADS = {0.5: 8, 2.0: 32, 8.0: 128, 32.0: 512}  # MiB of state: batch x heads of 128 x 128
KINDS = ("none", "scalar", "rows", "full", "dense")
WORK = 5e-3


def decide(
    cluster: str, ranks: int, mib: float, kind: str, engine: str = DEVICE, work: float = 0.0
) -> Choice:
    """The choice for one place of the grid."""
    preset = get_preset(cluster)
    topology = preset.topology(ranks)
    payload = Payload.of_heads(kind, HEADS[mib])
    used = engine if engine in engines_of(topology) else HOST
    return choose(described_settings(preset, topology, payload, work), engine=used)


def table() -> str:
    """The grid as text: strategy and milliseconds, for both engines and beside work."""
    lines = []
    for cluster in CLUSTERS:
        lines.append(f"{cluster}: {get_preset(cluster).about}")
        head = f"{'ranks':>5} {'MiB':>5} {'M':<7}{'device':<22}{'host':<22}device beside 5 ms"
        lines.append(head)
        for ranks in RANKS:
            for mib in HEADS:
                lines += [_line(cluster, ranks, mib, kind) for kind in KINDS]
        lines.append("")
    return "\n".join(lines)


def _line(cluster: str, ranks: int, mib: float, kind: str) -> str:
    device = decide(cluster, ranks, mib, kind)
    host = decide(cluster, ranks, mib, kind, HOST)
    hidden = decide(cluster, ranks, mib, kind, DEVICE, WORK)
    cells = [
        f"{c.strategy} {c.seconds * 1e3:.3f}" if c.engine == engine else "-"
        for c, engine in ((device, DEVICE), (host, HOST), (hidden, DEVICE))
    ]
    line = f"{ranks:>5} {mib:>5g} {kind:<7}{cells[0]:<22}{cells[1]:<22}{cells[2]}"
    return line.rstrip()


def test_golden_table(request: pytest.FixtureRequest) -> None:
    """What is decided is what was read and accepted."""
    text = table()
    if request.config.getoption("--accept-golden"):
        GOLDEN.write_text(text)
    accepted = GOLDEN.read_text() if GOLDEN.exists() else ""
    changes = difflib.unified_diff(
        accepted.splitlines(), text.splitlines(), str(GOLDEN), "decided", lineterm="", n=1
    )
    shown = "\n".join(list(changes)[:60])
    assert text == accepted, (
        f"decisions changed; read them, then run pytest --accept-golden {__file__}\n{shown}"
    )


@pytest.mark.parametrize(
    ("cluster", "ranks", "mib", "kind", "expected"),
    [
        ("h200-nvlink-8", 8, 0.5, "scalar", "log_scan"),
        ("h200-nvlink-8", 8, 8.0, "scalar", "chain"),
        ("h200-nvlink-8", 32, 8.0, "scalar", "hierarchical"),
        ("h200-nvlink-8", 128, 0.5, "scalar", "log_scan"),
        ("h200-nvlink-8", 128, 8.0, "dense", "hierarchical"),
        ("l20-pcie", 8, 0.5, "scalar", "chain"),
        ("l20-pcie", 32, 8.0, "scalar", "chain"),
    ],
)
def test_size_ranks_and_links_decide(
    cluster: str, ranks: int, mib: float, kind: str, expected: str
) -> None:
    """Few heads against many, 8, 32 and 128 ranks, NVLink against PCIe against several nodes."""
    assert decide(cluster, ranks, mib, kind).strategy == expected


def test_decisions_are_far_from_the_worst() -> None:
    """Of all candidates on the grid the chosen one is never more than 5 percent or 1 us behind."""
    for cluster in CLUSTERS:
        for ranks in RANKS:
            for mib in HEADS:
                choice = decide(cluster, ranks, mib, "dense")
                rivals = [e.exposed for e in choice.table if e.engine == choice.engine]
                assert choice.seconds <= max(1.05 * min(rivals), min(rivals) + 1e-6)
