"""Sharded operators in CUDA graphs and on several streams: what ranks run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.ops.op import compile
from flexla_dist.parallel import SequenceParallelOp, check_exchanges
from flexla_dist.spec.variants.registry import get_variant

from ..interpret.device_parallel_programs import relative

TOKENS, HEADS, WIDTH = 256, 2, 64
LONG = (16384, 32, 128)  # tokens of a rank, heads, width: what is timed
Step = Callable[[], tuple[Tensor, ...]]


def arguments(
    seed: int, device: str, sizes: tuple[int, int, int] = (TOKENS, HEADS, WIDTH)
) -> dict[str, Tensor]:
    """This rank's tokens for `simple_gla`."""
    tokens, heads, width = sizes
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=generator, device=device)

    found = {"q": draw(width), "k": draw(width) / width**0.5, "v": draw(width)}
    found["g"] = -draw().abs() / 16
    return {name: x.requires_grad_() for name, x in found.items()}


def own_forward(
    strategy: str, given: dict[str, Tensor], groups: int | None = None
) -> Callable[[], Tensor]:
    """The forward pass of an operator of its own; groups: of heads."""
    op = SequenceParallelOp(
        compile(get_variant("simple_gla")),
        group=dist.group.WORLD,
        strategy=strategy,
        backend="device",
        groups=groups,
    )
    return lambda: op(**given, scale=WIDTH**-0.5)[0]


def own_step(strategy: str, given: dict[str, Tensor], groups: int | None = None) -> Step:
    """Forward and backward of an operator of its own; (output, gradients)."""
    forward = own_forward(strategy, given, groups)

    def step() -> tuple[Tensor, ...]:
        output = forward()
        return (output, *torch.autograd.grad(output.square().sum(), tuple(given.values())))

    return step


def place(rank: int, device: str) -> str:
    """This rank's device, made the current one."""
    device = f"cuda:{rank}" if device == "apart" else device
    torch.cuda.set_device(device)
    return device


def captured(rank: int, size: int, strategy: str, device: str, groups: int | None = None) -> float:
    """A graph of forward and backward, replayed on other tokens, against eager calls."""
    device, group = place(rank, device), dist.group.WORLD
    given = arguments(rank, device)
    step = own_step(strategy, given, groups)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    worst = 0.0
    for turn in range(1, 4):
        with torch.no_grad():
            for name, x in arguments(100 * turn + rank, device).items():
                given[name].copy_(x)
        graph.replay()
        check_exchanges(group)
        got = [t.clone() for t in found]
        worst = max([worst, *(relative(a, b) for a, b in zip(got, step(), strict=True))])
    check_exchanges(group)
    return worst


def timed(rank: int, size: int, backend: str, device: str) -> tuple[str, float]:
    """(what ran, median milliseconds of forward and backward) in bfloat16."""
    device, group = place(rank, device), dist.group.WORLD
    given = {n: x.detach() for n, x in arguments(rank, device, LONG).items()}
    given = {n: (x if n == "g" else x.bfloat16()).requires_grad_() for n, x in given.items()}
    op = SequenceParallelOp(compile(get_variant("simple_gla")), group=group, backend=backend)
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        output = op(**given, scale=LONG[2] ** -0.5)[0]
        torch.autograd.grad(output.float().square().sum(), tuple(given.values()))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return str(op.last_plan), 1e3 * statistics.median(times[5:])


def side_by_side(rank: int, size: int, device: str, groups: int | None = None) -> bool:
    """Two operators on two streams at once, against one after the other: the same bits."""
    device = place(rank, device)
    inputs = [arguments(10 * number + rank, device) for number in range(2)]
    forwards = [own_forward("chain", given, groups) for given in inputs]
    leaves = [x for given in inputs for x in given.values()]

    def run(streams: list[torch.cuda.Stream]) -> tuple[Tensor, ...]:
        main, outputs = torch.cuda.current_stream(), []
        for stream, forward in zip(streams, forwards, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outputs.append(forward())
        for stream in streams:
            main.wait_stream(stream)
        total = sum(output.square().sum() for output in outputs)
        return (*outputs, *torch.autograd.grad(total, leaves))

    wanted = run([torch.cuda.current_stream()] * 2)
    torch.cuda.synchronize()
    same = True
    for _ in range(5):
        found = run([torch.cuda.Stream() for _ in forwards])
        torch.cuda.synchronize()
        same = same and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    check_exchanges(dist.group.WORLD)
    return same
