"""Runs the programs of a spec with batched PyTorch operations.

Contract: works on slabs of chunks, so that memory is bounded whatever T is: no [T, T], no matrix
state per token, no state history over the sequence. Forward keeps the states that enter each
slab; backward goes through the slabs from the last to the first, recomputes the chunk-local
values and the states of one slab at a time, and runs the reversed scan. Arithmetic is in the
compute dtype (float32 or float64). Sums over batch, chunks and head groups have a fixed order, so
the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap
from flexla_dist.compiler.executor.gradients import GradientSums
from flexla_dist.compiler.executor.layout import Slab, scatter
from flexla_dist.compiler.executor.opened_torch import OpenedTorch
from flexla_dist.compiler.executor.problem import Outline, Problem
from flexla_dist.compiler.executor.results import ForwardResult, Gradients, Saved, States
from flexla_dist.compiler.executor.slab_run import SlabRun
from flexla_dist.compiler.executor.summary import Summary
from flexla_dist.compiler.pipeline import Graphs

SLAB_NUMBERS = 1 << 18  # numbers of one [.., C, K] value in a slab: 1 MiB in float32
GPU_SLAB_NUMBERS = 1 << 22  # launches, not caches, are what a small slab costs there


class TorchExecutor:
    """The executor called `torch`: the same rewritten graphs, run eagerly."""

    name = "torch"
    plan = backward_plan = "batched"

    def __init__(self, graphs: Graphs):
        self.graphs = graphs
        self.spec = graphs.spec
        self._dense = frozenset(n for n, t in graphs.transitions.items() if t.has_matrix)

    def configurations(self, problem: Problem, direction: str) -> dict[str, object]:
        """Nothing: no kernel of a call is configured here."""
        return {}

    def forward(
        self, problem: Problem, entry: States, opened: OpenedTorch | None = None
    ) -> ForwardResult:
        """Outputs and exit states from the states that enter each document."""
        output = torch.empty(
            problem.output_shape(), dtype=problem.output_dtype, device=problem.device
        )
        leave = [state.clone() for state in entry]
        state = _lanes(problem, entry)
        starts: list[States] = []
        for slab in _slabs(problem, range(len(problem.layout.chunks))):
            starts.append(state)
            programs = self.graphs.programs("forward", slab.padded)
            run = SlabRun(problem, slab)
            run.run(programs, 0)
            state = run.scan(state, entry, leave)
            run.run(programs, 1)
            result = run.full("output", len(self.spec.output_dims))
            scatter(problem.layout, slab, result, output)
        return ForwardResult(output, tuple(leave), _stack(starts))

    def saved_shapes(self, outline: Outline) -> tuple[Saved, ...]:
        """Shapes that hold what `forward` saves: the states entering each slab."""
        chunks = outline.most_chunks
        rows = -(-chunks // _slab_size(outline))
        if not outline.packed and chunks > 1:
            rows = rows + 1  # a ragged tail may be a slab of its own
        lanes = 1 if outline.packed else outline.batch
        return tuple(
            Saved((rows, *outline.state_shape(name, lanes)), outline.compute_dtype)
            for name in outline.state_names
        )

    def open_forward(
        self, problem: Problem, entry: States, groups: tuple[tuple[int, int], ...] = ()
    ) -> OpenedTorch:
        """A forward call; `entry` gives shapes alone. Groups of heads are computed together."""
        return OpenedTorch(lambda sequence: self.summary(problem, sequence))

    def open_backward(
        self,
        problem: Problem,
        saved: States,
        entry: States,
        grad_output: Tensor,
        groups: tuple[tuple[int, int], ...] = (),
    ) -> OpenedTorch:
        """A backward call."""
        return OpenedTorch(
            lambda sequence: self.adjoint_summary(problem, saved, entry, grad_output, sequence)
        )

    def summary(self, problem: Problem, sequence: int) -> SpanMap:
        """M and S_hat of one document (-1: all lanes of an unpacked call), from zero."""
        summary = Summary(problem, self._dense, adjoint=False)
        for slab in _slabs(problem, problem.layout.chunks_of(sequence)):
            run = SlabRun(problem, slab)
            run.run(self.graphs.programs("summary", slab.padded), 0)
            summary.append(run)
        return summary.result()

    def adjoint_summary(
        self, problem: Problem, saved: States, entry: States, grad_output: Tensor, sequence: int
    ) -> SpanMap:
        """M transposed and G_hat of one document: `G_in = M^T G_out + G_hat`."""
        summary = Summary(problem, self._dense, adjoint=True)
        chunks = problem.layout.chunks_of(sequence)
        for slab, start in _reversed_slabs(problem, saved, chunks):
            programs = self.graphs.programs("adjoint_summary", slab.padded)
            run = SlabRun(problem, slab, grad_output)
            run.run(programs, 0)
            if 1 in programs:
                run.scan(start, entry, None)
                run.run(programs, 1)
            summary.prepend(run)
        return summary.result()

    def backward(
        self,
        problem: Problem,
        saved: States,
        entry: States,
        grad_output: Tensor,
        grad_exit: States,
        opened: OpenedTorch | None = None,
    ) -> Gradients:
        """Gradients of inputs, parameters and entry states; a log scale has none (zero)."""
        sums = GradientSums(problem)
        grad_entry = [g.clone() for g in grad_exit]
        carried = [torch.zeros_like(g) for g in _lanes(problem, grad_exit)]
        for slab, start in _reversed_slabs(problem, saved, range(len(problem.layout.chunks))):
            programs = self.graphs.programs("backward", slab.padded)
            run = SlabRun(problem, slab, grad_output)
            run.run(programs, 0)
            run.scan(start, entry, None)
            run.run(programs, 1)
            run.reverse(carried, grad_exit, grad_entry)
            run.run(programs, 2)
            sums.add(run)
        if self.spec.log_scaled is not None:
            grad_entry[-1] = torch.zeros_like(entry[-1])
        inputs, params = sums.result()
        return Gradients(inputs, params, tuple(grad_entry))


def _slab_size(problem: Outline) -> int:
    """Chunks of a slab: it depends on the longest chunk that there may be, not on its tokens."""
    width = max((problem.longest_chunk, *problem.sizes.values()))
    per_chunk = problem.batch * problem.heads * problem.longest_chunk * width
    numbers = SLAB_NUMBERS if problem.device.type == "cpu" else GPU_SLAB_NUMBERS
    return max(1, numbers // max(per_chunk, 1))


def _slabs(problem: Problem, chunks: range) -> Iterator[Slab]:
    return problem.layout.slabs(chunks, _slab_size(problem))


def _reversed_slabs(problem: Problem, saved: States, chunks: range) -> list[tuple[Slab, States]]:
    """Slabs of the forward pass that cover `chunks`, last first, with their entering states."""
    every = _slabs(problem, range(len(problem.layout.chunks)))
    out = []
    for at, slab in enumerate(every):
        low = max(slab.first, chunks.start)
        high = min(slab.first + slab.count, chunks.stop)
        if low >= high:
            continue
        inside = slab.chunks[low - slab.first : high - slab.first]
        # A document that starts inside the slab takes its entry state there.
        cut = Slab(low, inside, slab.padded, slab.contiguous)
        out.append((cut, tuple(s[at] for s in saved)))
    return out[::-1]


def _lanes(problem: Problem, states: States) -> States:
    """State before the first chunk; a packed call replaces it at each document."""
    if not problem.layout.packed:
        return states
    return tuple(
        torch.zeros(problem.state_shape(name, 1), dtype=s.dtype, device=s.device)
        for name, s in zip(problem.state_names, states, strict=True)
    )


def _stack(starts: list[States]) -> States:
    return tuple(torch.stack(column) for column in zip(*starts, strict=True))
