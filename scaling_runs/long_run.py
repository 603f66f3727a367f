"""An operator on a long sequence over many ranks, compared with two streams over the whole of it.

Contract: nobody holds the whole sequence. Inputs are made block by block from the block's number,
so that a rank makes its shard and a stream any part. Outputs and the last state are compared with
the token recurrence in float64, one token after the other from the first to the last; gradients
with the float64 executor streamed over blocks, state to state, and backward from the last block.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.ops.op import compile
from flexla_dist.parallel import SequenceParallelOp
from flexla_dist.spec.oracle import run_recurrence
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.budget import BOUNDS, CHUNK, TINY
from flexla_dist.testing.inputs import make_inputs
from flexla_dist.testing.ranks import run_ranks

VARIANTS = ("simple_gla", "gated_delta_rule")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
GRADIENT_SEED = 1 << 40


class RunProblem(ValueError):
    """A run that cannot be made."""


@dataclass(frozen=True)
class LongRun:
    """`tokens` of one sequence over `ranks` processes, one head of size x size.

    block: tokens made and streamed at once. memory: about how many tokens the state remembers;
    decays and the steps of a delta rule are scaled to it, so that states matter across ranks.
    """

    variant: str
    tokens: int
    ranks: int
    size: int = 16
    dtype: str = "float32"
    strategy: str = "chain"
    block: int = 4096
    memory: int = 1 << 14

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise RunProblem(f"variant is {self.variant!r}, expected one of {', '.join(VARIANTS)}")
        if self.block % CHUNK or self.tokens % (self.ranks * self.block):
            raise RunProblem(
                f"{self.tokens} tokens over {self.ranks} ranks in blocks of {self.block}: expected "
                f"blocks of a multiple of {CHUNK} tokens, and as many whole blocks on every rank"
            )

    @property
    def blocks(self) -> int:
        """Blocks of a rank."""
        return self.tokens // self.ranks // self.block

    def inputs(self, index: int) -> dict[str, Tensor]:
        """Inputs [1, block, 1, ...] of a block."""
        made = make_inputs(
            get_variant(self.variant),
            batch=1,
            tokens=self.block,
            heads=1,
            value_heads=1,
            sizes={"K": self.size, "V": self.size},
            dtype=DTYPES[self.dtype],
            gate_scale=1.0 / self.memory,
            seed=index,
            requires_grad=False,
        ).inputs
        if "beta" in made:
            made["beta"] *= min(1.0, 2 * self.size / self.memory)
        return made

    def gradient(self, index: int) -> Tensor:
        """The output's gradient [1, block, 1, V] in a block."""
        generator = torch.Generator().manual_seed(GRADIENT_SEED + index)
        shape = (1, self.block, 1, self.size)
        return torch.randn(shape, generator=generator, dtype=DTYPES[self.dtype])

    @property
    def scalars(self) -> dict[str, Any]:
        """Run-time numbers of the operator."""
        return {"scale": self.size**-0.5}


@dataclass(frozen=True)
class LongResult:
    """Seconds and MiB of the slowest and the largest rank; (ratio, worst chunk) by tensor."""

    forward_s: float
    backward_s: float
    peak_mib: float
    errors: dict[str, tuple[float, float]]
    stream_s: float

    def within(self, dtype: torch.dtype) -> bool:
        """Whether every tensor keeps to the bounds of `flexla_dist.testing.budget`."""
        bound = BOUNDS[dtype].of
        return all(
            a <= bound(name) and b <= 3 * bound(name) for name, (a, b) in self.errors.items()
        )


def run_long(case: LongRun, timeout: float = 600.0) -> LongResult:
    """Run on processes of this machine and compare."""
    with tempfile.TemporaryDirectory(prefix="flexla_long_") as folder:
        told = run_ranks(run_shard, case.ranks, case, folder, timeout=timeout)
        start = time.monotonic()
        streams = run_ranks(compare, 2, case, folder, backend=None, timeout=timeout)
    seconds = time.monotonic() - start
    forward, backward, peak = (max(column) for column in zip(*told, strict=True))
    return LongResult(forward, backward, peak, {**streams[0], **streams[1]}, seconds)


def run_shard(rank: int, size: int, case: LongRun, folder: str) -> tuple[float, float, float]:
    """One rank: forward and backward of its shard, kept in `folder`; seconds of both, peak MiB."""
    mine = range(rank * case.blocks, (rank + 1) * case.blocks)
    parts = [case.inputs(index) for index in mine]
    inputs: dict[str, Any] = {n: torch.cat([part[n] for part in parts], 1) for n in parts[0]}
    del parts
    seed = torch.cat([case.gradient(index) for index in mine], 1)
    for x in inputs.values():
        x.requires_grad_()
    op = compile(get_variant(case.variant))
    sharded = SequenceParallelOp(op, group=dist.group.WORLD, strategy=case.strategy)
    dist.barrier()
    start = time.perf_counter()
    output, state = sharded(**inputs, **case.scalars, output_final_state="broadcast")
    dist.barrier()
    middle = time.perf_counter()
    grads = torch.autograd.grad(output, list(inputs.values()), seed)
    dist.barrier()
    end = time.perf_counter()
    found = {f"d{name}": g for name, g in zip(inputs, grads, strict=True)}
    found |= {"o": output.detach(), "state": state.detach()}  # type: ignore[union-attr]
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return middle - start, end - middle, peak


def compare(rank: int, size: int, case: LongRun, folder: str) -> dict[str, tuple[float, float]]:
    """Errors of the shards in `folder`: process 0 by tokens, process 1 by blocks."""
    return by_tokens(case, folder) if rank == 0 else by_blocks(case, folder)


@torch.no_grad()
def by_tokens(case: LongRun, folder: str) -> dict[str, tuple[float, float]]:
    """Outputs and the last state against the recurrence over all tokens."""
    spec, errors, state = get_variant(case.variant), Errors(), None
    found: dict[str, Tensor] = {}
    for index, found, rows in _blocks(case, folder):
        want, state = run_recurrence(spec, case.inputs(index), {}, case.scalars, state)
        errors.add("o", found["o"][:, rows], want)
    errors.add("state", found["state"], state)
    return errors.found()


def by_blocks(case: LongRun, folder: str) -> dict[str, tuple[float, float]]:
    """Gradients against the executor in float64: forward over the blocks, then back."""
    op, errors = compile(get_variant(case.variant)), Errors()
    entering: list[Any] = [None]
    with torch.no_grad():
        for index in range(case.ranks * case.blocks):
            _, state = op(
                **_double(case.inputs(index)),
                **case.scalars,
                initial_state=entering[-1],
                output_final_state=True,
            )
            entering.append(state)
    leaving = torch.zeros_like(entering.pop())
    entering[0] = torch.zeros_like(leaving)
    for index, found, rows in _blocks(case, folder, backward=True):
        inputs = _double(case.inputs(index))
        leaves = [x.requires_grad_() for x in (*inputs.values(), entering.pop())]
        ends: Any = op(**inputs, **case.scalars, initial_state=leaves[-1], output_final_state=True)
        seeds = (case.gradient(index).double(), leaving)
        *grads, leaving = torch.autograd.grad(ends, leaves, seeds)
        for name, want in zip(inputs, grads, strict=True):
            errors.add(f"d{name}", found[f"d{name}"][:, rows], want)
    return errors.found()


def _double(inputs: dict[str, Tensor]) -> dict[str, Any]:
    return {name: x.double() for name, x in inputs.items()}


def _blocks(
    case: LongRun, folder: str, backward: bool = False
) -> Iterator[tuple[int, dict[str, Tensor], slice]]:
    """(block, results of its rank, its rows there), one rank's results at a time."""
    turn = -1 if backward else 1
    for rank in range(case.ranks)[::turn]:
        found = torch.load(Path(folder) / f"rank{rank}.pt")
        for place in range(case.blocks)[::turn]:
            rows = slice(place * case.block, (place + 1) * case.block)
            yield rank * case.blocks + place, found, rows


class Errors:
    """Sums from which `flexla_dist.testing.budget`'s errors follow, for tensors that come in parts
    along the tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[float, float, int]]] = {}

    def add(self, name: str, got: Tensor, want: Any) -> None:
        """Compare a part [1, tokens, ...] or a whole state."""
        rows = CHUNK if got.shape[1] % CHUNK == 0 else got.shape[1]
        error, size = got.double() - want, want
        sums = self._sums.setdefault(name, [])
        for e, w in zip(error.split(rows, 1), size.split(rows, 1), strict=True):
            sums.append((e.square().sum().item(), w.square().sum().item(), w.numel()))

    def found(self) -> dict[str, tuple[float, float]]:
        """(RMS of the error / RMS of the tensor, the same of the worst chunk) by name."""
        result = {}
        for name, sums in self._sums.items():
            errors, sizes, count = (sum(column) for column in zip(*sums, strict=True))
            total = (sizes / count) ** 0.5
            worst = max((e / n) ** 0.5 / max((w / n) ** 0.5, 0.1 * total, TINY) for e, w, n in sums)
            result[name] = ((errors / max(sizes, TINY)) ** 0.5, worst)
        return result
