"""One slab of chunks on its way through the programs and scans of a spec.

Contract: a `SlabRun` holds the named values of a slab, arguments first, then whatever programs
and scans add. Values have leading dims [B, HV, n] or ones that broadcast to them; `full` gives
all of them. Nothing outlives the slab but what a method returns or writes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import Chunk, Slab, gather, valid_mask
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.results import States
from flexla_dist.compiler.executor.scan import Affine, forward_scan, log_scale_scan, reverse_scan
from flexla_dist.compiler.ir.operators import Sizes
from flexla_dist.compiler.partition import Program
from flexla_dist.compiler.pipeline import GRAD_OUTPUT
from flexla_dist.compiler.trace.stages import FRESH, LOG_SCALE, SHIFT, VALID, state_argument
from flexla_dist.shapes import TOKEN_DIM

CARRY = "carry of the log scale"  # no identifier: an input may be called `carry`


class Ports:
    """Where states enter and leave documents: rows of [N, ...] packed, all lanes otherwise."""

    def __init__(self, source: Tensor, target: Tensor | None, packed: bool):
        self.source, self.target, self.packed = source, target, packed

    def enter(self, document: int) -> Tensor:
        """The state that enters a document."""
        return self.source[document : document + 1] if self.packed else self.source

    def leave(self, document: int, state: Tensor) -> None:
        """Keep the state that leaves a document."""
        if self.target is None:
            return
        into = self.target[document : document + 1] if self.packed else self.target
        into.copy_(state)


class ClosedPorts(Ports):
    """For a run of chunks seen as the middle of a document: nothing enters, nothing leaves."""

    def __init__(self) -> None:
        """No tensors are needed."""

    def enter(self, document: int) -> Tensor:
        raise AssertionError("a state enters the middle of a document")

    def leave(self, document: int, state: Tensor) -> None:
        raise AssertionError("a state leaves the middle of a document")


class SlabRun:
    """The values of one slab, see the module."""

    def __init__(self, problem: Problem, slab: Slab, grad_output: Tensor | None = None):
        self.problem, self.slab = problem, slab
        self.values: dict[str, Tensor] = {}
        self._take_inputs()
        self._take_constants()
        if grad_output is not None:
            self._take_seed(grad_output)

    # -- arguments ----------------------------------------------------------------------------

    def _take_inputs(self) -> None:
        problem = self.problem
        for name, x in problem.inputs.items():
            part = gather(problem.layout, self.slab, x).to(problem.compute_dtype)
            if part.shape[1] != problem.heads:
                part = part.repeat_interleave(problem.heads // part.shape[1], dim=1)
            self.values[name] = part.contiguous()

    def _take_constants(self) -> None:
        problem, layout = self.problem, self.problem.layout
        for name, x in problem.params.items():
            self.values[name] = x.to(problem.compute_dtype)[None, :, None]
        for name, number in problem.scalars.items():
            self.values[name] = torch.full(
                (), number, dtype=problem.compute_dtype, device=problem.device
            )
        sizes = {TOKEN_DIM: layout.chunk_size, **problem.sizes}
        constants = Sizes(sizes, problem.device, problem.compute_dtype)
        self.values["sizes"] = constants  # type: ignore[assignment]
        if self.slab.padded:
            self.values[VALID] = valid_mask(layout, self.slab, problem.device)

    def _take_seed(self, grad_output: Tensor) -> None:
        problem = self.problem
        seed = gather(problem.layout, self.slab, grad_output).to(problem.compute_dtype)
        if self.slab.padded:
            rows = self.values[VALID][(...,) + (None,) * (seed.dim() - 4)]
            seed = torch.where(rows, seed, 0.0)
        self.values[GRAD_OUTPUT] = seed.contiguous()

    # -- values -------------------------------------------------------------------------------

    def run(self, programs: Mapping[int, Program], level: int) -> None:
        """Run the program of a level, if there is one."""
        if level in programs:
            programs[level].run(self.values)

    def full(self, name: str, rank: int) -> Tensor:
        """A value of `rank` dims with all of its leading dims [B, HV, n]."""
        x = self.values[name]
        while x.dim() < rank + 3:
            x = x[None]
        lead = (self.problem.batch, self.problem.heads, self.slab.count)
        return x.expand(*lead, *x.shape[3:]) if x.shape[:3] != lead else x

    def affine(self, name: str) -> Affine:
        """Elements of one state; of a log-scaled one S~' = carry * S~ + fresh * X."""
        rank = len(self.problem.spec.state_dims[name])
        local, decay, matrix = (
            self.full(key, rank) if key in self.values else None
            for key in (f"local_{name}", f"decay_{name}", f"matrix_{name}")
        )
        assert local is not None
        if self.problem.spec.log_scaled is None:
            return Affine(local, decay, matrix)
        tail = (...,) + (None,) * rank
        return Affine(local * self.values[FRESH][tail], self.values[CARRY][tail], None)

    def adjoint(self, name: str) -> Tensor:
        """G_hat of one state."""
        return self.full(f"adjoint_{name}", len(self.problem.spec.state_dims[name]))

    # -- scans --------------------------------------------------------------------------------

    def scan(self, state: States, entry: States, leave: list[Tensor] | None) -> States:
        """Fill in the states that enter each chunk; returns those that leave the slab."""
        packed = self.problem.layout.packed
        targets = [None] * len(entry) if leave is None else leave
        ports = [
            Ports(source, target, packed) for source, target in zip(entry, targets, strict=True)
        ]
        new = list(state)
        if self.problem.spec.log_scaled is not None:
            new[-1] = self.scan_log_scale(self.slab.chunks, state[-1], ports[-1])
        for at, name in enumerate(self.problem.spec.state_dims):
            states, new[at] = forward_scan(
                self.affine(name), self.slab.chunks, state[at], ports[at].enter, ports[at].leave
            )
            self.values[state_argument(name)] = states
        return tuple(new)

    def scan_log_scale(self, chunks: tuple[Chunk, ...], m: Tensor, ports: Ports) -> Tensor:
        """Fill in log scales and the factors made of them; returns the last log scale."""
        decay, weight = self.full("log_decay", 0), self.full("log_weight", 0)
        scales, last = log_scale_scan(decay, weight, chunks, m, ports.enter, ports.leave)
        self.values.update(
            {
                LOG_SCALE: scales.entering,
                SHIFT: scales.shift,
                CARRY: scales.carry,
                FRESH: scales.fresh,
            }
        )
        return last

    def reverse(self, carried: list[Tensor], grad_exit: States, grad_entry: list[Tensor]) -> None:
        """Fill in the gradients of the states that leave each chunk; `carried` moves on."""
        for at, name in enumerate(self.problem.spec.state_dims):
            ports = Ports(grad_exit[at], grad_entry[at], self.problem.layout.packed)
            gradients, carried[at] = reverse_scan(
                self.affine(name),
                self.adjoint(name),
                self.slab.chunks,
                carried[at],
                ports.enter,
                ports.leave,
            )
            self.values[f"grad_next_{name}"] = gradients
