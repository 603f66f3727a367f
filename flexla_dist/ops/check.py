"""`compile(check=True)`: does a spec mean the same at every chunk size?

Contract: runs the spec in float64 on seeded random data with chunks of 1, 5 and 64 tokens and
compares. The three callables describe one recurrence only if all agree; otherwise CheckError
names the stage at fault: states that differ point to `decay_mode`, outputs that differ while the
states agree to `merge_mode`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexla_dist.compiler.executor.bind import bind
from flexla_dist.compiler.trace.stages import LOG_SCALE
from flexla_dist.errors import CheckError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM
from flexla_dist.spec.spec import LinearAttentionSpec

if TYPE_CHECKING:
    from flexla_dist.ops.op import LinearAttentionOp

CHUNK_SIZES = (1, 5, 64)
TOKENS = 67
TOLERANCE = 1e-8


def check_spec(op: LinearAttentionOp) -> None:
    """Compare chunk sizes; raises CheckError."""
    spec = op.spec
    inputs, params, scalars = _random_arguments(spec)
    results = {}
    for size in CHUNK_SIZES:
        problem = bind(spec, inputs, params, scalars, chunk_size=size)
        ran = op.executor("torch").forward(problem, problem.zero_state())
        results[size] = (ran.output, *_comparable(problem.state_names, ran.exit))
    reference = results[1]
    for size in CHUNK_SIZES[1:]:
        names = ("output", *spec.state_dims)
        errors = {
            name: _relative(a, b)
            for name, a, b in zip(names, results[size], reference, strict=True)
        }
        wrong = [name for name in spec.state_dims if not errors[name] <= TOLERANCE]
        if wrong:
            raise CheckError(
                f"{spec.name}.decay_mode: the state {wrong[0]!r} after {TOKENS} tokens differs by "
                f"{errors[wrong[0]]:.2g} (relative) between chunks of {size} and of 1; "
                "decay_mode, or the values of chunk_mode that it reads, do not describe one "
                "recurrence"
            )
        if not errors["output"] <= TOLERANCE:
            raise CheckError(
                f"{spec.name}.merge_mode: the output differs by {errors['output']:.2g} "
                f"(relative) between chunks of {size} and of 1 while the states agree; "
                "merge_mode, or the values of chunk_mode that it reads, treat the tokens of a "
                "chunk differently from its past"
            )


def _comparable(names: tuple[str, ...], states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """True states: log-scaled ones times exp(m)."""
    if names[-1] != LOG_SCALE:
        return states
    scale = states[-1].exp()
    return tuple(s * scale[(...,) + (None,) * (s.dim() - 2)] for s in states[:-1])


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def _random_arguments(
    spec: LinearAttentionSpec,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    sizes = {UNIT_DIM: 1}
    for item in (*spec.input_specs.values(), *spec.param_specs.values()):
        for dim in item.dims:
            if dim != TOKEN_DIM:
                sizes.setdefault(dim, 4 + len(sizes))

    def random(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {}
    for name, item in spec.input_specs.items():
        x = random(1, TOKENS, 2, *(sizes[dim] for dim in item.dims[1:]))
        inputs[name] = -torch.nn.functional.softplus(x) if item.log_decay else x
    params = {n: random(2, *(sizes[d] for d in i.dims)) for n, i in spec.param_specs.items()}
    scalars = {n: 0.7 if default is None else default for n, default in spec.scalars.items()}
    return inputs, params, scalars
