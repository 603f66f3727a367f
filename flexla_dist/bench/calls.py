"""One call of an operator with everything that its kernels read, to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexla_dist.compiler.executor.planned_launches import Arguments
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.executor.triton_run import Plan
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import CallInputs

DIRECTIONS = {"fwd": ("forward",), "fwdbwd": ("forward", "backward")}
States = tuple[Tensor, ...]


class BenchCall:
    """A call without initial state on the triton executor, and the gradient of its output.

    `directions` are those that are timed: forward, or forward and backward.
    """

    def __init__(self, op: LinearAttentionOp, given: CallInputs, directions: Sequence[str]):
        self.op, self.given, self.directions = op, given, tuple(directions)
        executor = op.executor("triton")
        assert isinstance(executor, TritonExecutor)
        self.executor = executor
        inputs = {name: x.detach() for name, x in given.inputs.items()}
        params = {name: x.detach() for name, x in given.params.items()}
        self.problem = problem = op.bind(inputs, params, given.scalars)
        self.entry = problem.zero_state()
        generator = torch.Generator(problem.device).manual_seed(5)
        self.gradient = torch.randn(
            problem.output_shape(),
            generator=generator,
            dtype=problem.output_dtype,
            device=problem.device,
        )
        self._saved: dict[int, States] = {}  # by the programs that scans are cut for

    def __call__(self) -> States:
        """The whole call as a user makes it: output, or gradients of all arguments."""
        leaves = {**self.given.inputs, **self.given.params}
        arguments: dict[str, Any] = {**leaves, **self.given.scalars}
        if "backward" not in self.directions:
            with torch.no_grad():
                return (self.op(**arguments)[0],)
        output, _ = self.op(**arguments)
        return torch.autograd.grad(output, list(leaves.values()), self.gradient)

    def prepared(self, direction: str) -> tuple[Plan, States]:
        """The launch plan of a direction with the executor's present choices, and its tensors."""
        return self.executor.prepared(self.problem, direction, self.arguments(direction))

    def arguments(self, direction: str) -> Arguments:
        """Tensors beside those of the problem."""
        if direction == "forward":
            return Arguments(self.entry)
        programs = self.executor.programs(self.problem)
        if programs not in self._saved:
            self._saved = {programs: self.executor.forward(self.problem, self.entry).saved}
        saved = self._saved[programs]
        return Arguments(self.entry, (self.gradient,), self.entry, saved)

    def forget(self) -> None:
        """Drop what forward saved: it is computed again with the executor's present choices."""
        self._saved = {}

    def compared(self, direction: str, plan: Plan) -> int:
        """How many results of a plan are those of the call; what is kept for backward follows."""
        count = 1 + len(self.executor.state_names)
        return count if direction == "forward" else len(plan.results)
