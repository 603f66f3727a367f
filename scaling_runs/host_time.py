#!/usr/bin/env python3
"""Microseconds that the host needs to launch a call, and what they go into.

python scaling_runs/host_time.py --variants simple_gla,gated_delta_rule --tokens 1024,4096

Nothing waits for the device, whose queue is empty at the start of a round. `forward` runs without
gradients, `node` with, `both` is forward and backward; `engine` is what forward and backward of a
node that computes nothing take, which every operator of PyTorch pays. `code` is the straight code
of a direction alone, called from this thread; `launches` and `memory` are what it saves when its
launches, or its memory, are left out; their counts are in brackets.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from flexla_dist.compiler.executor.straight import PATIENCE, Straight
from flexla_dist.ops.known_calls import KnownCall
from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec.variants import get_variant, variant_names
from scaling_runs.bench import Shape, gradient_seed, make_call
from scaling_runs.rows import format_table

CALLS, ROUNDS = 20, 15
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
PARTS = tuple(f"{d} {part}" for d in DIRECTIONS for part in ("code", "launches", "memory"))
COLUMNS = ("variant", "T", "forward", "node", "both", "engine", *PARTS)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "linear_attn,simple_gla,gla,gated_delta_rule,kda,hgrn"
    parser.add_argument("--variants", default=names, help=f"of {', '.join(variant_names())}")
    parser.add_argument("--tokens", default="1024,4096", help="comma-separated T")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="K and V")
    return parser.parse_args(words)


def host_us(run: Callable[[], object]) -> float:
    """Microseconds of one call, the median of rounds."""
    found = []
    for _ in range(ROUNDS):
        _wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - begin) / CALLS)
    _wait()
    return 1e6 * statistics.median(found)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Nothing(torch.autograd.Function):
    """A node that saves its inputs and computes nothing."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *ctx.saved_tensors)


def measure(
    op: LinearAttentionOp, arguments: dict[str, Any], seed: Tensor
) -> dict[str, float | str]:
    """All numbers of a call.

    arguments: inputs, parameters and scalars by name; tensors want gradients.
    seed: gradient of the output.
    """
    leaves = [x for x in arguments.values() if isinstance(x, Tensor)]

    def both() -> object:
        return torch.autograd.grad(op(**arguments)[0], leaves, seed, allow_unused=True)

    def without() -> object:
        with torch.no_grad():
            return op(**arguments)

    def engine() -> object:
        return torch.autograd.grad(Nothing.apply(seed, *leaves), leaves, seed)

    for _ in range(PATIENCE + 2):
        both()
    found: dict[str, float | str] = {
        "forward": host_us(without),
        "node": host_us(lambda: op(**arguments)),
        "both": host_us(both),
        "engine": host_us(engine),
    }
    (known,) = (x for x in op.known_calls._calls.values() if "backward" in x._code)
    for direction, given in _given(known, arguments, seed).items():
        parts = _parts(known._code[DIRECTIONS[direction]], given, known, arguments)
        found |= {f"{direction} {name}": part for name, part in parts.items()}
    return found


def _given(
    known: KnownCall, arguments: dict[str, Any], seed: Tensor
) -> dict[str, tuple[Tensor, ...]]:
    """Arguments of the straight code of both directions."""
    values = list(arguments.values())
    tensors = tuple(values[at].detach() for at in known._tensors)
    entry = known.problem.entry_state(None)
    saved = known.forward(known._defaults | _scalars(known, arguments), (*entry, *tensors))
    rest = saved[1 + known.count :]
    return {
        "fwd": (*tensors, *entry),
        "bwd": (*tensors, *entry, seed, *entry, *rest),
    }


def _scalars(known: KnownCall, arguments: dict[str, Any]) -> dict[str, float]:
    names = known.problem.spec.scalars
    return {n: float(x) for n, x in arguments.items() if n in names and x is not None}


def _parts(
    code: Straight, given: tuple[Tensor, ...], known: KnownCall, arguments: dict[str, Any]
) -> dict[str, str | float]:
    scalars = known._defaults | _scalars(known, arguments)
    stream = code.start()
    assert stream is not None, "straight code does not run here"

    def us(run: Any) -> float:
        return host_us(lambda: run(given, scalars, stream))

    whole = us(code.run)
    launches, memory = _calls(code, "stream, "), _calls(code, "memory.")
    names = code.run.__globals__  # type: ignore[attr-defined]
    launchers = {line.strip().split("(")[0] for line in launches}
    silent = us(_changed(code, dict.fromkeys(launchers, lambda *_: None)))
    kept = {line.split(" = ")[0].strip(): eval(line.split(" = ")[1], names) for line in memory}
    again = _Again(list(kept.values()))
    lean = us(_changed(code, {"memory": again}))
    return {
        "code": whole,
        "launches": f"{whole - silent:.1f} ({len(launches)})",
        "memory": f"{whole - lean:.1f} ({len(memory)})",
    }


def _calls(code: Straight, word: str) -> list[str]:
    return [line for line in code.source.splitlines()[1:] if word in line]


def _changed(code: Straight, names: dict[str, Any]) -> Any:
    run: Any = code.run
    return FunctionType(run.__code__, {**run.__globals__, **names})


class _Again:
    """Double of the module `memory`: the same tensors in turn, made before."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors, self.at = tensors, -1

    def empty_cuda(self, *_: Any) -> Tensor:
        """The next one."""
        self.at = (self.at + 1) % len(self.tensors)
        return self.tensors[self.at]

    empty_cpu = empty_cuda


def main(words: Sequence[str] | None = None) -> int:
    """Print a table."""
    options = parse(words)
    if not torch.cuda.is_available():
        print("host_time.py needs a CUDA device", file=sys.stderr)
        return 2
    rows = []
    for variant in options.variants.split(","):
        op = compile(get_variant(variant), executor="triton")
        for tokens in map(int, options.tokens.split(",")):
            size = options.size
            shape = Shape(variant, "fwdbwd", 1, tokens, options.heads, size, size, "bfloat16")
            call = make_call(shape)
            arguments = {**call.inputs, **call.params, **call.scalars}
            op.known_calls.clear()
            found = measure(op, arguments, gradient_seed(shape, call))
            rows.append({"variant": variant, "T": str(tokens)} | _texts(found))
            print(rows[-1], flush=True)
    print(format_table(rows, COLUMNS))
    return 0


def _texts(found: dict[str, float | str]) -> dict[str, str]:
    return {name: x if isinstance(x, str) else f"{x:.1f}" for name, x in found.items()}


if __name__ == "__main__":
    sys.exit(main())
