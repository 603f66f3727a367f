"""Sharded operators whose states travel by kernels, compared with the whole sequence in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.parallel import SequenceParallelOp, sequence_context, shard_sequence
from flexla_dist.spec.variants.registry import get_variant
from flexla_dist.testing.inputs import CallInputs, make_inputs

STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")
BOUND = 1e-5  # of float32, as a ratio of root mean squares
SIZES = {"K": 4, "V": 3, "D": 5, "M": 3}
PRELOAD = ("flexla_dist.parallel", "flexla_dist.ops.op", "flexla_dist.comm.device_exchange")
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call: an operator, a strategy, shards, documents, states in and out."""

    spec: str
    strategy: str
    lengths: tuple[int, ...]
    documents: tuple[int, ...] | None = None
    batch: int = 1
    initial: bool = True
    final: str = "owner"
    executor: str = "torch"
    segment: int | None = None  # chunks of the segments of a shard
    width: int = 0  # of keys and values, 0: a few
    heads: int = 2
    groups: int | tuple[int, ...] | None = None  # of heads

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@cache
def compiled(name: str) -> LinearAttentionOp:
    return compile(get_variant(name), chunk_size=16)


def whole_inputs(case: Case, dtype: torch.dtype) -> CallInputs:
    """The call's arguments, rounded to float32 and then given as `dtype`."""
    starts = None if case.documents is None else torch.tensor(case.documents)
    given = make_inputs(
        get_variant(case.spec),
        batch=case.batch,
        tokens=case.tokens,
        heads=1,
        value_heads=case.heads,
        sizes=dict.fromkeys(SIZES, case.width) if case.width else SIZES,
        cu_seqlens=starts,
    )
    return given.to(torch.float32).to(dtype)


def weights(shape: torch.Size, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def states_of(state: object) -> tuple[Tensor, ...]:
    if state is None:
        return ()
    return (state,) if isinstance(state, Tensor) else tuple(state)  # type: ignore[arg-type]


def objective(output: Tensor, weight: Tensor, states: tuple[Tensor, ...], share: float) -> Tensor:
    """A weighted sum; each rank counts `share` of the final states."""
    total = (output * weight.to(output)).sum()
    for seed, state in enumerate(states):
        total = total + share * (state * weights(state.shape, 100 + seed).to(state)).sum()
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
    return {name: x.cpu() for name, x in found.items()}


def run_whole(case: Case) -> Values:
    """Output, final states and all gradients of the unsharded operator in float64."""
    given = whole_inputs(case, torch.float64)
    output, final = compiled(case.spec)(
        **given.inputs,
        **given.params,
        **given.scalars,
        initial_state=given.initial_state if case.initial else None,
        output_final_state=True,
        cu_seqlens=given.cu_seqlens,
        executor="torch",
    )
    states = states_of(final) if case.final != "none" else ()
    objective(output, weights(output.shape, 1), states, 1.0).backward()
    return collect(given, output, states)


def run_shard(
    case: Case, rank: int, size: int, device: str = "cpu", backend: str = "device"
) -> Values:
    """The same on one rank in float32: its shards, and its share of what is summed.

    backend: "auto" on a GPU means the device engine.
    """
    group = dist.group.WORLD
    assert group is not None
    given = whole_inputs(case, torch.float32)

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(device).requires_grad_()

    if case.segment is not None:
        compiled(case.spec).executor("triton").segment_chunks = case.segment
    starting = tuple(map(leaf, states_of(given.initial_state))) if case.initial else ()
    op = SequenceParallelOp(
        compiled(case.spec),
        group=group,
        strategy=case.strategy,
        node_size=2 if case.strategy == "hierarchical" else None,
        backend=backend,
        groups=case.groups,
    )
    with sequence_context(group, cu_seqlens=case.documents, lengths=case.lengths):
        given = replace(
            given,
            inputs={n: leaf(shard_sequence(x.detach(), group)) for n, x in given.inputs.items()},
            params={n: leaf(x) for n, x in given.params.items()},
            initial_state=starting[0] if len(starting) == 1 else starting or None,
        )
        output, final = op(
            **given.inputs,
            **given.params,
            **given.scalars,
            initial_state=given.initial_state,
            output_final_state=case.final,
            executor=case.executor,
        )
        whole = torch.Size((output.shape[0], case.tokens, *output.shape[2:]))
        weight = shard_sequence(weights(whole, 1), group)
    share = 1.0 / size if case.final == "broadcast" else 1.0
    objective(output, weight, states_of(final), share).backward()
    plan = op.last_plan
    if plan is not None:
        assert plan.engine == ("device" if backend == "auto" else backend), str(plan)
        assert case.strategy in ("auto", plan.strategy), str(plan)
    return collect(given, output, states_of(final))


def run_shards(
    rank: int, size: int, cases: list[Case], device: str = "cpu", backend: str = "device"
) -> list[Values]:
    """device: of all ranks, or "apart" for a GPU of its own for each."""
    device = f"cuda:{rank}" if device == "apart" else device
    if device != "cpu":
        torch.cuda.set_device(device)
    return [run_shard(case, rank, size, device, backend) for case in cases]


def joined(case: Case, name: str, parts: list[Tensor]) -> Tensor:
    """What the ranks hold, as the whole sequence has it."""
    if name == "output" or name.removeprefix("grad.") in get_variant(case.spec).inputs:
        return torch.cat(parts, 1)
    if name.startswith("final.") and case.final == "broadcast":
        for part in parts[1:]:
            assert torch.equal(part, parts[0]), f"{name} differs between ranks"
        return parts[0]
    return torch.stack(parts).sum(0)


def errors(case: Case, ranks: list[Values]) -> dict[str, float]:
    """Error of every tensor, and of each rank's part of a sharded one: first, middle and last."""
    expected = run_whole(case)
    found = {}
    ends = torch.tensor((0, *case.lengths)).cumsum(0).tolist()
    for name, want in expected.items():
        parts = [values[name] for values in ranks]
        got = joined(case, name, parts)
        assert got.shape == want.shape, f"{case}: {name} has shape {got.shape}, not {want.shape}"
        scale = want.square().mean().sqrt()
        found[name] = ratio(got, want, scale)
        if got.shape[1:2] == (case.tokens,):
            for rank, length in enumerate(case.lengths):
                if length:
                    part = want[:, ends[rank] : ends[rank + 1]]
                    found[f"{name} of rank {rank}"] = ratio(parts[rank], part, scale) / 3
    return found


def ratio(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """Root mean square of the error, relative to that of what is wanted or a tenth of `scale`."""
    gap = (got.double() - want).square().mean().sqrt()
    return float(gap / torch.maximum(want.square().mean().sqrt(), 0.1 * scale).clamp(min=1e-6))
