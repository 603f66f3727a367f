"""Sharded operators compared with the same operator on the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.parallel import SequenceParallelOp, sequence_context, shard_sequence
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.registry import get_variant, variant_names
from flexla_dist.testing.inputs import CallInputs, make_inputs

from ..unit.extra_specs import EXTRA_SPECS

SPECS = (*variant_names(), *EXTRA_SPECS)
STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")
PRELOAD = ("flexla_dist.parallel", "flexla_dist.ops.op", "flexla_dist.testing.inputs")
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call: a spec, a strategy, shards, documents, states in and out."""

    spec: str
    strategy: str
    lengths: tuple[int, ...]
    documents: tuple[int, ...] | None = None
    batch: int = 1
    initial: bool = True
    final: str = "owner"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@cache
def compiled(name: str) -> LinearAttentionOp:
    return compile(spec_of(name), chunk_size=4)


def spec_of(name: str) -> LinearAttentionSpec:
    return EXTRA_SPECS[name] if name in EXTRA_SPECS else get_variant(name)


def whole_inputs(case: Case) -> CallInputs:
    starts = None if case.documents is None else torch.tensor(case.documents)
    sizes = {"K": 4, "V": 3, "D": 5, "M": 3}
    given = make_inputs(
        spec_of(case.spec), batch=case.batch, tokens=case.tokens, sizes=sizes, cu_seqlens=starts
    )
    if case.spec == "mlstm":
        with torch.no_grad():
            gate = given.inputs["i"]
            gate.copy_(gate * 40).clamp_(-80, 80)
    return given


def weights_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64)


def states_of(state: Any) -> tuple[Tensor, ...]:
    if state is None:
        return ()
    return (state,) if isinstance(state, Tensor) else tuple(state)


def objective(output: Tensor, weight: Tensor, states: tuple[Tensor, ...], share: float) -> Tensor:
    """A weighted sum; each rank counts `share` of the final states, and m has no gradient."""
    total = (output * weight).sum()
    for seed, state in enumerate(states):
        if state.requires_grad:
            total = total + share * (state * weights_like(state, 100 + seed)).sum()
    return total


def collect(given: CallInputs, output: Tensor, states: tuple[Tensor, ...]) -> Values:
    found = {"output": output.detach()}
    found |= {f"final.{i}": state.detach() for i, state in enumerate(states)}
    for name, leaf in {**given.inputs, **given.params}.items():
        assert leaf.grad is not None, f"{name} got no gradient"
        found[f"grad.{name}"] = leaf.grad
    for i, leaf in enumerate(states_of(given.initial_state)):
        if leaf.grad is not None:
            found[f"initial.{i}"] = leaf.grad
    return found


def run_whole(case: Case) -> Values:
    """Output, final states and all gradients of the unsharded operator."""
    given = whole_inputs(case)
    output, final = compiled(case.spec)(
        **given.inputs,
        **given.params,
        **given.scalars,
        initial_state=given.initial_state if case.initial else None,
        output_final_state=True,
        cu_seqlens=given.cu_seqlens,
    )
    states = states_of(final) if case.final != "none" else ()
    objective(output, weights_like(output, 1), states, 1.0).backward()
    return collect(given, output, states)


def run_shard(case: Case, rank: int, world: int) -> Values:
    """The same on one rank: shards of outputs and input gradients, its share of the others."""
    group = dist.group.WORLD
    assert group is not None
    given = whole_inputs(case)
    op = SequenceParallelOp(
        compiled(case.spec),
        group=group,
        strategy=case.strategy,
        node_size=2 if case.strategy == "hierarchical" else None,
        timeout=30.0,
    )
    with sequence_context(group, cu_seqlens=case.documents, lengths=case.lengths):
        for name, x in given.inputs.items():
            given.inputs[name] = shard_sequence(x.detach(), group).requires_grad_()
        output, final = op(
            **given.inputs,
            **given.params,
            **given.scalars,
            initial_state=given.initial_state if case.initial else None,
            output_final_state=case.final,
        )
        whole = torch.empty(output.shape[0], case.tokens, *output.shape[2:], dtype=output.dtype)
        weight = shard_sequence(weights_like(whole, 1), group)
    share = 1.0 / world if case.final == "broadcast" else 1.0
    objective(output, weight, states_of(final), share).backward()
    return collect(given, output, states_of(final))


def run_shards(rank: int, world: int, cases: list[Case]) -> list[Values]:
    return [run_shard(case, rank, world) for case in cases]


def joined(case: Case, name: str, parts: list[Tensor]) -> Tensor:
    """What the ranks hold, as the whole sequence has it."""
    inputs = spec_of(case.spec).inputs
    if name == "output" or name.removeprefix("grad.") in inputs:
        return torch.cat(parts, 1)
    if name.startswith("final.") and case.final == "broadcast":
        for part in parts[1:]:
            assert torch.equal(part, parts[0]), f"{name} differs between ranks"
        return parts[0]
    return torch.stack(parts).sum(0)


def errors(case: Case, ranks: list[Values]) -> dict[str, float]:
    """Largest error of every tensor, relative to its largest value.

    Values are of order one; a gradient that cancels to almost nothing (of q in mLSTM, where a token
    outweighs all others) is not asked to be exact in what is left.
    """
    expected = run_whole(case)
    found = {}
    for name, want in expected.items():
        assert all(name in values for values in ranks), f"{case}: {name} is missing on a rank"
        got = joined(case, name, [values[name] for values in ranks])
        assert got.shape == want.shape, f"{case}: {name} has shape {got.shape}, not {want.shape}"
        same = got == want
        gap = torch.where(same, 0.0, (got - want).abs())
        scale = torch.where(want.isfinite(), want.abs(), 0.0)
        found[name] = float(gap.max() / scale.max().clamp(min=1e-3)) if gap.numel() else 0.0
    return found
