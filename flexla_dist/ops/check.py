"""`compile(check=True)`: does a spec mean the same at every chunk size, and as its recurrence?

Contract: runs the spec in float64 on seeded random data with chunks of 1, 5 and 64 tokens and
compares. The three callables describe one recurrence only if all agree; otherwise CheckError
names the stage at fault: states that differ point to `decay_mode`, outputs that differ while the
states agree to `merge_mode`. A spec with a `recurrence` is then compared with it, gradients too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexla_dist.compiler.executor.bind import bind
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.trace.stages import LOG_SCALE
from flexla_dist.errors import CheckError
from flexla_dist.ops.autograd import Call, attend
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM
from flexla_dist.spec.oracle import run_recurrence, true_states
from flexla_dist.spec.spec import LinearAttentionSpec

if TYPE_CHECKING:
    from flexla_dist.ops.op import LinearAttentionOp

CHUNK_SIZES = (1, 5, 64)
TOKENS = 67
TOLERANCE = 1e-8
GRADIENT_FLOOR = 1e-3  # of the largest gradient: what is smaller is judged on that scale
Tensors = dict[str, Tensor]


def check_spec(op: LinearAttentionOp) -> None:
    """Compare chunk sizes, and the chunk form with the recurrence if any; raises CheckError."""
    inputs, params, scalars = _random_arguments(op.spec)
    _compare_chunk_sizes(op, inputs, params, scalars)
    if op.spec.recurrence is not None:
        _compare_recurrence(op, inputs, params, scalars)


def _compare_chunk_sizes(
    op: LinearAttentionOp, inputs: Tensors, params: Tensors, scalars: dict[str, float]
) -> None:
    spec = op.spec
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


def _compare_recurrence(
    op: LinearAttentionOp, inputs: Tensors, params: Tensors, scalars: dict[str, float]
) -> None:
    spec = op.spec
    for x in (*inputs.values(), *params.values()):
        x.requires_grad_()
    problem = bind(spec, inputs, params, scalars, chunk_size=CHUNK_SIZES[-1])
    entry = _random_entry(problem)
    leaves = {**inputs, **params}
    leaves |= {f"initial {n}": s for n, s in zip(spec.state_dims, entry, strict=False)}
    tensors = (*problem.inputs.values(), *problem.params.values())
    ran = attend(op.executor("torch"), Call.of(problem), entry, tensors)
    mine = (ran[0], *_comparable(problem.state_names, ran[1:]))
    names = ("output", *(f"state {n!r}" for n in spec.state_dims))
    theirs = _run_recurrence(spec, inputs, params, scalars, entry)
    for name, a, b in zip(names, mine, theirs, strict=True):
        if a.shape != b.shape:
            raise CheckError(
                f"{spec.name}.recurrence: {name} has shape {tuple(b.shape)} after {TOKENS} tokens; "
                f"expected {tuple(a.shape)}: it sees inputs [B, HV, ...], states [B, HV, ...] and "
                "parameters [HV, ...], and returns the next state and the output of one token"
            )
    errors = {name: _relative(a, b) for name, a, b in zip(names, mine, theirs, strict=True)}
    found, expected = (_gradients(results, leaves) for results in (mine, theirs))
    floor = GRADIENT_FLOOR * max(float(x.norm()) for x in expected)
    for name, a, b in zip(leaves, found, expected, strict=True):
        error = float((a - b).norm()) / max(float(b.norm()), floor, 1e-300)
        errors[f"gradient of {name}"] = error
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        listed = ", ".join(f"{name} {error:.2g}" for name, error in wrong.items())
        raise CheckError(
            f"{spec.name}.recurrence: the chunk form and the recurrence differ over {TOKENS} "
            f"tokens in float64: {listed} (relative; the bound is {TOLERANCE:.0e}). Chunks of "
            f"{', '.join(map(str, CHUNK_SIZES))} tokens agree with each other, so the recurrence "
            "and the three callables are two different variants: correct one of them"
        )


def _random_entry(problem: Problem) -> tuple[Tensor, ...]:
    """States to start from, differentiable; a log scale starts at 0."""
    generator = torch.Generator().manual_seed(1)
    states = []
    for name in problem.state_names:
        shape = problem.state_shape(name)
        if name == LOG_SCALE:
            states.append(torch.zeros(shape, dtype=torch.float64))
            continue
        x = 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        states.append(x.requires_grad_())
    return tuple(states)


def _run_recurrence(
    spec: LinearAttentionSpec,
    inputs: Tensors,
    params: Tensors,
    scalars: dict[str, float],
    entry: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    try:
        output, states = run_recurrence(spec, inputs, params, scalars, entry)
    except Exception as error:
        raise CheckError(
            f"{spec.name}.recurrence: it failed on one token, {type(error).__name__}: {error}. It "
            "sees x.<input> [B, HV, ...], states [B, HV, ...] and p.<parameter> [HV, ...], and "
            "returns (next state, output of the token)"
        ) from error
    assert states is not None
    return (output, *true_states(spec, states))


def _gradients(results: tuple[Tensor, ...], leaves: Tensors) -> tuple[Tensor, ...]:
    """Gradients of one number that depends on all results; zeros where it does not depend."""
    generator = torch.Generator().manual_seed(2)
    number = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results
    )
    wanted = tuple(leaves.values())
    if not isinstance(number, Tensor) or not number.requires_grad:
        return tuple(torch.zeros_like(x) for x in wanted)
    found = torch.autograd.grad(number, wanted, allow_unused=True)
    return tuple(
        torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)
    )


def _comparable(names: tuple[str, ...], states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """True states: log-scaled ones times exp(m)."""
    if names[-1] != LOG_SCALE:
        return states
    scale = states[-1].exp()
    return tuple(s * scale[(...,) + (None,) * (s.dim() - 2)] for s in states[:-1])


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).norm() / b.detach().norm().clamp_min(1e-300))


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
