"""Gradients collected slab by slab, in fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import scatter
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.slab_run import SlabRun


class GradientSums:
    """Gradients of inputs, written token by token, and of parameters, summed up."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.inputs = {
            name: torch.zeros_like(x, memory_format=torch.contiguous_format)
            for name, x in problem.inputs.items()
        }
        self.params = {
            name: torch.zeros(x.shape, dtype=problem.compute_dtype, device=x.device)
            for name, x in problem.params.items()
        }

    def add(self, run: SlabRun) -> None:
        """Add the gradients `grad_<name>` [B, HV, n, ...] of a slab."""
        spec = self.problem.spec
        for name, item in spec.param_specs.items():
            if f"grad_{name}" in run.values:
                self.params[name] += run.full(f"grad_{name}", len(item.dims)).sum((0, 2))
        for name, item in spec.input_specs.items():
            if f"grad_{name}" in run.values:
                self._scatter(run, name, run.full(f"grad_{name}", len(item.dims)))

    def _scatter(self, run: SlabRun, name: str, value: Tensor) -> None:
        heads = self.problem.inputs[name].shape[2]
        if heads != self.problem.heads:
            value = value.unflatten(1, (heads, self.problem.heads // heads)).sum(2)
        scatter(self.problem.layout, run.slab, value, self.inputs[name])

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs in their dtype, parameters in theirs."""
        params = {n: g.to(self.problem.params[n].dtype) for n, g in self.params.items()}
        return self.inputs, params
