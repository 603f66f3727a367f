"""Runs the programs of a spec with batched PyTorch operations.

Contract: works on slabs of chunks, so that memory is bounded whatever T is: no [T, T], no matrix state per
token, no state history over the sequence. Forward keeps the states that enter each slab; backward goes through
the slabs from the last to the first, recomputes the chunk-local values and the states of one slab at a time,
and runs the reversed scan. Arithmetic is in the compute dtype (float32 or float64). Sums over batch, chunks and
head groups have a fixed order, so the same call gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexla_dist.compiler.executor.element import SpanMap, StateMap
from flexla_dist.compiler.executor.layout import Chunk, Slab, gather, scatter, valid_mask
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.executor.scan import Affine, forward_scan, log_scale_scan, reverse_scan
from flexla_dist.compiler.ir.operators import Sizes
from flexla_dist.compiler.pipeline import GRAD_OUTPUT, Graphs
from flexla_dist.compiler.trace.stages import FRESH, LOG_SCALE, SHIFT, VALID, state_argument
from flexla_dist.shapes import TOKEN_DIM

States = tuple[Tensor, ...]
Values = dict[str, Tensor]
SLAB_NUMBERS = 1 << 18  # numbers of one [.., C, K] value in a slab: 1 MiB in float32


@dataclass(frozen=True)
class ForwardResult:
    """Output [B, T, HV, V], exit states [N, HV, ...], and what backward needs beside the inputs."""

    output: Tensor
    exit: States
    saved: States


@dataclass(frozen=True)
class Gradients:
    """Gradients by name, each in the dtype of its tensor; `entry` in the compute dtype."""

    inputs: dict[str, Tensor]
    params: dict[str, Tensor]
    entry: States


class TorchExecutor:
    """The executor called `torch`: the same rewritten graphs, run eagerly."""

    name = "torch"

    def __init__(self, graphs: Graphs):
        self.graphs = graphs
        self.spec = graphs.spec
        self.state_names = tuple(self.spec.state_dims)
        self.log_scaled = self.spec.log_scaled is not None
        items = (*self.spec.input_specs.values(), *self.spec.param_specs.values())
        self._dims = {item.name: item.dims for item in items}

    # -- the phases ---------------------------------------------------------------------------

    def forward(self, problem: Problem, entry: States) -> ForwardResult:
        """Outputs and exit states from the states that enter each document."""
        layout = problem.layout
        output = torch.empty(
            problem.output_shape(), dtype=problem.output_dtype, device=problem.device
        )
        leave = [state.clone() for state in entry]
        state = self._lanes(problem, entry)
        starts: list[States] = []
        for slab in layout.slabs(range(len(layout.chunks)), self._slab_size(problem)):
            starts.append(state)
            programs = self.graphs.programs("forward", slab.padded)
            values = self._arguments(problem, slab)
            programs[0].run(values)
            state = self._scan(problem, slab, values, state, entry, leave)
            if 1 in programs:
                programs[1].run(values)
            rank = len(self.spec.output_dims)
            scatter(layout, slab, self._lead_of(problem, slab, values["output"], rank), output)
        return ForwardResult(output, tuple(leave), _stack(starts))

    def summary(self, problem: Problem, sequence: int) -> SpanMap:
        """M and S_hat of one document (-1: all lanes of an unpacked call), from zero."""
        run = _SummaryRun(self, problem, adjoint=False)
        layout = problem.layout
        for slab in layout.slabs(layout.chunks_of(sequence), self._slab_size(problem)):
            values = self._arguments(problem, slab)
            self.graphs.programs("summary", slab.padded)[0].run(values)
            run.forward(slab, values)
        return run.result()

    def adjoint_summary(
        self, problem: Problem, saved: States, entry: States, grad_output: Tensor, sequence: int
    ) -> SpanMap:
        """M transposed and G_hat of one document: `G_in = M^T G_out + G_hat`."""
        run = _SummaryRun(self, problem, adjoint=True)
        layout = problem.layout
        chunks = layout.chunks_of(sequence)
        for slab, start in self._reversed_slabs(problem, saved, chunks):
            programs = self.graphs.programs("adjoint_summary", slab.padded)
            values = self._arguments(problem, slab, grad_output)
            programs[0].run(values)
            if 1 in programs:
                self._scan(problem, slab, values, start, entry, None)
                programs[1].run(values)
            run.backward(slab, values)
        return run.result()

    def backward(
        self,
        problem: Problem,
        saved: States,
        entry: States,
        grad_output: Tensor,
        grad_exit: States,
    ) -> Gradients:
        """Gradients of inputs, parameters and entry states."""
        sums = _GradientSums(problem)
        grad_entry = [g.clone() for g in grad_exit[: len(self.state_names)]]
        layout = problem.layout
        carried = [torch.zeros_like(g) for g in self._lanes(problem, grad_exit)]
        for slab, start in self._reversed_slabs(problem, saved, range(len(layout.chunks))):
            programs = self.graphs.programs("backward", slab.padded)
            values = self._arguments(problem, slab, grad_output)
            programs[0].run(values)
            self._scan(problem, slab, values, start, entry, None)
            if 1 in programs:
                programs[1].run(values)
            self._reverse(problem, slab, values, carried, grad_exit, grad_entry)
            if 2 in programs:
                programs[2].run(values)
            for name in (*problem.inputs, *problem.params):
                if f"grad_{name}" in values:
                    rank = len(self._dims[name])
                    value = self._lead_of(problem, slab, values[f"grad_{name}"], rank)
                    sums.add(slab, name, value)
        if self.log_scaled:
            grad_entry.append(torch.zeros_like(entry[-1]))
        inputs, params = sums.result()
        return Gradients(inputs, params, tuple(grad_entry))

    # -- arguments ----------------------------------------------------------------------------

    def _slab_size(self, problem: Problem) -> int:
        layout = problem.layout
        width = max(problem.sizes.values(), default=1)
        per_chunk = layout.batch * problem.heads * layout.chunk_size * max(width, layout.chunk_size)
        return max(1, SLAB_NUMBERS // max(per_chunk, 1))

    def _reversed_slabs(
        self, problem: Problem, saved: States, chunks: range
    ) -> list[tuple[Slab, States]]:
        """Slabs of the forward pass that cover `chunks`, last first, with their entering states."""
        layout = problem.layout
        every = list(layout.slabs(range(len(layout.chunks)), self._slab_size(problem)))
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

    def _lanes(self, problem: Problem, states: States) -> States:
        """State before the first chunk; a packed call replaces it at each document."""
        if not problem.layout.packed:
            return states
        return tuple(
            torch.zeros(problem.state_shape(name, 1), dtype=s.dtype, device=s.device)
            for name, s in zip(problem.state_names, states, strict=False)
        )

    def _arguments(
        self, problem: Problem, slab: Slab, grad_output: Tensor | None = None
    ) -> Values:
        layout = problem.layout
        values: Values = {}
        for name, x in problem.inputs.items():
            part = gather(layout, slab, x).to(problem.compute_dtype)
            if part.shape[1] != problem.heads:
                part = part.repeat_interleave(problem.heads // part.shape[1], dim=1)
            values[name] = part.contiguous()
        for name, x in problem.params.items():
            values[name] = x.to(problem.compute_dtype)[None, :, None]
        for name, number in problem.scalars.items():
            values[name] = torch.full(
                (), number, dtype=problem.compute_dtype, device=problem.device
            )
        sizes = {TOKEN_DIM: layout.chunk_size, **problem.sizes}
        values["sizes"] = Sizes(sizes, problem.device, problem.compute_dtype)  # type: ignore[assignment]
        if slab.padded:
            values[VALID] = valid_mask(layout, slab, problem.device)
        if grad_output is not None:
            seed = gather(layout, slab, grad_output).to(problem.compute_dtype)
            if slab.padded:
                rows = values[VALID][(...,) + (None,) * (seed.dim() - 4)]
                seed = torch.where(rows, seed, 0.0)
            values[GRAD_OUTPUT] = seed.contiguous()
        return values

    def _full_lead(self, problem: Problem, slab: Slab, x: Tensor) -> Tensor:
        """Broadcast the leading dims [B, HV, n] that a value does not depend on."""
        lead = (problem.batch, problem.heads, slab.count)
        return x.expand(*lead, *x.shape[3:]) if x.shape[:3] != lead else x

    # -- scans --------------------------------------------------------------------------------

    def affine(self, problem: Problem, slab: Slab, values: Values, name: str) -> Affine:
        """Elements of one state for a slab, with full leading dims."""
        found = (values.get(f"{part}_{name}") for part in ("local", "decay", "matrix"))
        local, decay, matrix = (
            None if x is None else self._lead_of(problem, slab, x, len(self.spec.state_dims[name]))
            for x in found
        )
        if local is None:
            raise AssertionError(f"state {name!r} has no local element")
        return Affine(local, decay, matrix)

    def _lead_of(self, problem: Problem, slab: Slab, x: Tensor, rank: int) -> Tensor:
        while x.dim() < rank + 3:
            x = x[None]
        return self._full_lead(problem, slab, x)

    def _scan(
        self,
        problem: Problem,
        slab: Slab,
        values: Values,
        state: States,
        entry: States,
        leave: list[Tensor] | None,
    ) -> States:
        """Fill in the states that enter each chunk of a slab; returns those that leave it."""
        packed = problem.layout.packed
        new: list[Tensor] = list(state)
        if self.log_scaled:
            at = len(self.state_names)
            new[at] = self._scan_log_scale(problem, slab, values, state[at], entry[at], leave)
        for at, name in enumerate(self.state_names):
            affine = self.affine(problem, slab, values, name)
            if self.log_scaled:
                affine = self._rescaled(problem, values, affine)
            ports = _Ports(entry[at], None if leave is None else leave[at], packed)
            states, new[at] = forward_scan(
                affine, slab.chunks, state[at], ports.enter, ports.leave
            )
            values[state_argument(name)] = states
        return tuple(new)

    def _scan_log_scale(
        self,
        problem: Problem,
        slab: Slab,
        values: Values,
        m: Tensor,
        entry: Tensor,
        leave: list[Tensor] | None,
    ) -> Tensor:
        decay, weight = (
            self._lead_of(problem, slab, values[name], 0) for name in ("log_decay", "log_weight")
        )
        ports = _Ports(entry, None if leave is None else leave[-1], problem.layout.packed)
        entering, shift, fresh, last = log_scale_scan(
            decay, weight, slab.chunks, m, ports.enter, ports.leave
        )
        values.update({LOG_SCALE: entering, SHIFT: shift, FRESH: fresh})
        values["carry"] = (decay + shift).exp()
        return last

    def _rescaled(self, problem: Problem, values: Values, affine: Affine) -> Affine:
        """S~' = carry * S~ + fresh * X."""
        tail = (...,) + (None,) * (affine.local.dim() - 3)
        return Affine(affine.local * values[FRESH][tail], values["carry"][tail], None)

    def adjoint(self, problem: Problem, slab: Slab, values: Values, name: str) -> Tensor:
        """G_hat of a slab with full leading dims."""
        rank = len(self.spec.state_dims[name])
        return self._lead_of(problem, slab, values[f"adjoint_{name}"], rank).contiguous()

    def _reverse(
        self,
        problem: Problem,
        slab: Slab,
        values: Values,
        carried: list[Tensor],
        grad_exit: States,
        grad_entry: list[Tensor],
    ) -> None:
        for at, name in enumerate(self.state_names):
            affine = self.affine(problem, slab, values, name)
            ports = _Ports(grad_exit[at], grad_entry[at], problem.layout.packed)
            gradients, carried[at] = reverse_scan(
                affine,
                self.adjoint(problem, slab, values, name),
                slab.chunks,
                carried[at],
                ports.enter,
                ports.leave,
            )
            values[f"grad_next_{name}"] = gradients


class _Ports:
    """Where states enter and leave documents: rows of [N, ...] packed, all lanes otherwise."""

    def __init__(self, source: Tensor, target: Tensor | None, packed: bool):
        self.source, self.target, self.packed = source, target, packed

    def enter(self, document: int) -> Tensor:
        return self.source[document : document + 1] if self.packed else self.source

    def leave(self, document: int, state: Tensor) -> None:
        if self.target is None:
            return
        into = self.target[document : document + 1] if self.packed else self.target
        into.copy_(state)


class _SummaryRun:
    """Composes the elements of consecutive slabs, forwards or backwards."""

    def __init__(self, executor: TorchExecutor, problem: Problem, adjoint: bool):
        self.executor, self.problem = executor, problem
        lanes = 1 if problem.layout.packed else problem.batch
        names = executor.state_names
        self.local = [
            torch.zeros(
                problem.state_shape(name, lanes),
                dtype=problem.compute_dtype,
                device=problem.device,
            )
            for name in names
        ]
        self.factor: list[Tensor | None] = [None] * len(names)
        self.lanes = lanes
        self.log_decay: Tensor | None = None
        self.log_weight: Tensor | None = None
        if executor.log_scaled and not adjoint:
            shape = (lanes, problem.heads)
            options = {"dtype": problem.compute_dtype, "device": problem.device}
            self.log_decay = torch.zeros(shape, **options)  # type: ignore[arg-type]
            self.log_weight = torch.full(shape, -torch.inf, **options)  # type: ignore[arg-type]

    def forward(self, slab: Slab, values: Values) -> None:
        """Append a slab after what came before; the recurrence starts from zero."""
        executor, problem = self.executor, self.problem
        chunks = [_inner(chunk) for chunk in slab.chunks]
        if executor.log_scaled:
            self._forward_log_scale(slab, values)
        for at, name in enumerate(executor.state_names):
            affine = executor.affine(problem, slab, values, name)
            if executor.log_scaled:
                affine = executor._rescaled(problem, values, affine)
            _, self.local[at] = forward_scan(affine, chunks, self.local[at], _never, _nowhere)
            if not executor.log_scaled:
                self.factor[at] = _product(affine, self.factor[at], range(slab.count))

    def _forward_log_scale(self, slab: Slab, values: Values) -> None:
        executor, problem = self.executor, self.problem
        decay, weight = (
            executor._lead_of(problem, slab, values[n], 0) for n in ("log_decay", "log_weight")
        )
        chunks = [_inner(chunk) for chunk in slab.chunks]
        assert self.log_decay is not None and self.log_weight is not None
        _, shift, fresh, self.log_weight = log_scale_scan(
            decay, weight, chunks, self.log_weight, _never, _nowhere
        )
        self.log_decay = self.log_decay + decay.sum(2)
        values.update({SHIFT: shift, FRESH: fresh})
        values["carry"] = (decay + shift).exp()

    def backward(self, slab: Slab, values: Values) -> None:
        """Prepend a slab before what came after it; the gradient starts from zero."""
        executor, problem = self.executor, self.problem
        chunks = [_inner(chunk) for chunk in slab.chunks]
        for at, name in enumerate(executor.state_names):
            affine = executor.affine(problem, slab, values, name)
            adjoint = executor.adjoint(problem, slab, values, name)
            _, self.local[at] = reverse_scan(
                affine, adjoint, chunks, self.local[at], _never, _nowhere
            )
            flipped = affine
            if affine.matrix is not None:
                flipped = Affine(affine.local, affine.decay, affine.matrix.mT)
            order = range(slab.count - 1, -1, -1)
            self.factor[at] = _product(flipped, self.factor[at], order)

    def result(self) -> SpanMap:
        """The element of everything appended."""
        maps = []
        for at, name in enumerate(self.executor.state_names):
            dense = self.executor.graphs.transitions[name].has_matrix
            factor = self.factor[at]
            if dense and factor is None:
                k = self.local[at].shape[-2]
                eye = torch.eye(k, dtype=self.local[at].dtype, device=self.local[at].device)
                factor = eye.expand(self.lanes, self.problem.heads, k, k)
            maps.append(
                StateMap(
                    self.local[at],
                    decay=None if dense else factor,
                    matrix=factor if dense else None,
                )
            )
        return SpanMap(tuple(maps), self.log_decay, self.log_weight)


def _product(affine: Affine, factor: Tensor | None, order: range) -> Tensor | None:
    if affine.matrix is None:
        if affine.decay is None:
            return factor
        here = affine.decay.prod(2)
        return here if factor is None else here * factor
    for at in order:
        factor = affine.multiply(at, factor)
    return factor


def _inner(chunk: Chunk) -> Chunk:
    """A chunk seen as the middle of a document, so that a scan neither enters nor leaves."""
    return replace(chunk, first=False, last=False)


def _never(document: int) -> Tensor:
    raise AssertionError("a summary starts from zero")


def _nowhere(document: int, state: Tensor) -> None:
    raise AssertionError("a summary keeps its state")


def _stack(starts: list[States]) -> States:
    if not starts:
        return ()
    return tuple(torch.stack(column) for column in zip(*starts, strict=True))


class _GradientSums:
    """Gradients collected slab by slab, in fixed order."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.inputs = {name: torch.zeros_like(x) for name, x in problem.inputs.items()}
        self.params = {
            name: torch.zeros(x.shape, dtype=problem.compute_dtype, device=x.device)
            for name, x in problem.params.items()
        }

    def add(self, slab: Slab, name: str, value: Tensor) -> None:
        """Add a slab's gradient [B, HV, n, ...] of an input or parameter."""
        if name in self.params:
            self.params[name] += value.sum((0, 2))
            return
        heads = self.problem.inputs[name].shape[2]
        if heads != self.problem.heads:
            value = value.unflatten(1, (heads, self.problem.heads // heads)).sum(2)
        scatter(self.problem.layout, slab, value, self.inputs[name])

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs in their dtype, parameters in theirs."""
        params = {n: g.to(self.problem.params[n].dtype) for n, g in self.params.items()}
        return self.inputs, params

