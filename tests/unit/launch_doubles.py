"""Doubles for kernels and their launches: calls on the CPU take the path of a GPU up to there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist.compiler.executor import launch, triton_run
from flexla_dist.compiler.executor.direct import Direct
from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor
from flexla_dist.compiler.executor.triton_run import Plan
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import make_inputs

from .compiled import graphs_of


class NotLaunched:
    """Double of a generated kernel: its launch through the binder does nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., NotLaunched]:
        return self.launch

    def launch(self, *arguments: Any, **keywords: Any) -> NotLaunched:
        self.launches += 1
        return self


class NotLaunchedAgain(Direct):
    """Double of `Direct`, whose launcher keeps what it was given after the constant front."""

    def __init__(self, grid: tuple[int, int], constants: Mapping[str, Any]) -> None:
        self.grid, self.front, self.tail = grid, ("function", "metadata"), (*constants.values(),)
        self.launch = self.note
        self.arguments: tuple[Any, ...] = ()
        self.launches = 0

    def note(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.launches += 1


def not_directly(
    function: Any, kernel: Any, grid: tuple[int, int], constants: Mapping[str, Any]
) -> NotLaunchedAgain | None:
    """Double of `direct`."""
    return None if kernel is None else NotLaunchedAgain(grid, constants)


class Doubled(TritonExecutor):
    """The executor with doubles for its kernels."""

    def built(self, direction: str, uneven: frozenset[str]) -> tuple[Built, ...]:  # type: ignore[override]
        schedule = self.forward_schedule if direction == "forward" else self.backward_schedule
        _, emitted = self.source(direction, uneven)
        return tuple(
            Built(kernel, e, NotLaunched())
            for kernel, e in zip(schedule.kernels, emitted, strict=True)
        )

    def helper(self, direction: str, name: str, subject: str) -> NotLaunched:
        return NotLaunched()

    def plan_of(self, direction: str) -> Plan:
        """The only plan of a direction."""
        (plan,) = (plan for key, plan in self._plans.items() if key[1] == direction)
        return plan


def replace_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the CPU take the path of a GPU up to the launches."""
    monkeypatch.setattr(launch, "check_sizes", lambda *_: None)
    monkeypatch.setattr(triton_run, "direct", not_directly)


class OneCall:
    """An operator on the tensors of one call: forward, or forward and backward."""

    def __init__(self, name: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.op = LinearAttentionOp(graphs_of(name), "triton", None)
        self.executor = Doubled(self.op.graphs)
        self.op._executors["triton"] = self.executor
        sizes = {"K": 32, "V": 32, "D": 32, "M": 32}
        call = make_inputs(
            self.op.spec, batch=1, tokens=tokens, heads=4, value_heads=4, sizes=sizes, dtype=dtype
        )
        self.arguments: dict[str, Any] = {**call.inputs, **call.params, **call.scalars}
        self.leaves = [x for x in self.arguments.values() if isinstance(x, Tensor)]
        self.seed = torch.ones(self.forward().shape, dtype=dtype)

    def forward(self) -> Tensor:
        output, _ = self.op(**self.arguments)
        return output

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.seed, allow_unused=True)
