"""Repeated calls by straight code on a GPU: the same bits as ordinary ones, on every stream,
without waiting for the device, beside captures of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist.compiler.executor.straight import PATIENCE
from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import make_inputs

pytestmark = pytest.mark.gpu
VARIANTS = ("linear_attn", "simple_gla", "gla", "gated_delta_rule", "kda", "hgrn", "mamba2")
SHAPES: dict[str, dict[str, Any]] = {
    "short": {"batch": 2, "tokens": 200, "heads": 4},
    "segments": {"batch": 1, "tokens": 4096, "heads": 2},
    "many heads": {"batch": 1, "tokens": 1024, "heads": 32},
}


class Repeated:
    """A call of an operator, made until it is straight; `want` are its first results."""

    def __init__(self, name: str, shape: str, warm: bool = True):
        self.op: LinearAttentionOp = compile(get_variant(name))
        options = SHAPES[shape]
        sizes = {"K": 64, "V": 64, "D": 64, "M": 64}
        call = make_inputs(
            self.op.spec,
            sizes=sizes,
            dtype=torch.bfloat16,
            device="cuda",
            value_heads=options["heads"],
            **options,
        )
        self.arguments: dict[str, Any] = {**call.inputs, **call.params, **call.scalars}
        self.want = self.step()
        for _ in range(PATIENCE + 1 if warm else 0):
            same(self.step(), self.want)

    def step(self) -> list[Tensor]:
        """Output, final state and gradients."""
        leaves = [x for x in self.arguments.values() if isinstance(x, Tensor)]
        o, state = self.op(**self.arguments, output_final_state=True)
        assert state is not None
        states = (state,) if isinstance(state, Tensor) else state
        results = (o, *states)
        grads = torch.autograd.grad(
            results, leaves, [torch.ones_like(x) for x in results], allow_unused=True
        )
        return [*(x.detach() for x in results), *(g for g in grads if g is not None)]

    def straight(self, run: Callable[[], Any]) -> int:
        """Directions that ran as straight code."""
        (known,) = self.op.known_calls._calls.values()
        before = known.straight_calls
        run()
        return known.straight_calls - before


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_bits_as_an_ordinary_call(name: str, shape: str) -> None:
    call = Repeated(name, shape)
    with waiting_is_an_error():
        assert call.straight(call.step) == 2
    for _ in range(20):
        same(call.step(), call.want)
    with torch.no_grad():
        o, _ = call.op(**call.arguments)
    same([o], call.want[:1])


def test_other_values_and_scalars() -> None:
    call, fresh = Repeated("simple_gla", "segments"), Repeated("simple_gla", "segments", warm=False)
    for number in (0.5, 0.125):
        for arguments in (call.arguments, fresh.arguments):
            arguments["scale"] = number
            with torch.no_grad():
                arguments["q"].mul_(1.5)
        fresh.op.known_calls.clear()
        want, got = fresh.step(), []
        assert call.straight(lambda: got.extend(call.step())) == 2  # noqa: B023
        same(got, want)


def test_odd_strides_and_pointers() -> None:
    call = Repeated("gla", "segments")
    q = call.arguments["q"]
    turned = q.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    call.arguments["q"] = turned
    assert call.straight(lambda: same(call.step(), call.want)) == 2
    room = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
    call.arguments["q"] = room.copy_(q.detach()).requires_grad_()
    assert call.straight(lambda: same(call.step(), call.want)) == 0


def test_streams() -> None:
    """Memory that a stream still reads is not given away: results of calls on many streams."""
    call = Repeated("gated_delta_rule", "many heads")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call.step())
    torch.cuda.synchronize()
    for got in results:
        same(got, call.want)


def test_a_capture_takes_the_ordinary_way_and_outlives_the_operator() -> None:
    call = Repeated("simple_gla", "segments")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.step()
    torch.cuda.current_stream().wait_stream(side)
    captured: list[Tensor] = []
    with torch.cuda.graph(graph):
        captured += call.step()
    assert call.straight(call.step) == 2
    want, arguments = call.want, call.arguments  # the graph reads the arguments
    del call
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    same(captured, want)
    assert arguments


def test_backward_of_a_straight_call_in_a_loss() -> None:
    """Expanded gradients, accumulated, with autocast around."""
    call = Repeated("kda", "segments")
    leaves = [x for x in call.arguments.values() if isinstance(x, Tensor)]

    def loss() -> list[Tensor]:
        for x in leaves:
            x.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            o, _ = call.op(**call.arguments)
            o.sum().backward()
        return [x.grad for x in leaves if x.grad is not None]

    want = loss()
    assert call.straight(lambda: same(loss(), want)) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_call_on_another_device_than_the_current_one() -> None:
    call = Repeated("gla", "segments")
    moved: dict[str, Any] = {
        n: x.detach().to("cuda:1").requires_grad_() if isinstance(x, Tensor) else x
        for n, x in call.arguments.items()
    }
    for _ in range(PATIENCE + 2):
        o, _ = call.op(**moved)
        torch.testing.assert_close(o.cpu(), call.want[0].cpu(), rtol=0, atol=0)
    with torch.cuda.device(1):
        for _ in range(PATIENCE + 2):
            o, _ = call.op(**moved)
            torch.testing.assert_close(o.cpu(), call.want[0].cpu(), rtol=0, atol=0)
