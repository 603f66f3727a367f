"""Predicted seconds of every strategy with both engines.

P ranks in nodes of r (the longest), N nodes, an element of n = S + M bytes, of which a chain moves
only S. A link costs `alpha + wire(bytes, messages)`, where messages of a node beyond the link's
lanes share it. `a` is the time to apply an element to a state, `c` to compose two. Index i: inside
a node, x: between nodes. Every formula is the way of the data to the rank that waits longest, the
last one; all ranks start together.

Host engine. A rank sends whole messages and waits for whole messages, so nothing overlaps. On CPUs
the products of ranks that compute at once share the cores: `a` and `c` grow by r / cores where all
ranks of a node compose, half as much in all_gather, where they have P/2 applications on average.
  chain         (P-N)(alpha_i + wire_i(S)) + (N-1)(alpha_x + wire_x(S)) + (P-2) a
                P - 1 hops; every rank between the ends applies its element once.
  log_scan      sum over rounds d = 1, 2, 4 .. < P of the slower of
                alpha_i + wire_i(n, r-d messages)  and  alpha_x + wire_x(n, min(d, r) messages),
                + (R-1) c + R a, R rounds
                In round d rank p sends to p + d: r - d of these stay in a node, min(d, r) leave it.
                The last rank composes nothing, but its last message was composed R - 1 times; in
                the end it takes a state through R elements.
  hierarchical  log_scan in nodes of r, its leader composing R_i times; then, if N > 1,
                (N-1)(alpha_x + wire_x(S)) + (N-2) a between leaders, and
                alpha_i + (r-1) wire_i(S) + (r-2) gap_i from the leader to its node; + R_i a
  all_gather    alpha + (P-2) gap + the larger of (r-1) wire_i(n), wire_i(n, r(r-1) messages) and
                wire_x(n, messages that leave a node), + (P-1) a
                Every rank gets P - 1 elements; r (P-r) leave a node, with NCCL's ring P - r. Where
                the gather itself was measured, its time takes the place of all but (P-1) a.

Device engine. A state is k panels of s = S/k bytes, each by one program, L of them at once; an
element is k n/S panels. A panel's hop is h = alpha + s panel_beta + its product a_1; what is
elementwise in composing happens while a panel passes through. Panels follow each other without
gaps, so the time is the way of the first panel (fill) and the rest behind it at the pace of what
is busiest (drain): a link, or the programs, which take one wave after the other.
  chain         (P-N) h_i + (N-1) h_x;  link: (k-1)/k wire(S, messages), one a hop on every node
  log_scan      sum over rounds of the slower of h_i and h_x, each with c_1 added but in the last;
                link: sum over rounds of wire(n, messages) as above
  hierarchical  R_i (h_i + c_1) + (N-1) h_x + h_i;  links: R_i wire_i(n, messages) + wire_i(S), and
                wire_x(S, 1/w): states are striped by heads over w = min(r, ports) leaders
  all_gather    h + (P-2) gap + (P-2) a_1;  links: as on the host, every rank sends to every rank
Work that needs no entering state runs meanwhile. What is left of it is
  exposed = max(total - work, busy),
busy being what the exchange takes from the rank's own work: its FLOPs and bytes on a whole device.
The host engine blocks its caller, so exposed = total there. With LogGP (Alexandrov et al. 1995) for
messages, Hillis and Steele (1986) for the scan, ZeCO's All-Scan for the pipelined chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexla_dist.comm.chooser import cost_device, cost_host
from flexla_dist.comm.chooser.links import DEVICE, HOST
from flexla_dist.comm.chooser.setting import Setting, rounds

STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one strategy with one engine.

    latency, wire, combine: the parts of `total`, the time to the last rank. busy: what the exchange
    takes from the rank's own work. exposed: what is left beyond the overlappable work. sent: bytes
    that one rank sends at most.
    """

    strategy: str
    engine: str
    latency: float
    wire: float
    combine: float
    busy: float
    exposed: float
    sent: int

    @property
    def total(self) -> float:
        """Seconds from the start of all ranks to the last one's entering state."""
        return self.latency + self.wire + self.combine


def estimate(strategy: str, engine: str, setting: Setting) -> Estimate:
    """The estimate of one strategy; see the module's text for the formulas.

    ValueError: no such strategy or engine.
    """
    tables = {HOST: cost_host.PARTS, DEVICE: cost_device.PARTS}
    if engine not in tables or strategy not in STRATEGIES:
        raise ValueError(
            f"no estimate for strategy {strategy!r} with engine {engine!r}, expected one of "
            f"{', '.join(STRATEGIES)} with one of {', '.join(tables)}"
        )
    if setting.topology.size == 1:
        return Estimate(strategy, engine, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    parts = tables[engine][strategy](setting)
    busy = busy_seconds(strategy, setting)
    total = parts.latency + parts.wire + parts.combine
    exposed = total if engine == HOST else max(total - setting.work, min(busy, total))
    sent = sent_bytes(strategy, setting)
    return Estimate(strategy, engine, parts.latency, parts.wire, parts.combine, busy, exposed, sent)


def busy_seconds(strategy: str, setting: Setting) -> float:
    """Seconds of the whole device that the exchange costs the rank that composes most."""
    payload, rates, place = setting.payload, setting.rates, setting.topology
    apply = payload.apply_bytes / rates.stream + payload.apply_flops / rates.flops
    compose = payload.compose_bytes / rates.stream + payload.compose_flops / rates.flops
    if strategy == "chain":
        return apply
    if strategy == "all_gather":
        return (place.size - 1) * apply
    doublings = rounds(place.size if strategy == "log_scan" else place.longest)
    led = 1 if strategy == "hierarchical" and place.nodes > 1 else 0
    return doublings * (2 * apply + compose) + led * apply


def sent_bytes(strategy: str, setting: Setting) -> int:
    """Bytes that the rank which sends most sends."""
    payload, place = setting.payload, setting.topology
    if strategy == "chain":
        return payload.state
    if strategy == "all_gather":
        return (place.size - 1) * payload.element
    if strategy == "log_scan":
        return rounds(place.size) * payload.element
    told = place.longest * payload.state if place.nodes > 1 else 0
    return rounds(place.longest) * payload.element + told
