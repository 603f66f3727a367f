"""Summary, scan, local pass: one autograd node for the systems that exchange elements.

Forward summarises the shard, scans, and runs the local pass from the state that entered; backward
does the same with gradients, reversed. With several panels of heads the scan of one panel runs
beside the summary and the local pass of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexla_dist.comm.element import Element, zero_state
from flexla_dist.parallel.attend import full_precision
from scaling_runs.baselines.scans import Scan, Wait
from scaling_runs.baselines.shard import (
    Shard,
    Sharding,
    Values,
    executor_of,
    head_panels,
    slice_inputs,
)


@dataclass(eq=False)
class ScanAttend:
    """A callable (inputs, params, scalars) -> output on this rank's shard.

    panels: parts into which the heads are cut. whole_summaries: the last rank in scan order
    summarises too, though nobody needs what it finds.
    """

    op: Any
    sharding: Sharding
    scan: Scan
    panels: int = 1
    whole_summaries: bool = False
    _blanks: dict[tuple, Element] = field(default_factory=dict, repr=False)

    def __call__(self, inputs: Values, params: Values, scalars: Mapping[str, float]) -> Tensor:
        """The output [B, T_local, HV, V]."""
        call = _Call(self, tuple(inputs), tuple(params), dict(scalars))
        return _ScanNode.apply(call, *inputs.values(), *params.values())


@dataclass(eq=False)
class _Call:
    attend: ScanAttend
    input_names: tuple[str, ...]
    param_names: tuple[str, ...]
    scalars: dict[str, float]

    def shards(self, tensors: tuple[Tensor, ...]) -> list[Shard]:
        """The call bound for each panel of heads."""
        attend, count = self.attend, len(self.input_names)
        inputs = dict(zip(self.input_names, tensors[:count], strict=True))
        params = dict(zip(self.param_names, tensors[count:], strict=True))
        executor, spec = executor_of(attend.op, tensors), attend.op.spec
        found = []
        for part in head_panels(spec, inputs, attend.panels):
            some = slice_inputs(spec, inputs, part)
            held = {name: x[part.value_heads] for name, x in params.items()}
            found.append(Shard.bind(attend.op, executor, attend.sharding, some, held, self.scalars))
        return found

    def start(self, shard: Shard, make: Callable[[], Element], reverse: bool) -> Wait:
        """Summarise and begin the scan; the last rank in scan order only takes part."""
        attend = self.attend
        line = attend.sharding.line(reverse)
        if not shard.empty and (line.next_rank is not None or attend.whole_summaries):
            element = make()
        else:
            problem = shard.problem
            key = (reverse, problem.batch, problem.heads, problem.compute_dtype)
            if key not in attend._blanks:
                attend._blanks[key] = shard.identity(reverse)
            element = attend._blanks[key]
        return attend.scan.start(element, zero_state(element), line)


class _ScanNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        with full_precision(tensors):
            shards = call.shards(tensors)
            waits = [call.start(shard, shard.element, False) for shard in shards]
            outputs, kept, counts = [], [], []
            for shard, wait in zip(shards, waits, strict=True):
                entry = wait()
                output, _, saved = shard.forward(entry)
                outputs.append(output)
                kept += [*entry, *saved]
                counts.append((len(entry), len(saved)))
        ctx.call, ctx.counts, ctx.tensors = call, counts, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        tensors, kept = ctx.saved_tensors[: ctx.tensors], ctx.saved_tensors[ctx.tensors :]
        with full_precision(tensors):
            shards = call.shards(tensors)
            pieces = _cut(kept, ctx.counts)
            grads = grad_output.split([shard.problem.heads for shard in shards], 2)
            waits = []
            for shard, (entry, saved), grad in zip(shards, pieces, grads, strict=True):
                waits.append(call.start(shard, _adjoint(shard, saved, entry, grad), True))
            rows, held = [], []
            for shard, (entry, saved), grad, wait in zip(shards, pieces, grads, waits, strict=True):
                some, few, _ = shard.backward(saved, entry, grad, wait())
                rows.append(some)
                held.append(few)
        joined = [torch.cat(parts, 2) for parts in zip(*rows, strict=True)]
        joined += [torch.cat(parts, 0) for parts in zip(*held, strict=True)]
        return (None, *joined)


def _adjoint(
    shard: Shard, saved: tuple[Tensor, ...], entry: tuple[Tensor, ...], grad: Tensor
) -> Callable[[], Element]:
    return lambda: shard.adjoint_element(saved, entry, grad)


def _cut(
    kept: tuple[Tensor, ...], counts: list[tuple[int, int]]
) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """(entry, saved) of each panel."""
    found, at = [], 0
    for entries, saved in counts:
        middle, end = at + entries, at + entries + saved
        found.append((tuple(kept[at:middle]), tuple(kept[middle:end])))
        at = end
    return found
