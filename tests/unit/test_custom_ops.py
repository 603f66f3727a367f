"""Compiled operators as ops of torch.library: checked, foretold, and in full graphs."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from flexla_dist.compiler.executor.bind import outline
from flexla_dist.compiler.executor.torch_executor import TorchExecutor
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.errors import MissingOperatorError
from flexla_dist.layers.linear_attention import LayerConfig, LinearAttentionLayer
from flexla_dist.ops import chunk_gated_delta_rule, chunk_gla, chunk_kda, chunk_linear_attn
from flexla_dist.ops.custom_ops import find
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import CallInputs

from .comparing import PACKED, qkvg, run, same, small, with_gradients
from .compiled import SPECS, graphs_of, op_of

ATTENTION = torch.ops.flexla_dist.attention.default
ATTENTION_BACKWARD = torch.ops.flexla_dist.attention_backward.default
VARIANTS = ("gla", "gated_delta_rule", "linear_attn_normalized")


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()


# -- the ops themselves ---------------------------------------------------------------------------


def op_arguments(op: LinearAttentionOp, call: CallInputs, entry: bool) -> tuple[Any, ...]:
    tensors = [*call.inputs.values(), *call.params.values()]
    initial = call.initial_state
    states = [initial] if isinstance(initial, Tensor) else list(initial)
    scalars = list(call.scalars.values())
    return op.key, tensors, states if entry else [], scalars, call.cu_seqlens, ""


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("shape", [{}, PACKED], ids=["unpacked", "packed"])
@pytest.mark.parametrize("name", [*VARIANTS, "mamba2", "mlstm"])
def test_opcheck(name: str, shape: dict[str, Any], entry: bool) -> None:
    op = op_of(name, 16)
    arguments = op_arguments(op, small(name, **shape), entry)
    for x in (*arguments[1], *arguments[2]):
        x.requires_grad_(False)
    output, leave, saved = ATTENTION(*arguments)
    seeds = [torch.randn_like(output), [torch.randn_like(x) for x in leave]]
    opcheck(ATTENTION_BACKWARD, (*arguments, saved, *seeds))
    for x in (*arguments[1], *arguments[2]):
        x.requires_grad_()
    opcheck(ATTENTION, arguments)


SHAPES = [
    {"batch": 1, "tokens": 1},
    {"batch": 3, "tokens": 64},
    {"batch": 2, "tokens": 1000},
    {"batch": 1, "tokens": 2049},
    {"batch": 1, "tokens": 0},
    {"batch": 1, "tokens": 2500, "cu_seqlens": torch.tensor([0, 3, 3, 1700, 2500])},
    {"batch": 1, "tokens": 30, "cu_seqlens": torch.tensor([0, 10, 20, 30])},
]


def assert_room(executor: Any, problem: Any, limit: int) -> None:
    """What forward saves fits what `saved_shapes` tells of a call before its offsets are read."""
    documents = problem.num_sequences if problem.packed else None
    known = outline(problem.spec, problem.inputs, problem.params, documents, limit)
    told = executor.saved_shapes(known)
    assert told == executor.saved_shapes(problem)
    saved = executor.forward(problem, problem.zero_state()).saved
    assert not saved or len(saved) == len(told)
    for x, room in zip(saved, told, strict=False):
        assert x.dtype == room.dtype and x.dim() == len(room.shape)
        assert all(size <= most for size, most in zip(x.shape, room.shape, strict=True))


@pytest.mark.parametrize("name", ["gla", "linear_attn_normalized", "mlstm"])
def test_saved_states_of_the_torch_executor_are_foretold(name: str) -> None:
    op = LinearAttentionOp(graphs_of(name), None, 16)
    for shape in SHAPES:
        call = small(name, sizes={"K": 48, "V": 64}, **shape)
        problem = op.bind(call.inputs, call.params, call.scalars, call.cu_seqlens)
        assert_room(op.executor("torch"), problem, 16)


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "linear_attn_normalized", "hgrn"])
def test_saved_states_of_the_triton_executor_are_foretold(name: str) -> None:
    aot = pytest.importorskip("flexla_dist.compiler.aot")
    executor = aot._RecordingExecutor(graphs_of(name))
    segmented = 0
    for tokens, offsets in ((64, None), (9000, None), (9000, (0, 100, 100, 9000)), (90, (0, 90))):
        for batch in (1,) if offsets else (1, 3):
            shape = {"batch": batch, "tokens": tokens, "heads": 2, "cu_seqlens": offsets}
            problem = aot.describe_call(graphs_of(name), **shape)
            assert_room(executor, problem, 64)
            segmented += bool(executor.saved_shapes(problem))
    assert segmented


def test_an_operator_that_is_gone_is_named() -> None:
    op = LinearAttentionOp(graphs_of("gla"), None, 8)
    twin = LinearAttentionOp(op.graphs, None, 8)
    assert op.key.startswith("gla-") and op.key != twin.key
    assert find(op.key) is op and copy.deepcopy(op) is op
    arguments = op_arguments(op, small(), entry=False)
    del op
    gc.collect()
    with pytest.raises(MissingOperatorError, match=r"no operator 'gla-\w+' is alive"):
        ATTENTION(*arguments)


def test_equal_specs_have_equal_keys() -> None:
    keys = []
    for scale in (1.0, 1.0, 2.0):
        spec = SPECS["gla"]
        op = LinearAttentionOp(compile_graphs(spec), None, 32 if scale == 1.0 else 4)
        keys.append(op.key)
        del op
        gc.collect()
    assert keys[0] == keys[1] != keys[2]


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [{}, PACKED], ids=["unpacked", "packed"])
@pytest.mark.parametrize("name", [*VARIANTS, "mamba2", "mlstm"])
def test_full_graph_equals_eager(name: str, shape: dict[str, Any]) -> None:
    op, call = op_of(name, 16), small(name, **shape)
    want = with_gradients(call, lambda: run(op, call))
    plan, op.last_plan = op.last_plan, None
    back, op.ran.backward = op.last_backward_plan, None
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    same(with_gradients(call, lambda: compiled(op, call)), want)
    assert op.last_plan == plan is not None and op.last_backward_plan == back is not None


def test_functions_are_told_apart_by_their_options() -> None:
    q, k, v, g = small(heads=2).inputs.values()
    beta = g[..., 0].exp()

    def both(q: Tensor) -> Tensor:
        unit, _ = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, chunk_size=8)
        plain, _ = chunk_kda(q, k, v, g, beta, chunk_size=8)
        gated, _ = chunk_gated_delta_rule(q, k, v, g[..., 0], beta, cu_seqlens=None)
        return torch.stack([unit, plain, gated])

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    same([compiled(q)], [both(q)])


def test_offsets_may_be_a_list_or_a_tensor_of_new_numbers() -> None:
    call = small(**PACKED)
    q, k, v, g = call.inputs.values()

    def attend(bounds: Any) -> Tensor:
        return chunk_gla(q, k, v, g, cu_seqlens=bounds)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for bounds in ([0, 5, 40], [0, 39, 40], [0, 0, 40]):
        same([compiled(torch.tensor(bounds))], [attend(bounds)])
    same([compiled([0, 5, 40])], [attend([0, 5, 40])])


def counted(graphs: list[Any]) -> Any:
    """A backend that runs graphs as they are and keeps them in a list."""

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return keep


@pytest.mark.parametrize("bounds", [[[0, 5, 40], [0, 20, 40], [0, 39, 40]], [[0, 40], [0, 9, 40]]])
def test_lists_of_other_offsets_and_lengths(bounds: list[list[int]]) -> None:
    call = small(**PACKED)

    def attend(offsets: list[int]) -> Tensor:
        return chunk_gla(**call.inputs, cu_seqlens=offsets)[0]

    graphs: list[Any] = []
    compiled = torch.compile(attend, fullgraph=True, backend=counted(graphs))
    for offsets in bounds:
        same([compiled(offsets)], [attend(offsets)])
    assert len(graphs) == 2  # the second one holds symbols, or as many numbers as its list


def test_short_calls_share_graphs() -> None:
    graphs: list[Any] = []
    op = op_of("gated_delta_rule")
    compiled = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=counted(graphs)))
    for tokens in (2, 3, 4, 9, 16, 31, 64, 1):
        call = small("gated_delta_rule", tokens=tokens)
        want = with_gradients(call, lambda call=call: run(op, call))
        same(with_gradients(call, lambda call=call: compiled(op, call)), want)
    directions = 2
    assert len(graphs) <= 3 * directions  # the first length, other lengths, one token


def test_any_length_without_compiling_each() -> None:
    graphs: list[Any] = []
    op = op_of("gated_delta_rule")
    compiled = torch.compile(run, fullgraph=True, backend=counted(graphs), dynamic=True)
    for tokens in (70, 128, 200, 64, 65, 301, 1000):
        call = small("gated_delta_rule", tokens=tokens)
        same(list(compiled(op, call)), list(run(op, call)))
    assert len(graphs) <= 3


def test_one_token_of_decoding() -> None:
    op, call = op_of("gla"), small(tokens=1)
    step = partial(op.recurrent_step, **call.inputs, **call.scalars)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    same(list(compiled(call.initial_state)), list(step(call.initial_state)))


@pytest.mark.parametrize("variant", ["gated_delta_rule", "mamba2"])
def test_a_layer(variant: str) -> None:
    torch.manual_seed(0)
    config = LayerConfig(variant=variant, width=16, key_dim=8, value_dim=8)
    layer = LinearAttentionLayer(config)
    x = torch.randn(2, 40, 16, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def results(module: Any) -> list[Tensor]:
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    want = results(layer)
    got = results(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_inductor() -> None:
    op, call = op_of("gla", 16), small()

    def scaled(call: CallInputs) -> tuple[Tensor, ...]:
        o, S = run(op, call)
        return o.tanh(), S

    want = with_gradients(call, lambda: scaled(call))
    compiled = torch.compile(scaled, fullgraph=True)
    for a, b in zip(with_gradients(call, lambda: compiled(call)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"k": None}, {"kk": 1.0}, {"scale": None}])
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    op, call = op_of("gla"), small()
    arguments = {**call.inputs, **call.scalars} | wrong
    if None in wrong.values():
        arguments.pop(next(iter(wrong)))
    compiled = torch.compile(lambda: op(**arguments), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"'{next(iter(wrong))}'"):
        compiled()


def test_wrong_shapes_are_named() -> None:
    q, k, v, g = qkvg()
    compiled = torch.compile(chunk_gla, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="input 'k' has \\[B, T\\]"):
        compiled(q, k[:, :-1], v, g)


def test_shapes_are_known_without_computing() -> None:
    op = op_of("gla", 16)
    with FakeTensorMode():
        call = small()
        results = with_gradients(call, lambda: run(op, call))
    real = small()
    expected = with_gradients(real, lambda: run(op, real))
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in expected]


def test_longest_chunk_of_an_outline() -> None:
    for tokens, longest in ((1, 1), (2, 64), (24, 64)):  # one graph for all short calls but T = 1
        call = small(tokens=tokens)
        known = outline(SPECS["gla"], call.inputs, call.params, None, 64)
        assert known.longest_chunk == longest and known.most_chunks == 1
        assert TorchExecutor(graphs_of("gla")).saved_shapes(known)[0].shape[0] == 1


def test_packed_calls_are_kept_out_of_cuda_graphs() -> None:
    graphs = []

    def keep(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    q = torch.randn(1, 32, 1, 16)
    for bounds in (None, torch.tensor([0, 10, 32])):
        torch._dynamo.reset()
        run = torch.compile(
            lambda x, b: chunk_linear_attn(x, x, x, cu_seqlens=b)[0], fullgraph=True, backend=keep
        )
        run(q, bounds)
    called = [
        {str(node.target) for node in g.graph.nodes if "attention" in str(node.target)}
        for g in graphs
    ]
    assert ["packed" in str(names) for names in called] == [False, True]
    ops = torch.ops.flexla_dist
    unsafe = torch.Tag.cudagraph_unsafe
    assert unsafe in ops.packed_attention.default.tags
    assert unsafe in ops.packed_attention_backward.default.tags
    assert unsafe not in ops.attention.default.tags
