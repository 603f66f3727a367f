"""Every system against the unsharded operator, forward and backward, and its bytes by formula."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.testing.inputs import CallInputs, make_inputs
from flexla_dist.testing.ranks import run_ranks

from .sharding import PRELOAD, compiled, spec_of, weights_like

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs.baselines import (
    Refused,
    Settings,
    Sharding,
    counted,
    get_system,
    sizes_of,
)

BOUND = 1e-10
SHARDS = {2: ((9, 4), (6, 6)), 3: ((5, 0, 8), (4, 4, 4)), 4: ((7, 1, 0, 6), (3, 3, 3, 3))}
DECAYS = ("linear_attn", "linear_attn_normalized", "simple_gla", "mamba2", "gla", "hgrn")
DENSE = ("delta_rule", "gated_delta_rule", "kda")
VARIANTS = {
    "lasp": (*DECAYS, *DENSE),
    "lasp2_published": ("linear_attn", "linear_attn_normalized"),
    "lasp2": (*DECAYS, *DENSE),
    "lasp2_naive": (*DECAYS, *DENSE),
    "zeco": DECAYS,
    "ulysses": (*DECAYS, *DENSE),
    "chain": ("simple_gla", "gated_delta_rule"),
    "log_scan": ("gla", "kda"),
    "hierarchical": ("simple_gla", "gated_delta_rule"),
    "all_gather": ("linear_attn", "delta_rule"),
}
SETTINGS = Settings(blocks=3, panels=2, node_size=2, timeout=30.0)
Values = dict[str, Tensor]
Counts = list[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """One call: a system, a spec, shards, rows, heads of q and of v."""

    system: str
    spec: str
    lengths: tuple[int, ...]
    batch: int
    heads: tuple[int, int]


def whole_inputs(case: Case) -> CallInputs:
    return make_inputs(
        spec_of(case.spec),
        batch=case.batch,
        tokens=sum(case.lengths),
        heads=case.heads[0],
        value_heads=case.heads[1],
        sizes={"K": 4, "V": 3, "D": 5},
    )


def values_of(given: CallInputs, output: Tensor) -> Values:
    found = {"output": output.detach()}
    for name, leaf in {**given.inputs, **given.params}.items():
        assert leaf.grad is not None, f"{name} got no gradient"
        found[f"grad.{name}"] = leaf.grad
    return found


def run_whole(case: Case) -> Values:
    given = whole_inputs(case)
    output, _ = compiled(case.spec)(**given.inputs, **given.params, **given.scalars)
    (output * weights_like(output, 1)).sum().backward()
    return values_of(given, output)


def run_case(rank: int, case: Case) -> tuple[Values, Counts, Counts]:
    """Results; bytes (sent, received) counted and computed of both directions. The second pass is
    counted: the first makes connections and agreements."""
    given = whole_inputs(case)
    system, op = get_system(case.system), compiled(case.spec)
    sharding = Sharding.of(None, case.lengths)
    attend = system.prepare(op, sharding, SETTINGS)
    here = slice(sharding.offset, sharding.offset + sharding.tokens)
    for name, x in given.inputs.items():
        given.inputs[name] = x.detach()[:, here].clone().requires_grad_()
    traffic = []
    for _ in range(2):
        for leaf in (*given.inputs.values(), *given.params.values()):
            leaf.grad = None
        with counted() as forward:
            output = attend(given.inputs, given.params, given.scalars)
        whole = output.new_empty(output.shape[0], sum(case.lengths), *output.shape[2:])
        with counted() as backward:
            (output * weights_like(whole, 1)[:, here]).sum().backward()
        traffic = [forward, backward]
        dist.barrier()
    nodes = [r // 2 for r in range(len(case.lengths))]
    sizes = sizes_of(op, given.inputs, given.params, given.scalars, case.lengths, nodes)
    assert system.formula is not None
    expected = [system.formula(SETTINGS)(sizes, rank, reverse) for reverse in (False, True)]
    counts, computed = ([(t.sent, t.received) for t in both] for both in (traffic, expected))
    return values_of(given, output), counts, computed


def run_cases(rank: int, world: int, cases: list[Case]) -> list[tuple[Values, Counts, Counts]]:
    return [run_case(rank, case) for case in cases]


def errors(case: Case, ranks: list[Values]) -> dict[str, float]:
    """Largest error of every tensor relative to its largest value; parameters' gradients are sums
    over the ranks."""
    found = {}
    for name, want in run_whole(case).items():
        parts = [values[name] for values in ranks]
        rows = name == "output" or name.removeprefix("grad.") in spec_of(case.spec).inputs
        got = torch.cat(parts, 1) if rows else torch.stack(parts).sum(0)
        found[name] = float((got - want).abs().max() / want.abs().max())
    return found


def cases_for(ranks: int) -> list[Case]:
    """Equal and unequal shards, one and two rows, in turn; Ulysses has heads for every rank."""
    found = []
    for system, variants in VARIANTS.items():
        heads = (12, 12) if system == "ulysses" else (2, 4)
        for place, spec in enumerate(variants):
            turn = (place + ranks) % 4
            found.append(Case(system, spec, SHARDS[ranks][turn % 2], 1 + turn // 2, heads))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_systems_equal_the_unsharded_operator(ranks: int) -> None:
    cases = cases_for(ranks)
    results = run_ranks(run_cases, ranks, cases, preload=(*PRELOAD, "scaling_runs.baselines"))
    wrong = []
    for place, case in enumerate(cases):
        found = [values[place] for values in results]
        for name, error in errors(case, [values for values, _, _ in found]).items():
            if not error <= BOUND:
                wrong.append(f"{case}: {name} is off by {error:.2e}")
        for rank, (_, got, computed) in enumerate(found):
            if got != computed:
                wrong.append(f"{case} rank {rank}: counted {got}, by formula {computed}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("system", "spec", "message"),
    [
        ("lasp2_published", "simple_gla", "has no decay, simple_gla has one; use lasp2"),
        ("zeco", "gated_delta_rule", "blocks of state rows, which a dense M mixes"),
        ("fla_cp", "gla", "no context parallelism for gla; it has it for gated_delta_rule, kda"),
        ("lasp", "mlstm", "carries plain states, and those of mlstm have a log scale"),
        ("lasp3", "gla", "no system 'lasp3'"),
    ],
)
def test_what_a_system_cannot_do_is_refused(system: str, spec: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        get_system(system).prepare(compiled(spec), None)  # type: ignore[arg-type]
