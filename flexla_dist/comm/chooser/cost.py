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

Device engine. A state is k panels, each by one program, L of them at once (ranks that share a
device share its programs). A message of a panel has s bytes and comes after h = alpha + s
panel_beta. Before h the sender takes the slot's credit, and in the end its receiver gives it back,
q each: 2 q where messages wait for each other, but once in a chain, which takes credits before its
state is there. Either end of a message keeps a program busy for e = 1.5 q + s panel_beta / 2: a
credit, a flag, half of the bytes. A dense M goes with every panel of a head: it is brought to
scratch memory (o) and copied from there, step by step, with its state (m; a state alone: m_1), and
is read in the product that takes a state through it, a_1, or composes two, c_1. What begins the
line is entered by nothing: it is a state alone, so that whatever meets it has one product less, or
none. Elementwise M go while panels pass: o, m, m_1, a_1 and c_1 are zero, and s has M's share.
Time is the way of the first panel (fill) and the rest behind it at the pace of what is busiest
(drain): a link, or the programs of one rank, which take a wave of L panels after the other.
  chain         (P-N) h_i + (N-1) h_x + 2 q + (P-2) a_1
                link: wire(S, messages), one a hop on every node; programs: 2 e + a_1, P = 2: e
  log_scan      sum over rounds of the slower of h_i and h_x, each with 2 q, + o + (R-1) m + m_1
                + (R-1) a_1 + (R-2) c_1 composing + (R-1) a_1 folding what came
                The last round brings the state of what begins the line, the one before composes it.
                link: sum over rounds of wire(n, messages) as above; programs: (2R-1) e, as the rank
                that sends in all rounds receives in all but the last, o, copies, products but one
  hierarchical  R_i (h_i + 2 q + m + a_1 + c_1) + o + (N-1) h_x + h_i + 2 q + (N-2 + R_i) a_1
                links: R_i wire_i(n, messages) + wire_i(S), and wire_x(S, 1/w): states are striped
                by heads over w = min(r, ports) leaders; programs: a leader's messages and products
  all_gather    h + 2 (P-1) q + (P-2) max(gap, s panel_beta) + o + max((P-1) m_1, (P-2) m)
                + (P-2) a_1; a rank sends to those after it: links have r (r-1)/2 messages in a node
                programs: (P-1) e, and the larger of copies and products
On one device links are its memory: 2 bytes / stream for what is written and read, messages of what
begins the line counted without M. What only programs that are few can reach is in their waves.
Work that needs no entering state runs meanwhile. What is left of it is
  exposed = max(total - work, busy),
busy being what the exchange takes from the rank's own work: its FLOPs and bytes on a whole device.
The host engine blocks its caller, so exposed = total there. With LogGP (Alexandrov et al. 1995) for
messages, Hillis and Steele (1986) for the scan, ZeCO's All-Scan for the pipelined chain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    payload = setting.payload
    if engine == DEVICE:  # every panel of a head composes and carries the whole of a dense M
        payload = replace(
            payload,
            transition=round(payload.repeats * payload.transition),
            compose_flops=payload.repeats * payload.compose_flops,
        )
    counted = replace(setting, payload=payload)
    busy = busy_seconds(strategy, counted)
    total = parts.latency + parts.wire + parts.combine
    exposed = total if engine == HOST else max(total - setting.work, min(busy, total))
    sent = sent_bytes(strategy, counted)
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
