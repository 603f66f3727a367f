"""Compiled operators under checkpointing, autocast, torch.func and gradients of any strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flexla_dist.errors import DoubleBackwardError, TransformError
from flexla_dist.layers.linear_attention import LayerConfig, LinearAttentionLayer
from flexla_dist.ops import chunk_gla
from flexla_dist.testing.inputs import CallInputs

from .comparing import number, qkvg, run, same, small, with_gradients
from .compiled import op_of

ATTENTION = torch.ops.flexla_dist.attention.default


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


# -- activation checkpointing ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    op, call = op_of("gated_delta_rule", 16), small("gated_delta_rule")
    want = with_gradients(call, lambda: run(op, call))
    names = list(call.inputs)

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(names, tensors, strict=True))
        return run(op, CallInputs(inputs, call.params, call.scalars, call.initial_state))

    tensors = call.inputs.values()
    if reentrant:  # which allows backward only, and sees gradients of its arguments alone
        leaves = list(call.inputs.values())
        number(checkpoint(again, *tensors, use_reentrant=True)).backward()
        same([x.grad for x in leaves], want[2 : 2 + len(leaves)])
        return
    same(with_gradients(call, lambda: checkpoint(again, *tensors, use_reentrant=False)), want)


@pytest.mark.parametrize("keep", [False, True])
def test_selective_checkpointing_sees_one_op(keep: bool) -> None:
    op, call = op_of("gla", 16), small()
    want = with_gradients(call, lambda: run(op, call))
    seen = []

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function is ATTENTION:
            seen.append(context.is_recompute)
            if keep:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    again = partial(checkpoint, run, op, call, use_reentrant=False, context_fn=contexts)
    same(with_gradients(call, again), want)
    assert seen == [False]


def test_checkpointing_in_a_graph() -> None:
    op, call = op_of("gla", 16), small()
    want = with_gradients(call, lambda: run(op, call))

    def again(call: CallInputs) -> tuple[Tensor, ...]:
        return checkpoint(run, op, call, use_reentrant=False)

    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    same(with_gradients(call, lambda: compiled(call)), want)


# -- autocast -------------------------------------------------------------------------------------


def autocasting(function: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_nothing(compiled: bool) -> None:
    op, call = op_of("gla", 16), small()
    want = with_gradients(call, lambda: run(op, call))
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    same(with_gradients(call, lambda: autocasting(lambda: function(op, call))), want)
    same(autocasting(lambda: with_gradients(call, lambda: function(op, call))), want)


@pytest.mark.parametrize("compiled", [False, True])
def test_mixed_dtypes(compiled: bool) -> None:
    op, call = op_of("gla", 16), small()
    for name in ("q", "k", "v"):
        call.inputs[name] = call.inputs[name].detach().bfloat16().requires_grad_()
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    wide = CallInputs(
        {n: x.detach().float().requires_grad_() for n, x in call.inputs.items()},
        call.params,
        call.scalars,
        call.initial_state.detach().clone().requires_grad_(),
    )
    got = with_gradients(call, lambda: autocasting(lambda: function(op, call)))
    assert [x.dtype for x in got[:2]] == [torch.bfloat16, torch.float32]
    assert [x.dtype for x in got[2:]] == [x.dtype for x in call.leaves().values()]
    want = with_gradients(wide, lambda: run(op, wide))
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


# -- torch.func -----------------------------------------------------------------------------------


def test_func_grad_and_functional_call() -> None:
    torch.manual_seed(0)
    layer = LinearAttentionLayer(LayerConfig(variant="gla", width=16, key_dim=8, value_dim=8))
    x = torch.randn(1, 20, 16)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).square().sum()

    got = torch.func.grad(loss)(weights)
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-6, atol=1e-6)


def test_func_vjp_of_states() -> None:
    op, call = op_of("mlstm", 16), small("mlstm")
    want = with_gradients(call, lambda: run(op, call))
    states = tuple(x.detach() for x in call.initial_state)

    def entering(S: Tensor) -> tuple[Tensor, ...]:
        initial = (S, *states[1:])
        return run(op, CallInputs(call.inputs, call.params, call.scalars, initial))

    results, pull = torch.func.vjp(entering, states[0])
    seeds = [torch.linspace(0.1, 1.0, x.numel()).view(x.shape) for x in results[:-1]]
    (gradient,) = pull((*seeds, torch.zeros_like(results[-1])))
    same([gradient], [want[len(results) + len(call.inputs)]])


def test_what_torch_func_cannot_do_is_named() -> None:
    q, k, v, g = qkvg()
    many = torch.stack([q, q])

    def loss(q: Tensor) -> Tensor:
        return chunk_gla(q, k, v, g)[0].sum()

    with pytest.raises(TransformError, match=r"gla: torch.func.vmap cannot map .* into B"):
        torch.func.vmap(loss)(many)
    with pytest.raises(TransformError, match=r"gla: torch.func.vmap cannot map"):
        torch.func.vmap(torch.func.grad(loss))(many)
    with pytest.raises(TransformError, match="only reverse-mode"):
        torch.func.jvp(loss, (q,), (q,))
    compiled = torch.compile(torch.func.vmap(loss), backend="aot_eager")
    with pytest.raises(Exception, match=r"gla: torch.func.vmap cannot map"):
        compiled(many)


# -- gradients ------------------------------------------------------------------------------------


def test_double_backward_is_refused() -> None:
    q, k, v, g = qkvg()
    q.requires_grad_()

    def loss(q: Tensor) -> Tensor:
        return chunk_gla(q, k, v, g)[0].square().sum()

    (first,) = torch.autograd.grad(loss(q), q, create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"gla: a second derivative"):
        torch.autograd.grad(first.sum(), q)
    with pytest.raises(DoubleBackwardError, match=r"gla: a second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q.detach())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "mlstm"])
def test_strides_do_not_matter(name: str, compiled: bool) -> None:
    op, call = op_of(name, 16), small(name)
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    want = with_gradients(call, lambda: run(op, call))

    def strided(x: Tensor) -> Tensor:
        turned = x.detach().transpose(1, -1).contiguous().transpose(1, -1)
        return turned.requires_grad_(x.requires_grad)

    states = call.initial_state
    states = (states,) if isinstance(states, Tensor) else states
    odd = CallInputs(
        {n: strided(x) for n, x in call.inputs.items()},
        {n: strided(x[:, None])[:, 0] for n, x in call.params.items()},
        call.scalars,
        tuple(strided(x) for x in states),
    )
    assert not odd.inputs["k"].is_contiguous()
    same(with_gradients(odd, lambda: function(op, odd)), want)


@pytest.mark.parametrize("compiled", [False, True])
def test_expanded_and_missing_gradients(compiled: bool) -> None:
    op, call = op_of("gated_delta_rule", 16), small("gated_delta_rule")
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    leaves = list(call.leaves().values())

    def gradients(at: int, seed: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
        result = function(op, call)[at]
        given = torch.ones_like(result) if seed is None else seed(result)
        return list(torch.autograd.grad(result, leaves, given, allow_unused=True))

    for at in (0, 1):
        expanded = gradients(at, lambda x: x.new_ones(()).expand(x.shape))
        turned = gradients(at, lambda x: torch.ones_like(x.mT).mT)
        known = [g is not None for g in expanded]
        assert known == ([True] * len(leaves))
        for got in (expanded, turned):
            same(got, gradients(at, None))


def test_broadcast_inputs() -> None:
    q, k, v, g = (x.requires_grad_() for x in qkvg())
    wide = g[:, :1].expand_as(g)
    whole = wide.detach().clone().requires_grad_()
    (got,) = torch.autograd.grad(chunk_gla(q, k, v, wide)[0].sum(), g)
    (want,) = torch.autograd.grad(chunk_gla(q, k, v, whole)[0].sum(), whole)
    torch.testing.assert_close(got[:, 0], want.sum(1))
