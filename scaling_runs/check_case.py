"""One case of `check_gpu.py`: the call in every dtype against one float64 reference.

Contract: the calls of all dtypes are joined along the heads into one float64 call, whose outputs
and gradients are the reference: token recurrence up to `ORACLE_TOKENS`, the float64 torch executor
beyond it. Heads are independent, so each dtype is compared with its own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.spec.oracle import run_recurrence
from flexla_dist.testing.budget import BOUNDS, measure
from flexla_dist.testing.inputs import CallInputs, make_inputs
from flexla_dist.testing.poison import poisoned_memory
from scaling_runs.check_cases import ORACLE_TOKENS, Case

HEADS, VALUE_HEADS = 1, 2
ERROR_COLUMNS = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dx", "ddt", "dparams", "dstate")
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """A call in one dtype and the gradients that reach its results."""

    dtype: str
    call: CallInputs
    cotangents: tuple[Tensor, ...]


def make_part(case: Case, dtype: str, seed: int, device: torch.device) -> Part:
    """Seeded arguments of a case; gradients of the results are in their dtypes."""
    spec, kind = case.spec, getattr(torch, dtype)
    offsets = case.cu_seqlens
    call = make_inputs(
        spec,
        batch=case.batch,
        tokens=case.T,
        heads=HEADS,
        value_heads=VALUE_HEADS,
        sizes=case.sizes,
        dtype=kind,
        cu_seqlens=None if offsets is None else torch.tensor(offsets),
        seed=seed,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(seed + 1)
    dims = [case.sizes[dim] for dim in spec.output_dims[1:]]
    shapes = [(case.batch, case.T, VALUE_HEADS, *dims)]
    shapes += [tuple(state.shape) for state in _states(call)]
    wide = torch.float64 if kind == torch.float64 else torch.float32
    kinds = [kind, *(wide for _ in shapes[1:])]
    cotangents = tuple(
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(k)
        for shape, k in zip(shapes, kinds, strict=True)
    )
    return Part(dtype, call, cotangents)


def _states(call: CallInputs) -> tuple[Tensor, ...]:
    state = call.initial_state
    return state if isinstance(state, tuple) else (state,)


def join(parts: Sequence[Part]) -> Part:
    """All parts as one float64 call, side by side along the heads."""

    def cat(tensors: list[Tensor], dim: int) -> Tensor:
        joined = torch.cat([x.detach().double() for x in tensors], dim)
        return joined.requires_grad_(tensors[0].requires_grad)

    first = parts[0].call
    states = tuple(
        cat(list(group), 1) for group in zip(*(_states(p.call) for p in parts), strict=True)
    )
    call = replace(
        first,
        inputs={n: cat([p.call.inputs[n] for p in parts], 2) for n in first.inputs},
        params={n: cat([p.call.params[n] for p in parts], 0) for n in first.params},
        initial_state=states if isinstance(first.initial_state, tuple) else states[0],
    )
    groups = zip(*(p.cotangents for p in parts), strict=True)
    cotangents = tuple(cat(list(g), 2 if i == 0 else 1) for i, g in enumerate(groups))
    return Part("float64", call, cotangents)


def results_of(part: Part, output: Tensor, state: Any) -> Results:
    """Outputs, final states and gradients by name."""
    states = state if isinstance(state, tuple) else (state,)
    leaves = part.call.leaves()
    grads = torch.autograd.grad(
        (output, *states), list(leaves.values()), part.cotangents, allow_unused=True
    )
    named = {"o": output.detach(), **{f"state{i}": x.detach() for i, x in enumerate(states)}}
    for (name, x), gradient in zip(leaves.items(), grads, strict=True):
        named[f"d{name}"] = torch.zeros_like(x) if gradient is None else gradient
    return named


def run_op(op: LinearAttentionOp, part: Part, executor: str) -> Results:
    """The operator with poisoned memory, forward and backward."""
    call = part.call
    with poisoned_memory():
        output, state = op(
            **call.inputs,
            **call.params,
            **call.scalars,
            initial_state=call.initial_state,
            output_final_state=True,
            cu_seqlens=call.cu_seqlens,
            executor=executor,
        )
        return results_of(part, output, state)


def run_oracle(case: Case, part: Part) -> Results:
    """The token recurrence in float64."""
    call = part.call
    output, state = run_recurrence(
        case.spec,
        call.inputs,
        call.params,
        call.scalars,
        call.initial_state,
        True,
        call.cu_seqlens,
    )
    return results_of(part, output, state)


def reference(case: Case, op: LinearAttentionOp, joined: Part) -> Results:
    """The float64 results that everything is compared with."""
    if case.T <= ORACLE_TOKENS:
        return run_oracle(case, joined)
    return run_op(op, joined, "torch")


def own_heads(name: str, x: Tensor, index: int, count: int, inputs: Sequence[str]) -> Tensor:
    """The heads of part `index` of a joined result."""
    if name == "o" or name[1:] in inputs:
        dim = 2
    elif "state" in name:
        dim = 1
    else:
        dim = 0
    return x.chunk(count, dim)[index]


@dataclass
class Verdict:
    """Errors by column, the result that uses most of its bound, and whether all keep theirs."""

    errors: dict[str, float]
    worst: str
    ok: bool


def judge(part: Part, got: Results, want: Results) -> Verdict:
    """Compare results with their part of the reference under the budget of the dtype."""
    bounds = BOUNDS[getattr(torch, part.dtype)]
    errors: dict[str, float] = {}
    worst, share = "", -1.0
    for name, x in got.items():
        tokens = name == "o" or name[1:] in part.call.inputs
        report = measure(x, want[name], dim=1 if tokens else None)
        bound = bounds.of(name)
        column = column_of(name, part.call)
        errors[column] = max(errors.get(column, 0.0), report.ratio)
        used = max(report.ratio / bound, report.worst_chunk / (3 * bound))
        if used > share:
            share = used
            place = f" chunk {report.chunk_index}" if tokens else ""
            worst = f"{name}{place} {used:.2f}x"
    return Verdict(errors, worst, share <= 1.0)


def column_of(name: str, call: CallInputs) -> str:
    """The column of a result's error: parameters and states share one each."""
    if name.startswith("state"):
        return "state"
    if name.startswith("dinitial_state"):
        return "dstate"
    return "dparams" if name[1:] in call.params else name


def same_bits(a: Results, b: Results) -> bool:
    """Are two results equal bit for bit (NaN included)?"""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return all(
        torch.equal(
            a[name].contiguous().view(kinds[a[name].element_size()]),
            b[name].contiguous().view(kinds[b[name].element_size()]),
        )
        for name in a
    )
