"""Eager evaluator: the three callables of a spec on real tensors, chunk by chunk, head by head.

Contract: no tracing, no batching, no padding: the last chunk of a document is as short as it is.
It is the plain meaning of a spec, differentiable by autograd, and slow; the compiled operator must
agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexla_dist.spec.layout import (
    Layout,
    States,
    document_spans,
    expand_heads,
    named_states,
    ordered_states,
    scalar_values,
)
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.values import Values

Named = dict[str, Tensor]


def run_chunks(
    spec: LinearAttentionSpec,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor] | None = None,
    scalars: Mapping[str, float] | None = None,
    initial_state: States | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, States | None]:
    """Evaluate a spec through its three callables, `chunk_size` tokens at a time.

    Computes in float64 when an input is float64, else in float32. Arguments as in `run_recurrence`.

    Returns:
        The output `[B, T, HV, ...]` and the final state (or None); a log-scaled spec appends m.

    Raises:
        ArgumentError: names or shapes that do not fit.
    """
    params = params or {}
    layout = Layout.of(spec, inputs, params, cu_seqlens)
    wide = any(x.dtype == torch.float64 for x in (*inputs.values(), *params.values()))
    dtype = torch.float64 if wide else torch.float32
    numbers = scalar_values(spec, scalars or {})
    tokens = {name: expand_heads(x.to(dtype), layout.heads) for name, x in inputs.items()}
    start = named_states(spec, layout, initial_state, dtype)
    spans, finals = [], []
    for batch, document, begin, end in document_spans(layout, cu_seqlens):
        rows = range(*batch.indices(layout.batch))
        documents = range(*document.indices(layout.documents))
        for row, n in zip(rows, documents, strict=True):
            heads = []
            for head in range(layout.heads):
                x = {name: value[row, begin:end, head] for name, value in tokens.items()}
                weights = {name: value[head].to(dtype) for name, value in params.items()}
                p = Values({**weights, **numbers}, "parameter")
                state = {name: value[n, head] for name, value in start.items()}
                heads.append(_Head(spec, p, chunk_size).run(x, state, layout))
            spans.append(torch.stack([out for out, _ in heads], 1))
            finals.append({k: torch.stack([s[k] for _, s in heads]) for k in heads[0][1]})
    output = torch.cat(spans)[None] if layout.packed else torch.stack(spans)
    if not output_final_state:
        return output, None
    states = {name: torch.stack([final[name] for final in finals]) for name in start}
    return output, ordered_states(states)


class _Head:
    """One document of one head."""

    def __init__(self, spec: LinearAttentionSpec, p: Values, chunk_size: int):
        self.spec, self.p, self.chunk_size = spec, p, chunk_size

    def run(self, x: Named, state: Named, layout: Layout) -> tuple[Tensor, Named]:
        spec = self.spec
        length = next(iter(x.values())).shape[0]
        if spec.token_mode is not None and length:
            x = {**x, **spec.token_mode(Values(x, "input"), self.p)}
        outputs = []
        for begin in range(0, length, self.chunk_size):
            chunk = {name: value[begin : begin + self.chunk_size] for name, value in x.items()}
            output, state = self._step(chunk, state)
            outputs.append(output)
        if not outputs:
            first = next(iter(x.values()))
            return first.new_zeros(0, *(layout.sizes[d] for d in spec.output_dims[1:])), state
        return torch.cat(outputs), state

    def _step(self, chunk: Named, state: Named) -> tuple[Tensor, Named]:
        spec = self.spec
        local = dict(spec.chunk_mode(Values(chunk, "input"), self.p))
        scale: Named = {}
        if spec.log_scaled is not None:
            state = dict(state)
            scale, local = self._rescale(state.pop("m"), local)
        entering: Any = state["S"] if spec.single_state else Values(state, "state")
        c = Values(local, "local value")
        output = spec.merge_mode(entering, c)
        leaving = spec.decay_mode(entering, c)
        following = {"S": leaving} if spec.single_state else dict(leaving)
        return output, {**following, **scale}

    def _rescale(self, m: Tensor, local: dict[str, Any]) -> tuple[Named, dict[str, Any]]:
        """The next log scale, and the factors of one chunk; m is a choice and has no gradient."""
        assert self.spec.log_scaled is not None
        decay, weight = local[self.spec.log_scaled.decay], local[self.spec.log_scaled.weight]
        following = torch.maximum(m + decay, weight).detach()
        idle = following == -torch.inf  # nothing was written yet: exp(-inf - -inf) is no number
        carry = torch.where(idle, torch.zeros_like(m), m + decay - following).exp()
        fresh = torch.where(idle, torch.zeros_like(m), weight - following).exp()
        return {"m": following}, {**local, "carry": carry, "fresh": fresh, "m": m}
