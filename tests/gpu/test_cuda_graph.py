"""Compiled operators on a GPU: captured in CUDA graphs, without waiting for the device, compiled
by inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError
from flexla_dist.ops import chunk_gated_delta_rule, chunk_gla, chunk_linear_attn

pytestmark = pytest.mark.gpu
Operator = Callable[..., tuple[Tensor, Any]]
OFFSETS = [0, 100, 100, 700, 2500, 3000]  # of documents: one long enough to be cut in segments
SHAPES: dict[str, tuple[int, int, Sequence[int] | None]] = {
    "short": (2, 200, None),
    "segments": (1, 3000, None),
    "segments of several rows": (2, 2048, None),
    "packed": (1, 3000, OFFSETS),
}


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    return chunk_gla(q, k, v, g, output_final_state=True, **options)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> Any:
    return chunk_gated_delta_rule(
        q, k, v, g[..., 0], beta, None, output_final_state=True, **options
    )


def linear_attn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    o, states = chunk_linear_attn(q.sigmoid(), k.sigmoid(), v, output_final_state=True, **options)
    return o, torch.cat([x.flatten() for x in states])


VARIANTS = {f.__name__: f for f in (gla, gated_delta_rule, linear_attn)}


def tensors(
    batch: int, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v, g, beta on the GPU; 2 heads of 64 by 64."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k, v, g = (draw(batch, tokens, 2, 64) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = torch.nn.functional.logsigmoid(g) / 16
    beta = draw(batch, tokens, 2).sigmoid()
    return [x.requires_grad_() for x in (q.to(dtype), k.to(dtype), v.to(dtype), g, beta)]


def step(run: Operator, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Output, final state and gradients of a call."""
    o, state = run(*inputs, **options)
    grads = torch.autograd.grad(
        (o, state), inputs, (torch.ones_like(o), torch.ones_like(state)), allow_unused=True
    )
    return [o.detach(), state.detach(), *(g for g in grads if g is not None)]


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Within the block PyTorch raises where it would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def warmed_up(function: Callable[[], list[Tensor]]) -> None:
    """Call a function a few times on a stream of its own, as a capture wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("executor", ["triton", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_backward_in_a_graph(variant: str, shape: str, executor: str) -> None:
    batch, tokens, offsets = SHAPES[shape]
    run, inputs = VARIANTS[variant], tensors(batch, tokens, seed=0)
    options = {"cu_seqlens": offsets, "executor": executor}
    warmed_up(lambda: step(run, inputs, **options))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(run, inputs, **options)
    for seed in (1, 2):
        fresh = tensors(batch, tokens, seed)
        want = step(run, fresh, **options)
        with torch.no_grad():
            for mine, x in zip(inputs, fresh, strict=True):
                mine.copy_(x)
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        same(captured, want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_repeated_call_does_not_wait(variant: str, shape: str) -> None:
    batch, tokens, offsets = SHAPES[shape]
    run, inputs = VARIANTS[variant], tensors(batch, tokens, seed=0)
    bounds = None if offsets is None else torch.tensor(offsets)
    step(run, inputs, cu_seqlens=bounds)
    with waiting_is_an_error():
        step(run, inputs, cu_seqlens=bounds)


def test_new_offsets_do_not_wait_for_the_work_before_them() -> None:
    inputs = tensors(1, 3000, seed=0)
    step(gla, inputs, cu_seqlens=OFFSETS)
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(40):
        busy = busy @ busy
    mark = torch.cuda.Event()
    mark.record()
    step(gla, inputs, cu_seqlens=[0, 101, 1700, 3000])
    assert not mark.query()
    torch.cuda.synchronize()


def test_tables_serve_every_stream() -> None:
    inputs = tensors(1, 3000, seed=0)
    offsets = [0, 333, 2222, 3000]
    want = step(gla, inputs, cu_seqlens=offsets)
    torch.cuda.synchronize()
    for _ in range(4):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = step(gla, inputs, cu_seqlens=offsets)
        stream.synchronize()
        same(got, want)


def test_offsets_on_the_device_cannot_be_captured() -> None:
    inputs, bounds = tensors(1, 3000, seed=0), torch.tensor(OFFSETS, device="cuda")
    want = step(gla, inputs, cu_seqlens=bounds)
    same(step(gla, inputs, cu_seqlens=OFFSETS), want)
    torch.cuda.synchronize()
    with (
        pytest.raises(ArgumentError, match="give it on the CPU"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        gla(*inputs, cu_seqlens=bounds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_and_gradients_of_any_strides(dtype: torch.dtype) -> None:
    q, k, v, g, beta = tensors(2, 2048, seed=0, dtype=dtype)
    state = torch.randn(2, 2, 64, 64, device="cuda")

    def results(initial: Tensor, turned: bool) -> list[Tensor]:
        o, final = gated_delta_rule(q, k, v, g, beta, initial_state=initial)
        seeds = [torch.ones_like(x.mT).mT if turned else torch.ones_like(x) for x in (o, final)]
        leaves = (q, k, v, g, beta, initial)
        return [o, final, *torch.autograd.grad((o, final), leaves, seeds)]

    want = results(state.requires_grad_(), turned=False)
    odd = state.detach().mT.contiguous().mT.requires_grad_()
    same(results(odd, turned=True), want)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_inductor(variant: str, shape: str, mode: str) -> None:
    torch._dynamo.reset()
    batch, tokens, offsets = SHAPES[shape]
    run = VARIANTS[variant]
    bounds = None if offsets is None else torch.tensor(offsets)
    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for seed in range(4):  # warmed up, recorded, replayed
        inputs = tensors(batch, tokens, seed)
        want = step(run, inputs, cu_seqlens=bounds)
        torch.compiler.cudagraph_mark_step_begin()
        got = step(compiled, inputs, cu_seqlens=bounds)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_a_compiled_call_saves_what_its_graph_expects() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(gated_delta_rule, fullgraph=True, dynamic=True)
    for tokens in (3000, 4096, 520, 200, 9000):
        inputs = tensors(1, tokens, seed=tokens)
        want = step(gated_delta_rule, inputs)
        for a, b in zip(step(compiled, inputs), want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
