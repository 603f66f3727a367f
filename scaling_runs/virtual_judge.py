"""What results of virtual ranks are compared with, and under which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexla_dist.testing.budget import BOUNDS, measure
from flexla_dist.testing.inputs import CallInputs
from scaling_runs.virtual_run import Outcome

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Errors:
    """RMSE ratios by result; used: the largest share of a bound, over a tensor or in one of its
    chunks; worst: where it is."""

    ratios: Mapping[str, float]
    used: float
    worst: str

    @property
    def good(self) -> bool:
        """Every result keeps to its bounds; NaN does not."""
        return self.used <= 1.0


def first_heads(call: CallInputs, seed: Tensor, heads: int) -> tuple[CallInputs, Tensor]:
    """A call and the gradient of its output, of the first heads alone."""
    inputs = {name: x[:, :, :heads] for name, x in call.inputs.items()}
    params = {name: x[:heads] for name, x in call.params.items()}
    return replace(call, inputs=inputs, params=params), seed[:, :, :heads]


def reference(op: Any, call: CallInputs, seed: Tensor) -> Results:
    """Output and gradients of the unsharded operator in float64."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    inputs = {name: leaf(x) for name, x in call.inputs.items()}
    params = {name: leaf(x) for name, x in call.params.items()}
    output = op(**inputs, **params, **call.scalars, executor="torch")[0]
    leaves = {**inputs, **params}
    grads = torch.autograd.grad(output, list(leaves.values()), seed.double())
    found = {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    return {"o": output.detach(), **found}


def judge(found: Outcome, want: Results, call: CallInputs, dtype: torch.dtype) -> Errors:
    """Errors under the bounds of a dtype; of the heads that `want` has."""
    bounds, ratios, used, worst = BOUNDS[dtype], dict[str, float](), -1.0, ""
    got = {"o": found.output, **{f"d{name}": x for name, x in found.gradients.items()}}
    for name, x in got.items():
        of_heads = name[1:] in call.params
        heads = want[name].shape[0 if of_heads else 2]
        mine = x[:heads] if of_heads else x[:, :, :heads]
        report = measure(mine, want[name], dim=None if of_heads else 1)
        bound = bounds.of(name)
        share = max(report.ratio / bound, report.worst_chunk / (3 * bound))
        if not share <= used:  # NaN is worst
            used, worst = share, f"{name} chunk {report.chunk_index}"
        column = "dparams" if of_heads else name
        ratios[column] = max(ratios.get(column, 0.0), report.ratio)
    return Errors(ratios, used, worst)


def differs(a: Outcome, b: Outcome) -> Tensor:
    """Whether a bit differs, on the device: NaN is equal to itself."""
    kinds = {2: torch.int16, 4: torch.int32}
    pairs = [(a.output, b.output)]
    pairs += [(x, b.gradients[name]) for name, x in a.gradients.items()]
    return torch.stack(
        [(x.view(kinds[x.itemsize]) != y.view(kinds[y.itemsize])).any() for x, y in pairs]
    ).any()
