"""One call as the model sees it: bytes, and times of its local parts from measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import make_inputs
from scaling_runs.baselines.formulas import sizes_of
from scaling_runs.model.clusters import ModelProblem
from scaling_runs.weak_grid import Point

PHASES = ("summary", "forward", "adjoint", "backward", "apply", "combine")
KERNEL_COLUMNS = (
    *("kind", "date", "commit", "gpu", "torch", "triton", "host", "cores", "world"),
    *("variant", "B", "T", "H", "K", "V", "dtype", "phase", "median_ms", "p20_ms", "p80_ms"),
)
KERNEL_KEY = ("gpu", "host", "world", "variant", "B", "T", "H", "K", "V", "dtype", "phase")


@dataclass(frozen=True)
class Bytes:
    """S, n, and bytes of a token's inputs and output."""

    state: int
    element: int
    token_in: int
    token_out: int


@dataclass(frozen=True)
class Kernels:
    """Seconds of the local parts of a call on one rank. apply: an element on a state; combine: two
    elements."""

    summary: float
    forward: float
    adjoint: float
    backward: float
    apply: float
    combine: float

    def scaled(self, factor: float) -> Kernels:
        """All times by a factor."""
        return Kernels(**{name: factor * value for name, value in vars(self).items()})


def nearest_world(rows: Sequence[Mapping[str, str]], world: int) -> list[Mapping[str, str]]:
    """The rows measured on the number of ranks nearest to `world`."""
    worlds = {int(row["world"]) for row in rows}
    if not worlds:
        return []
    chosen = min(worlds, key=lambda n: (abs(n - world), n))
    return [row for row in rows if int(row["world"]) == chosen]


@dataclass(frozen=True)
class Workload:
    """A call on `ranks` ranks. panels: units of signalling; groups: of heads, each of which is
    exchanged once all its summaries are there, as the device engine does, and awaited as a whole.
    """

    ranks: int
    tokens: int
    bytes: Bytes
    kernels: Kernels
    panels: int
    groups: int = 1

    def exchange_alone(self) -> Workload:
        """The call without local work: only elements are applied and composed."""
        silent = dict.fromkeys(("summary", "forward", "adjoint", "backward"), 0.0)
        return replace(self, kernels=replace(self.kernels, **silent))

    def group(self, panel: int) -> int:
        """The group of a panel."""
        return panel * self.groups // self.panels


def bytes_of(variant: str, B: int, H: int, K: int, V: int, dtype: str) -> Bytes:
    """Sizes of a call, from one token of its inputs on the CPU."""
    heads = 1 if variant == "hgrn" else H
    spec = get_variant(variant)
    given = make_inputs(
        spec,
        batch=B,
        tokens=1,
        heads=heads,
        value_heads=heads,
        sizes={"K": K, "V": V, "D": H * V},
        dtype=getattr(torch, dtype),
    )
    sizes = sizes_of(
        compile(spec, executor="torch"), given.inputs, given.params, given.scalars, (1,)
    )
    return Bytes(sizes.state_bytes, sizes.element_bytes, sizes.token_in, sizes.token_out)


class KernelTable:
    """Measured times by call and phase, of the rows measured on as many ranks as `world` beside
    each other, or on the nearest number of them."""

    def __init__(self, rows: Sequence[Mapping[str, str]], world: int = 1) -> None:
        self._found: dict[tuple, dict[int, dict[str, float]]] = {}
        for row in nearest_world(rows, world):
            key = (row["variant"], row["B"], row["H"], row["K"], row["V"], row["dtype"])
            by_tokens = self._found.setdefault(tuple(map(str, key)), {})
            by_tokens.setdefault(int(row["T"]), {})[row["phase"]] = 1e-3 * float(row["median_ms"])

    def kernels(self, point: Point) -> Kernels:
        """Times at the point's T: measured there, else linear in T from the nearest measured one.

        Raises ModelProblem where no call of this variant and shape was measured.
        """
        key = tuple(map(str, (point.variant, point.B, point.H, point.K, point.V, point.dtype)))
        by_tokens = self._found.get(key)
        if not by_tokens:
            raise ModelProblem(
                f"no kernel times of {point.variant} {point.B}x{point.H}x{point.K}x{point.V} "
                f"{point.dtype}: measure them with --calibrate on the machine in question"
            )
        tokens = min(by_tokens, key=lambda t: abs(t - point.T))
        phases = by_tokens[tokens]
        missing = [phase for phase in PHASES if phase not in phases]
        if missing:
            raise ModelProblem(f"phases {missing} of {point.variant} were not measured")
        local = point.T / tokens
        factor = {phase: 1.0 if phase in ("apply", "combine") else local for phase in PHASES}
        return Kernels(**{phase: factor[phase] * phases[phase] for phase in PHASES})


def workload_of(point: Point, kernels: Kernels, panels: int = 64) -> Workload:
    """The call of a point. panels: units of signalling, at most B * HV."""
    sizes = bytes_of(point.variant, point.B, point.H, point.K, point.V, point.dtype)
    return Workload(point.P, point.T, sizes, kernels, min(panels, point.B * point.heads))
