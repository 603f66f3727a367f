"""A small model around any spec, a recall task, and comparisons with the token recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec import LinearAttentionSpec
from flexla_dist.spec.oracle import run_recurrence
from flexla_dist.testing.budget import BOUNDS, measure
from flexla_dist.testing.inputs import CallInputs, make_inputs

Results = dict[str, Tensor]


# -- against the token recurrence -----------------------------------------------------------------


def make_call(
    spec: LinearAttentionSpec,
    dtype: torch.dtype,
    device: str,
    *,
    tokens: int,
    sizes: dict[str, int],
    documents: tuple[int, ...] = (),
    batch: int = 1,
) -> CallInputs:
    """A seeded call with one head of queries and two of values."""
    return make_inputs(
        spec,
        batch=batch,
        tokens=tokens,
        heads=1,
        value_heads=2,
        sizes=sizes,
        dtype=dtype,
        cu_seqlens=torch.tensor(documents) if documents else None,
        device=device,
    )


def results_of(call: CallInputs, output: Tensor, state: Any) -> Results:
    """Output, final states and gradients of seeded cotangents, which any dtype holds exactly."""
    states = state if isinstance(state, tuple) else (state,)
    outputs = (output, *states)
    generator = torch.Generator().manual_seed(7)
    seeds = [
        torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in outputs
    ]
    leaves = call.leaves()
    grads = torch.autograd.grad(outputs, list(leaves.values()), seeds)
    named = {"o": output.detach(), **{f"state{i}": x.detach() for i, x in enumerate(states)}}
    return {**named, **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}


def run_op(op: LinearAttentionOp, call: CallInputs, executor: str) -> Results:
    output, state = op(
        **call.inputs,
        **call.params,
        **call.scalars,
        initial_state=call.initial_state,
        output_final_state=True,
        cu_seqlens=call.cu_seqlens,
        executor=executor,
    )
    return results_of(call, output, state)


def run_oracle(spec: LinearAttentionSpec, call: CallInputs) -> Results:
    """The token recurrence in float64 from the same numbers."""
    call = call.to(torch.float64)
    output, state = run_recurrence(
        spec, call.inputs, call.params, call.scalars, call.initial_state, True, call.cu_seqlens
    )
    return results_of(call, output, state)


def out_of_bounds(
    spec: LinearAttentionSpec,
    call: CallInputs,
    got: Results,
    want: Results,
    plain: Mapping[str, float] | None = None,
) -> dict[str, tuple[float, float]]:
    """Results whose error (all, worst chunk) exceeds what their dtype allows.

    plain: errors of an independent run in that dtype, where it is allowed as much.
    """
    (dtype,) = {x.dtype for x in call.inputs.values()}
    bounds = BOUNDS[dtype]
    gates = {f"d{name}" for name, item in spec.input_specs.items() if item.log_decay}
    bad = {}
    for name, x in got.items():
        tokens = name == "o" or name[1:] in call.inputs
        report = measure(x, want[name], dim=1 if tokens else None)
        bound = bounds.gate_gradient if name in gates else bounds.of(name)
        bound = max(bound, (plain or {}).get(name, 0.0))
        if not report.within(bound):
            bad[name] = (report.ratio, report.worst_chunk)
    return bad


# -- a model --------------------------------------------------------------------------------------


def forget_little(x: Tensor) -> Tensor:
    return logsigmoid(x + 5.0)


def unit(x: Tensor) -> Tensor:
    return normalize(x, dim=-1)


SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "beta": torch.sigmoid,
    "a": unit,
    "s": lambda x: torch.softmax(x, -1),
    "f": lambda x: x - 4.0,  # a raw step: softplus of it is small
}
DPLR_SHAPED: dict[str, Callable[[Tensor], Tensor]] = {"b": lambda x: -0.5 * unit(x)}


class Layer(nn.Module):
    """Projections to what a spec declares, the compiled operator, a projection back."""

    def __init__(self, op: LinearAttentionOp, width: int, sizes: dict[str, int], heads: int):
        super().__init__()
        self.op, self.heads = op, heads
        spec = op.spec
        self.shapes = {
            name: (heads, *(sizes[d] for d in item.dims[1:]))
            for name, item in spec.input_specs.items()
        }
        self.into = nn.ModuleDict(
            {name: nn.Linear(width, _count(shape)) for name, shape in self.shapes.items()}
        )
        self.per_head = nn.ParameterDict(
            {
                name: nn.Parameter(torch.zeros(heads, *(sizes[d] for d in item.dims)))
                for name, item in spec.param_specs.items()
            }
        )
        self.norm = nn.LayerNorm(sizes[spec.output_dims[-1]])
        self.back = nn.Linear(heads * sizes[spec.output_dims[-1]], width)
        self.scalars = dict.fromkeys(spec.scalars, sizes["K"] ** (-0.5))

    def forward(self, x: Tensor, executor: str, dtype: torch.dtype) -> Tensor:
        spec = self.op.spec
        inputs = {}
        for name, item in spec.input_specs.items():
            value = self.into[name](x).unflatten(-1, self.shapes[name])
            if item.log_decay:
                value = forget_little(value)
            elif name == "k" and ("beta" in spec.inputs or "b" in spec.inputs):
                value = unit(value)
            elif name in SHAPED:
                value = SHAPED[name](value)
            elif name == "b":
                value = DPLR_SHAPED[name](value)
            inputs[name] = value.to(dtype)
        out, _ = self.op(**inputs, **self.per_head, **self.scalars, executor=executor)
        return self.back(self.norm(out.float()).flatten(-2))


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


class Model(nn.Module):
    """Embeddings of key and value, one layer around the operator, one hidden layer, logits."""

    def __init__(self, op: LinearAttentionOp, task: Task, sizes: dict[str, int]):
        super().__init__()
        width = task.width
        self.keys = nn.Embedding(task.keys, width)
        self.values = nn.Embedding(task.values + 1, width)  # the last one: a question
        self.layer = Layer(op, width, sizes, task.heads)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.out = nn.Linear(2 * width, task.values)

    def forward(self, keys: Tensor, values: Tensor, executor: str, dtype: torch.dtype) -> Tensor:
        x = self.keys(keys) + self.values(values)
        return self.out(self.mix(x + self.layer(x, executor, dtype)))


# -- a task ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Recall: `pairs` tokens tell the value of a key each, then every one of them is asked for."""

    keys: int = 16
    values: int = 8
    pairs: int = 12
    batch: int = 32
    width: int = 64
    heads: int = 2
    rate: float = 5e-3
    batches: int = 1000  # after so many, the first comes again

    def batch_of(self, step: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `[B, 2 pairs]` and what is asked for, `[B, pairs]`."""
        generator = torch.Generator().manual_seed(1000 + step % self.batches)
        told = torch.rand(self.batch, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(self.values, told.shape, generator=generator)
        order = torch.rand(told.shape, generator=generator).argsort(1)
        keys = torch.cat((told, told.gather(1, order)), 1)
        shown = torch.cat((values, torch.full_like(values, self.values)), 1)
        return keys.to(device), shown.to(device), values.gather(1, order).to(device)


@dataclass
class Training:
    """Losses of every step, and the gradients of all weights at the first."""

    losses: list[float]
    first_gradients: Results

    def last(self, count: int = 10) -> float:
        """Mean of the last losses."""
        return sum(self.losses[-count:]) / min(count, len(self.losses))


def train(
    spec: LinearAttentionSpec,
    executor: str,
    task: Task,
    steps: int,
    device: str,
    *,
    sizes: dict[str, int],
    dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
) -> Training:
    """Train a seeded model; the same arguments give the same batches and first weights."""
    op = compile(spec, chunk_size=chunk_size)
    torch.manual_seed(3)
    model = Model(op, task, sizes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.rate)
    losses, first = [], {}
    for step in range(steps):
        keys, values, wanted = task.batch_of(step, device)
        logits = model(keys, values, executor, dtype)[:, task.pairs :]
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        if not step:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    assert op.last_plan is not None
    return Training(losses, first)


def largest_difference(got: Training, want: Training) -> float:
    """Largest error of a gradient beside all gradients of its tensor or, if larger, 1e-2 of the
    largest tensor (a gradient that is zero in mathematics has no scale of its own)."""
    norms = {name: float(x.double().norm()) for name, x in want.first_gradients.items()}
    least = 1e-2 * max(norms.values())
    return max(
        float((got.first_gradients[name].double() - x.double()).norm()) / max(norms[name], least)
        for name, x in want.first_gradients.items()
    )
