"""Summary, scan, local pass: one autograd node for the systems that exchange elements.

Forward summarises the shard, scans, and completes the local pass from the state that entered;
backward does the same with gradients, reversed. As in our own call, the local pass stops for the
scan and goes on with what needs no state meanwhile, so that nothing is computed twice. On CPUs the
heads may be cut in panels: the scan of one runs beside the summary and the local pass of others. On
a GPU they never are: a part of the heads leaves processors idle, which costs more than the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexla_dist.comm.element import Element, zero_state
from flexla_dist.parallel.attend import full_precision
from flexla_dist.parallel.local_call import as_element
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

    panels: parts into which the heads are cut, on CPUs. whole_summaries: the last rank in scan
    order summarises too, though nobody needs what it finds.
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
        panels = attend.panels if tensors[0].device.type == "cpu" else 1
        found = []
        for part in head_panels(spec, inputs, panels):
            some = slice_inputs(spec, inputs, part)
            held = {name: x[part.value_heads] for name, x in params.items()}
            found.append(Shard.bind(attend.op, executor, attend.sharding, some, held, self.scalars))
        return found

    def start(self, shard: Shard, open_call: Callable[[], Any], reverse: bool) -> tuple[Any, Wait]:
        """Open the call, summarise and begin the scan; the last rank in scan order only takes part.
        Its call is opened too: what it keeps is then what the other direction goes on from."""
        attend = self.attend
        line = attend.sharding.line(reverse)
        alone = line.next_rank is None and line.prev_rank is None
        opened = None if shard.empty or alone else open_call()
        if opened is not None and (line.next_rank is not None or attend.whole_summaries):
            element = as_element(opened.summary(-1))
        else:
            problem = shard.problem
            key = (reverse, problem.batch, problem.heads, problem.compute_dtype)
            if key not in attend._blanks:
                attend._blanks[key] = shard.identity(reverse)
            element = attend._blanks[key]
        return opened, attend.scan.start(element, zero_state(element), line)


class _ScanNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        with full_precision(tensors):
            shards = call.shards(tensors)
            begun = [call.start(shard, shard.open, False) for shard in shards]
            outputs, kept, counts = [], [], []
            for shard, (opened, wait) in zip(shards, begun, strict=True):
                if opened is not None:
                    opened.proceed()
                entry = wait()
                output, _, saved = shard.forward(entry, opened)
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
            parts = list(zip(shards, pieces, grads, strict=True))
            begun = [
                call.start(shard, partial(shard.open_adjoint, saved, entry, grad), True)
                for shard, (entry, saved), grad in parts
            ]
            rows, held = [], []
            for (shard, (entry, saved), grad), (opened, wait) in zip(parts, begun, strict=True):
                if opened is not None:
                    opened.proceed()
                some, few, _ = shard.backward(saved, entry, grad, wait(), opened)
                rows.append(some)
                held.append(few)
        joined = [torch.cat(parts, 2) for parts in zip(*rows, strict=True)]
        joined += [torch.cat(parts, 0) for parts in zip(*held, strict=True)]
        return (None, *joined)


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
