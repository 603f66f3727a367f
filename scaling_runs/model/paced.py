"""Real ranks and real messages around local parts of known length.

A paced operator computes small tensors and then pauses until a phase has lasted as long as it is
told. Pauses need no core, so that more ranks than cores run as if each had one: what is measured is
the order of the program, its waits and its messages, which is what the model has to get right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flexla_dist.compiler.executor.opened_torch import OpenedTorch
from flexla_dist.ops.op import LinearAttentionOp, compile, run_local
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import CallInputs, make_inputs
from scaling_runs.baselines import Settings, Sharding, get_system
from scaling_runs.model.clusters import Cluster, Link
from scaling_runs.model.predict import simulate
from scaling_runs.model.workload import Kernels, Workload, bytes_of
from scaling_runs.weak_time import Clock, Times


@dataclass(eq=False)
class PacedExecutor:
    """An executor whose phases last as long as `kernels` says of `heads` heads and `tokens` tokens,
    and in proportion for others."""

    inner: Any
    kernels: Kernels
    heads: int
    tokens: int

    @property
    def name(self) -> str:
        """The name of the executor inside."""
        return self.inner.name

    @property
    def plan(self) -> str:
        """The plan of the executor inside."""
        return self.inner.plan

    @property
    def backward_plan(self) -> str:
        """The plan of the executor inside for backward."""
        return self.inner.backward_plan

    def configurations(self, problem: Any, direction: str) -> Any:
        """Those of the executor inside."""
        return self.inner.configurations(problem, direction)

    def open_forward(self, problem: Any, entry: Any, groups: Any = ()) -> OpenedTorch:
        """A call whose summary is paced."""
        return OpenedTorch(lambda sequence: self.summary(problem, sequence))

    def open_backward(
        self, problem: Any, saved: Any, entry: Any, gradient: Any, groups: Any = ()
    ) -> OpenedTorch:
        """A call whose adjoint summary is paced."""
        rest = (saved, entry, gradient)
        return OpenedTorch(lambda sequence: self.adjoint_summary(problem, *rest, sequence))

    def summary(self, problem: Any, sequence: int) -> Any:
        """Paced."""
        return self._paced(self.kernels.summary, problem, self.inner.summary, problem, sequence)

    def forward(self, problem: Any, entry: Any, opened: Any = None) -> Any:
        """Paced."""
        return self._paced(self.kernels.forward, problem, self.inner.forward, problem, entry)

    def adjoint_summary(self, problem: Any, *rest: Any) -> Any:
        """Paced."""
        inner = self.inner.adjoint_summary
        return self._paced(self.kernels.adjoint, problem, inner, problem, *rest)

    def backward(self, problem: Any, *rest: Any, opened: Any = None) -> Any:
        """Paced."""
        return self._paced(self.kernels.backward, problem, self.inner.backward, problem, *rest)

    def _paced(
        self, seconds: float, problem: Any, call: Callable[..., Any], *arguments: Any
    ) -> Any:
        begin = time.perf_counter()
        found = call(*arguments)
        if problem.tokens > 1:
            share = problem.heads / self.heads * problem.tokens / self.tokens
            time.sleep(max(0.0, share * seconds - (time.perf_counter() - begin)))
        return found


class PacedOp:
    """A compiled operator with a paced executor; all else is the operator's own."""

    def __init__(self, op: LinearAttentionOp, kernels: Kernels, heads: int, tokens: int) -> None:
        self._op = op
        self._paced = PacedExecutor(op.executor("torch"), kernels, heads, tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def executor(self, name: str | None = None, device: Any = None, dtype: Any = None) -> Any:
        """The paced executor, whatever the device."""
        return self._paced

    def __call__(self, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """Output and state of the operator, paced."""
        spec = self._op.spec
        inputs, params, scalars = (
            {name: arguments[name] for name in names if name in arguments}
            for names in (spec.inputs, spec.params, spec.scalars)
        )
        executor: Any = self._paced
        return run_local(executor, self._op.bind(inputs, params, scalars), None)


PACE = Kernels(0.020, 0.040, 0.030, 0.060, 0.0, 0.0)
VARIANT = "simple_gla"
PACED_COLUMNS = (
    *("kind", "date", "commit", "host", "cores", "torch", "backend", "system", "P"),
    *("median_ms", "p20_ms", "p80_ms", "modelled_ms", "error"),
)
PACED_KEY = ("host", "backend", "system", "P")


@dataclass(frozen=True)
class PacedCall:
    """A call of the scalar variant on `ranks` ranks: tokens of a rank, heads, K = V = width, and
    how long its local parts are to last."""

    ranks: int
    heads: int
    tokens: int = 8
    width: int = 8
    kernels: Kernels = PACE

    @classmethod
    def small(cls, ranks: int) -> PacedCall:
        """A call whose messages are tiny; a head for each rank, because systems cut by heads."""
        return cls(ranks, max(4, ranks))

    def workload(self) -> Workload:
        """As the model sees it."""
        sizes = bytes_of(VARIANT, 1, self.heads, self.width, self.width, "float32")
        return Workload(self.ranks, self.tokens, sizes, self.kernels, min(4, self.heads))

    def inputs(self, rank: int) -> CallInputs:
        """Seeded inputs of a rank that want gradients."""
        return make_inputs(
            get_variant(VARIANT),
            batch=1,
            tokens=self.tokens,
            heads=self.heads,
            value_heads=self.heads,
            sizes={"K": self.width, "V": self.width},
            dtype=torch.float32,
            seed=rank,
        )


def paced_systems(
    systems: Sequence[str],
    seconds: float,
    call: PacedCall | None = None,
    direction: str = "fwdbwd",
) -> dict[str, Times]:
    """Times by system, on all ranks of the default group; of a small call unless told."""
    call = call or PacedCall.small(dist.get_world_size())
    given = call.inputs(dist.get_rank())
    op = compile(get_variant(VARIANT), chunk_size=min(64, call.tokens))
    return {
        system: paced_times(
            op, given.inputs, given.scalars, call.kernels, system, seconds, direction
        )
        for system in systems
    }


def paced_model(system: str, ranks: int, links: Mapping[str, Link]) -> float:
    """Modelled seconds of forward and backward of a small call."""
    cluster = Cluster("processes", 1 << 20, links, {})
    return simulate(system, PacedCall.small(ranks).workload(), cluster, "fwdbwd").seconds


def paced_times(
    op: LinearAttentionOp,
    given: Mapping[str, Any],
    scalars: Mapping[str, float],
    kernels: Kernels,
    system: str,
    seconds: float,
    direction: str = "fwdbwd",
) -> Times:
    """Times of a paced call, forward or forward and backward, on all ranks of the default group.

    given: leaves [B, T, heads, ...] of this rank, which want gradients.
    """
    first = next(iter(given.values()))
    size = dist.get_world_size()
    paced = PacedOp(op, kernels, first.shape[2], first.shape[1])
    sharding = Sharding.of(None, (first.shape[1],) * size)
    attend = get_system(system).prepare(paced, sharding, Settings(timeout=60.0))

    def call() -> None:
        if direction == "fwd":
            with torch.no_grad():
                attend(given, {}, scalars)
            return
        output = attend(given, {}, scalars)
        torch.autograd.grad(output, list(given.values()), torch.ones_like(output))

    clock = Clock(dist.group.WORLD, torch.device("cpu"))
    return Times.of(clock.barrier_samples(call, seconds))
