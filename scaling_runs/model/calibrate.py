"""Links and kernel times of the machine at hand, measured by ranks that run beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flexla_dist.comm import Element, StateElement, StateExchanger, Tag, apply, combine, zero_state
from flexla_dist.comm.links import all_gather_flat
from scaling_runs.baselines.shard import Sharding, executor_of
from scaling_runs.baselines.ulysses import exchange_heads
from scaling_runs.model.workload import KERNEL_COLUMNS, KERNEL_KEY
from scaling_runs.rows import RowStore
from scaling_runs.weak_cases import compiled, example_element, inputs_of
from scaling_runs.weak_grid import Grid, Point
from scaling_runs.weak_rows import Provenance, measured_times
from scaling_runs.weak_time import Clock, Times

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23)
LINK_COLUMNS = (
    *("kind", "date", "commit", "gpu", "torch", "triton", "host", "cores", "world", "backend"),
    *("alpha_us", "gigabytes", "worst_error", "samples_us"),
)
LINK_KEY = ("gpu", "host", "world", "backend", "kind")
Call = Callable[[], object]


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """(alpha, bandwidth, largest relative error) of t = alpha + n / bandwidth with the least sum of
    squared relative errors; alpha and 1 / bandwidth are not negative."""
    rows = [(1.0 / t, n / t) for n, t in zip(sizes, seconds, strict=True)]
    aa, ab = sum(a * a for a, _ in rows), sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    ya, yb = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    alpha = (ya * bb - yb * ab) / determinant
    slope = (yb * aa - ya * ab) / determinant
    if alpha < 0:
        alpha, slope = 0.0, yb / bb
    if slope <= 0:
        alpha, slope = ya / aa, 1e-15
    worst = max(abs((alpha + slope * n) / t - 1) for n, t in zip(sizes, seconds, strict=True))
    return alpha, 1.0 / slope, worst


class Links:
    """One-way times between the first two ranks of a group (None: all), and steps of collectives
    of all its ranks; every one of them takes part."""

    def __init__(self, device: torch.device, seconds: float, group: Any = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.device, self.seconds = device, seconds
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        assert self.group is not None
        self.ranks = dist.get_process_group_ranks(self.group)
        self.clock = Clock(self.group, device)
        self.exchanger = StateExchanger(self.group, "chain")

    def measure(self) -> dict[str, list[float]]:
        """Seconds by kind for each of SIZES."""
        makers = {
            "message": (self._messages, 2),
            "p2p": (self._ping_pong, 2),
            "gather": (self._gather, self.size - 1),
            "all_to_all": (self._all_to_all, self.size - 1),
        }
        found: dict[str, list[float]] = {kind: [] for kind in makers}
        for size in SIZES:
            for kind, (make, parts) in makers.items():
                samples = self.clock.barrier_samples(make(size), self.seconds)
                found[kind].append(1e-3 * Times.of(samples).median_ms / parts)
        return found

    def _messages(self, size: int) -> Call:
        """A state there by `prefix` and back by `suffix`."""
        local = torch.zeros(1, 1, size // 4, device=self.device)
        element = Element((StateElement(local),))
        template, crossing = zero_state(element), (True,) + (False,) * (self.size - 2)

        def there_and_back() -> None:
            self.exchanger.prefix(element, crossing, Tag(), template)
            self.exchanger.suffix(element, crossing, Tag(direction="backward"), template)

        return there_and_back

    def _ping_pong(self, size: int) -> Call:
        buffer = torch.zeros(size // 4, device=self.device)

        def there_and_back() -> None:
            if self.rank == 0:
                dist.send(buffer, self.ranks[1], self.group)
                dist.recv(buffer, self.ranks[1], self.group)
            elif self.rank == 1:
                dist.recv(buffer, self.ranks[0], self.group)
                dist.send(buffer, self.ranks[0], self.group)

        return there_and_back

    def _gather(self, size: int) -> Call:
        own = torch.zeros(size // 4, device=self.device)
        whole = own.new_empty(self.size * own.numel())
        assert self.group is not None
        return lambda: all_gather_flat(whole, own, self.group).wait()  # type: ignore[arg-type]

    def _all_to_all(self, size: int) -> Call:
        """Each of the P - 1 steps moves `size` bytes of three tensors; with their packing, and the
        copies by which an operator reads what comes in another order."""
        width = 16
        tokens = max(1, size // (3 * 4 * width))
        sharding = Sharding.of(self.group, (tokens,) * self.size)
        tensors = [torch.zeros(1, tokens, self.size, width, device=self.device) for _ in range(3)]
        return lambda: [x.contiguous() for x in exchange_heads(sharding, tensors)]


def phase_calls(point: Point, device: torch.device) -> dict[str, Call]:
    """The local parts of a call, one by one."""
    op = compiled(point.variant)
    given = inputs_of(point, point.T, device, 1 + dist.get_rank())
    inputs = {n: x.detach() for n, x in given.inputs.items()}
    params = {n: x.detach() for n, x in given.params.items()}
    problem = op.bind(inputs, params, given.scalars)
    executor = executor_of(op, [*inputs.values(), *params.values()])
    zero = problem.zero_state()
    ran = executor.forward(problem, zero)
    seed = torch.randn_like(ran.output)
    element = example_element(op, given)
    state = zero_state(element)
    return {
        "summary": lambda: executor.summary(problem, -1),
        "forward": lambda: executor.forward(problem, zero),
        "adjoint": lambda: executor.adjoint_summary(problem, ran.saved, zero, seed, -1),
        "backward": lambda: executor.backward(problem, ran.saved, zero, seed, zero),
        "apply": lambda: apply(element, state),
        "combine": lambda: combine(element, element),
    }


def measure_links(
    provenance: Provenance, device: torch.device, seconds: float, folder: Path, say: Callable
) -> None:
    """Measure the links between the ranks of the world; rows go to the links file."""
    steps = Links(device, seconds).measure()
    if dist.get_rank() != 0:
        return
    shared = provenance.columns(provenance.world)
    path = folder / f"links_{provenance.machine.slug}.csv"
    store = RowStore(path, LINK_COLUMNS, LINK_KEY)
    for kind, times in steps.items():
        row = {name: shared[name] for name in LINK_COLUMNS if name in shared}
        kept = store.put(row | {"kind": kind} | link_columns(times))
        say(f"{kind}: {kept['alpha_us']} us + n / {kept['gigabytes']} GB/s")


def fit_some(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """As `fit`, for times that are no straight line: alpha is the time of the smallest message, the
    bandwidth that between the third largest and the second largest, which are as large as the
    messages of the calls; the largest is beyond them."""
    alpha = seconds[0]
    bandwidth = (sizes[-2] - sizes[-3]) / max(1e-9, seconds[-2] - seconds[-3])
    pairs = zip(sizes, seconds, strict=True)
    return alpha, bandwidth, max(abs((alpha + n / bandwidth) / t - 1) for n, t in pairs)


def link_columns(times: Sequence[float], some: bool = False) -> dict[str, object]:
    """Seconds for each of SIZES as the columns of a link; some: by `fit_some`."""
    alpha, bandwidth, worst = (fit_some if some else fit)(SIZES, times)
    return {
        "alpha_us": f"{1e6 * alpha:.2f}",
        "gigabytes": f"{1e-9 * bandwidth:.4f}",
        "worst_error": f"{worst:.2f}",
        "samples_us": " ".join(f"{1e6 * t:.1f}" for t in times),
    }


class PhaseTimes:
    """Times of the local parts of calls, collected over rounds and kept in the kernels file.

    The ranks of a group compute beside each other, as they do in the systems that are modelled.
    """

    def __init__(self, provenance: Provenance, device: torch.device, folder: Path) -> None:
        self.provenance, self.device, self.folder = provenance, device, folder
        self._samples: dict[tuple, dict[str, list[float]]] = {}

    def sample(self, point: Point, group: Any, seconds: float) -> None:
        """One round of a point's call on the ranks of a group."""
        calls, clock = phase_calls(point, self.device), Clock(group, self.device)
        known = self._samples.setdefault(self._key(point), {phase: [] for phase in calls})
        for phase, call in calls.items():
            known[phase] += clock.barrier_samples(call, seconds / len(calls))

    def keep(self, point: Point) -> dict[str, Times]:
        """Write the rows of a point's call and return its times."""
        shared = self.provenance.columns(point.P)
        found = {p: Times.of(s) for p, s in self._samples[self._key(point)].items()}
        path = self.folder / f"kernels_{self.provenance.machine.slug}.csv"
        store = RowStore(path, KERNEL_COLUMNS, KERNEL_KEY)
        for phase, times in found.items():
            row = {name: shared[name] for name in KERNEL_COLUMNS if name in shared}
            row |= {n: v for n, v in vars(point).items() if n in KERNEL_COLUMNS}
            columns = measured_times(times)
            row |= {n: columns[n] for n in ("median_ms", "p20_ms", "p80_ms")}
            store.put({**row, "world": point.P, "phase": phase})
        return found

    def _key(self, point: Point) -> tuple:
        return (point.P, point.variant, point.T, point.B, point.H, point.K, point.V, point.dtype)


def calibrate(
    grid: Grid, provenance: Provenance, device: torch.device, folder: Path, say: Callable
) -> None:
    """Measure links, and the kernels of all calls of the grid on all ranks beside each other."""
    if provenance.world > 1:
        measure_links(provenance, device, grid.seconds / 4, folder, say)
    phases = PhaseTimes(provenance, device, folder)
    for point in calls_of(grid):
        here = replace(point, P=provenance.world)
        for _ in range(grid.rounds):
            phases.sample(here, dist.group.WORLD, grid.seconds)
        if dist.get_rank() == 0:
            for phase, times in phases.keep(here).items():
                say(f"{here.variant} {here.B}x{here.H} T={here.T} {phase}: {times}")


def calls_of(grid: Grid) -> list[Point]:
    """One point for each variant, shape and T of weak scaling."""
    found: dict[tuple, Point] = {}
    for point in grid.points():
        if point.mode == "weak":
            key = (point.variant, point.T, point.B, point.H, point.K, point.V)
            found.setdefault(key, point)
    return list(found.values())


def read_links(folder: Path, slug: str) -> list[dict[str, str]]:
    """Rows of the links file; empty where there are none."""
    path = folder / f"links_{slug}.csv"
    if not path.is_file():
        return []
    return RowStore(path, LINK_COLUMNS, LINK_KEY).rows()


def read_kernels(folder: Path, slug: str) -> list[dict[str, str]]:
    """Rows of the kernels file; empty where there are none."""
    path = folder / f"kernels_{slug}.csv"
    if not path.is_file():
        return []
    return RowStore(path, KERNEL_COLUMNS, KERNEL_KEY).rows()
