"""What a message costs over a link, and what composing costs on a device: measured or assumed.

The model is LogGP's: a message of n bytes arrives `alpha + n * beta` seconds after it was sent.
Measured links keep the seconds of the sizes that were measured and interpolate, because alpha and
beta of large messages are not those of small ones.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import inf

from flexla_dist.comm.topology import NETWORK, NVLINK, PCIE, SAME_PROCESS, SHARED_MEMORY

HOST, DEVICE = "host", "device"
ENGINES = (HOST, DEVICE)


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes: straight between the points, beyond them as in the nearest piece.

    points: at least two (bytes, seconds), bytes ascending.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or min(s for _, s in self.points) < 0:
            raise ValueError(
                f"points is {self.points}, expected two or more (bytes, seconds) with bytes "
                "ascending and seconds not negative"
            )

    @classmethod
    def line(cls, alpha: float, beta: float) -> Curve:
        """`alpha + bytes * beta`."""
        return cls(((0, alpha), (1 << 20, alpha + (1 << 20) * beta)))

    @property
    def alpha(self) -> float:
        """Seconds of an empty message."""
        return max(0.0, self.seconds(0))

    @property
    def beta(self) -> float:
        """Seconds of a further byte of a large message."""
        (size, time), (next_size, next_time) = self.points[-2:]
        return (next_time - time) / (next_size - size)

    def seconds(self, size: float) -> float:
        """Seconds of a message of `size` bytes."""
        sizes = [point for point, _ in self.points]
        at = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        (low, low_time), (high, high_time) = self.points[at - 1 : at + 1]
        return max(0.0, low_time + (size - low) * (high_time - low_time) / (high - low))

    def wire(self, size: float) -> float:
        """The part of `seconds` that grows with the size."""
        return max(0.0, self.seconds(size) - self.alpha)


@dataclass(frozen=True)
class Link:
    """What messages between neighbouring ranks cost with one engine.

    one: a message alone. both: while another one goes the other way; None: as alone.
    lanes: messages of a node that pass side by side without slowing each other.
    gap: seconds that each further message of one rank adds. panel_beta: seconds a byte of what one
    program of a kernel sends by itself, credit: its seconds to take the credit of a message, or to
    give it back (device engine; 0: not known). measured: whether this was measured here;
    source: when, or where the assumption is from.
    """

    one: Curve
    both: Curve | None = None
    lanes: float = inf
    gap: float = 0.0
    panel_beta: float = 0.0
    measured: bool = False
    source: str = ""
    credit: float = 0.0

    @property
    def alpha(self) -> float:
        """Seconds of an empty message."""
        return self.one.alpha

    @property
    def beta(self) -> float:
        """Seconds of a further byte of a large message."""
        return self.one.beta

    def wire(self, size: float, messages: float = 1) -> float:
        """Seconds beyond alpha of messages of `size` bytes, `messages` of them on a node."""
        if messages <= 1:
            return self.one.wire(size)
        curve = self.both or self.one
        return max(0.0, curve.seconds(size) - self.alpha) * max(1.0, messages / self.lanes)

    def seconds(self, size: float, messages: float = 1) -> float:
        """Seconds until the last of `messages` messages of one node has arrived."""
        return self.alpha + self.wire(size, messages)


@dataclass(frozen=True)
class Rates:
    """What applying and composing elements costs on a device.

    launch: seconds of one operation on nothing. stream: bytes a second that are read or written.
    flops: of products in float32 accuracy. programs: programs of a kernel that run at once. step:
    seconds of a program for a KiB that it copies in one step (device engine; 0: not known).
    """

    launch: float
    stream: float
    flops: float
    programs: int = 1
    measured: bool = False
    source: str = ""
    step: float = 0.0

    def seconds(self, touched: float, flops: float, launches: int = 1) -> float:
        """Seconds of `launches` operations that touch so many bytes and do so many FLOPs."""
        return launches * self.launch + touched / self.stream + flops / self.flops


_NCCL = "NCCL src/graph/tuning.cc, latency of a ring step and bandwidth of a channel"
_HERE = "this package on a virtual machine with 2 cores (scaling_runs/links.py)"
_HOPS = "one H200, virtual ranks in one launch: 1.4 to 3.8 us a hop of 4 to 32 KiB"
CREDIT = 1e-6  # a word of a GPU's own memory, looked at or set after a fence: as a hop of 4 KiB
STEP = 0.14e-6  # a load that hits the L2 cache: about 260 cycles of 1.8 GHz, H100 and A100 alike
_LAUNCH = "point-to-point calls launched by the host, 20 to 30 us each"
GIGA = 1e9


def _assumed(
    alpha: float,
    bandwidth: float,
    source: str,
    lanes: float = inf,
    gap: float = 0.0,
    panel: float = 0.0,
    credit: float = 0.0,
) -> Link:
    beta = 1 / bandwidth
    panel_beta = 1 / panel if panel else beta
    return Link(Curve.line(alpha, beta), None, lanes, gap, panel_beta, False, source, credit)


# Used where nothing was measured. NVLink 4: 450 GB/s a direction, of which about two thirds are
# reached; PCIe 4.0 x16: 31.5 GB/s raw; network: one port of 400 Gbit/s.
ASSUMED_LINKS: dict[tuple[str, str], Link] = {
    ("gloo", SAME_PROCESS): _assumed(130e-6, 3.5 * GIGA, _HERE, lanes=1, gap=40e-6),
    ("gloo", SHARED_MEMORY): _assumed(130e-6, 3.5 * GIGA, _HERE, lanes=1, gap=40e-6),
    ("gloo", NVLINK): _assumed(200e-6, 2 * GIGA, f"{_HERE}; copies to the host added", lanes=2),
    ("gloo", PCIE): _assumed(200e-6, 2 * GIGA, f"{_HERE}; copies to the host added", lanes=2),
    ("gloo", NETWORK): _assumed(120e-6, 1.1 * GIGA, "TCP over 10 Gbit/s Ethernet", 1, 40e-6),
    ("nccl", SAME_PROCESS): _assumed(25e-6, 300 * GIGA, _LAUNCH, lanes=1, gap=3.4e-6),
    ("nccl", SHARED_MEMORY): _assumed(30e-6, 10 * GIGA, _LAUNCH, lanes=2, gap=5.7e-6),
    ("nccl", NVLINK): _assumed(25e-6, 300 * GIGA, f"{_LAUNCH}; {_NCCL}", gap=3.4e-6),
    ("nccl", PCIE): _assumed(30e-6, 20 * GIGA, f"{_LAUNCH}; {_NCCL}", lanes=4, gap=5.7e-6),
    ("nccl", NETWORK): _assumed(40e-6, 45 * GIGA, f"{_LAUNCH}; {_NCCL}", gap=9.6e-6),
    (DEVICE, SAME_PROCESS): _assumed(1.1e-6, 1400 * GIGA, _HOPS, 1, 0.1e-6, 12 * GIGA, CREDIT),
    (DEVICE, SHARED_MEMORY): _assumed(20e-6, 5 * GIGA, "kernels in the interpreter", 1, 1e-6),
    (DEVICE, NVLINK): _assumed(4e-6, 300 * GIGA, _NCCL, inf, 0.2e-6, 18 * GIGA, CREDIT),
    (DEVICE, PCIE): _assumed(5.7e-6, 20 * GIGA, _NCCL, 4, 0.5e-6, 12 * GIGA, CREDIT),
    (DEVICE, NETWORK): _assumed(12e-6, 45 * GIGA, f"{_NCCL}; put and signal", gap=1e-6),
}

# Products in float32 accuracy: TF32x3, a third of the dense TF32 peak, at half of it reached.
# Peaks and bandwidths: vendors' data sheets.
ASSUMED_RATES: dict[str, Rates] = {
    "cpu": Rates(4e-6, 60e9, 60e9, 1, False, _HERE),
    "H200": Rates(5e-6, 4.2e12, 82e12, 132, False, "data sheet: 494 TF32 TFLOP/s, 4.8 TB/s", STEP),
    "H100": Rates(5e-6, 2.9e12, 82e12, 132, False, "data sheet: 494 TF32 TFLOP/s, 3.35 TB/s", STEP),
    "H20": Rates(5e-6, 3.5e12, 12e12, 78, False, "data sheet: 74 TF32 TFLOP/s, 4.0 TB/s", STEP),
    "A100": Rates(5e-6, 1.7e12, 26e12, 108, False, "data sheet: 156 TF32 TFLOP/s, 2.0 TB/s", STEP),
    "L20": Rates(5e-6, 0.75e12, 10e12, 92, False, "data sheet: 59.8 TF32 TFLOP/s, 864 GB/s", STEP),
}


def assumed_rates(device: str, device_name: str) -> Rates:
    """Rates of a device that was not measured; an unknown GPU counts as an A100."""
    if device == "cpu":
        return ASSUMED_RATES["cpu"]
    names = sorted((n for n in ASSUMED_RATES if n != "cpu"), key=len, reverse=True)
    known = next((n for n in names if n in device_name), "A100")
    return ASSUMED_RATES[known]
