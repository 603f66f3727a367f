"""Wrapping layers and models: what stays as it was, what is refused, groups of any ranks."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flexla_dist.errors import ShardingError, UnsupportedLayerError
from flexla_dist.layers import LayerConfig, LinearAttentionLayer, LinearAttentionModel, ModelConfig
from flexla_dist.layers.exchange import LayerCache
from flexla_dist.ops.op import compile
from flexla_dist.parallel import (
    SequenceExchange,
    SequenceParallelLA,
    SequenceParallelOp,
    is_sequence_parallel,
    parallelize_sequence,
    register_adapter,
    sequence_context,
    shard_sequence,
    unwrap,
)
from flexla_dist.spec.variants.registry import get_variant
from flexla_dist.testing.budget import SHARDED, measure
from flexla_dist.testing.inputs import make_inputs
from flexla_dist.testing.ranks import run_ranks

PRELOAD = ("flexla_dist.parallel", "flexla_dist.layers", "flexla_dist.ops.op", "torch._dynamo")
WIDTH = 12


def make_layer(seed: int = 0) -> LinearAttentionLayer:
    torch.manual_seed(seed)
    config = LayerConfig(width=WIDTH, heads=2, key_dim=4, value_dim=4)
    return LinearAttentionLayer(config).double()


def tokens(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, WIDTH, generator=generator, dtype=torch.float64)


def refused(error: type[Exception], words: str, call: Any, *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except error as caught:
        assert words in str(caught), str(caught)
    else:
        raise AssertionError(f"{call} was not refused")


# -- one layer --------------------------------------------------------------------------------


def wrap_one(rank: int, world: int) -> None:
    group = dist.group.WORLD
    layer = make_layer()
    names = [name for name, _ in layer.named_parameters()]
    keys, modules = list(layer.state_dict()), [name for name, _ in layer.named_modules()]
    wrapped = SequenceParallelLA(layer, group=group)
    assert wrapped is layer and is_sequence_parallel(layer)
    assert [name for name, _ in layer.named_parameters()] == names
    assert list(layer.state_dict()) == keys and not list(layer.buffers())
    assert [name for name, _ in layer.named_modules()] == modules
    assert ("forward" in layer.__dict__) == (world > 1)

    refused(UnsupportedLayerError, "sharded already", SequenceParallelLA, layer, group=group)
    refused(ShardingError, "not both", SequenceParallelLA, make_layer(), group, group=group)
    refused(ShardingError, "mesh or a group", SequenceParallelLA, make_layer())
    refused(UnsupportedLayerError, "register_adapter", SequenceParallelLA, nn.Linear(2, 2), group)
    refused(TypeError, "ProcessGroup", SequenceParallelLA, make_layer(), "cp")

    square = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    refused(ShardingError, "mesh['cp']", SequenceParallelLA, make_layer(), square)
    assert is_sequence_parallel(SequenceParallelLA(make_layer(), square["cp"]))

    x = tokens(7)
    whole = make_layer()(x)
    want = shard_sequence(whole, group)
    torch.testing.assert_close(layer(shard_sequence(x, group)), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer(x=shard_sequence(x, group)), want, rtol=1e-10, atol=1e-12)

    twin = copy.deepcopy(layer)
    assert is_sequence_parallel(twin) and twin.qkv.weight is not layer.qkv.weight
    with torch.no_grad():
        twin.out.weight.zero_()
    assert twin(shard_sequence(x, group)).eq(0).all()
    torch.testing.assert_close(layer(shard_sequence(x, group)), want, rtol=1e-10, atol=1e-12)
    if world == 1:
        with sequence_context(group, cu_seqlens=[0, 3, 7]):
            assert twin(x).eq(0).all() and layer(x).ne(0).any()

    cache = LayerCache()
    stepped = torch.cat([layer.step(part, cache) for part in x.split([4, 1, 2], 1)], 1)
    torch.testing.assert_close(stepped, whole, rtol=1e-10, atol=1e-12)

    assert unwrap(layer) is layer and not is_sequence_parallel(layer)
    assert "forward" not in layer.__dict__
    torch.testing.assert_close(layer(x), whole, rtol=0, atol=0)
    refused(UnsupportedLayerError, "nothing to unwrap", unwrap, layer)


def pickled(rank: int, world: int) -> None:
    """A layer leaves its group behind, and does not run as if it were whole."""
    group = dist.group.WORLD
    x = tokens(7)
    layer = SequenceParallelLA(make_layer(), group=group)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for loaded in (pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert not is_sequence_parallel(loaded)
        refused(ShardingError, "wrap it again", loaded, x)
        SequenceParallelLA(loaded, group=group)
        part = shard_sequence(x, group)
        torch.testing.assert_close(loaded(part), layer(part), rtol=0, atol=0)
        torch.testing.assert_close(unwrap(loaded)(x), make_layer()(x), rtol=0, atol=0)
    again = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(unwrap(again)(x), make_layer()(x), rtol=0, atol=0)


def test_a_wrapped_layer_is_the_same_module() -> None:
    run_ranks(wrap_one, 1, preload=PRELOAD)
    run_ranks(wrap_one, 2, preload=PRELOAD)


def test_pickling_leaves_the_group_behind() -> None:
    run_ranks(pickled, 2, preload=PRELOAD)


# -- groups -----------------------------------------------------------------------------------


def two_groups(rank: int, world: int) -> None:
    """Ranks that are not consecutive, two groups at the same time, strategies mixed."""
    groups = [dist.new_group([0, 2, 4]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    layers = [
        SequenceParallelLA(make_layer(seed), group=group, strategy=strategy)
        for seed, strategy in enumerate(("chain", "log_scan", "all_gather"))
    ]
    whole = tokens(9, seed=rank % 2).requires_grad_()
    expected = whole
    for seed in range(3):
        expected = make_layer(seed)(expected)
    expected.square().sum().backward()
    part = y = shard_sequence(whole.detach(), group).requires_grad_()
    for layer in layers:
        y = layer(y)
    y.square().sum().backward()
    want = shard_sequence(whole.grad, group)  # type: ignore[arg-type]
    torch.testing.assert_close(part.grad, want, rtol=1e-10, atol=1e-12)
    refused(ShardingError, "not a member", SequenceParallelLA, make_layer(), groups[1 - rank % 2])


def test_groups_of_any_ranks() -> None:
    run_ranks(two_groups, 5, preload=PRELOAD)


# -- models -----------------------------------------------------------------------------------


class Hybrid(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.linear = make_layer()
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)
        self.mixer = mixer


class MyAttention(nn.Module):
    pass


class AttentionBlock(nn.Module):
    """Named like a mixer, but what mixes is the supported layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_layer()


def wrap_models(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for mixer in (
        nn.MultiheadAttention(WIDTH, 2),
        nn.LSTM(WIDTH, WIDTH),
        nn.Conv1d(WIDTH, WIDTH, 3),
        nn.BatchNorm1d(WIDTH),
        MyAttention(),
    ):
        model = Hybrid(mixer)
        refused(UnsupportedLayerError, "mixer: ", parallelize_sequence, model, group)
        assert not is_sequence_parallel(model.linear)
        parallelize_sequence(model, group, trusted=["mixer"])
        assert is_sequence_parallel(model.linear)
        refused(
            UnsupportedLayerError,
            "sharded already: linear",
            parallelize_sequence,
            model,
            group,
            trusted=["mixer"],
        )
    model = parallelize_sequence(Hybrid(AttentionBlock()), group)
    assert is_sequence_parallel(model.mixer.inner)
    refused(
        UnsupportedLayerError,
        "do not exist",
        parallelize_sequence,
        Hybrid(nn.Identity()),
        group,
        trusted=["mixr"],
    )
    refused(UnsupportedLayerError, "no layer", parallelize_sequence, nn.Linear(2, 2), group)

    decoder = LinearAttentionModel(
        ModelConfig(layers=2, width=WIDTH, heads=1, mlp_width=8, vocab=9)
    )
    keys = list(decoder.state_dict())
    assert parallelize_sequence(decoder, group) is decoder
    assert list(decoder.state_dict()) == keys
    assert sum(is_sequence_parallel(module) for module in decoder.modules()) == 2
    shared = Hybrid(nn.Identity())
    shared.other = shared.linear
    parallelize_sequence(shared, group)


def test_models_are_wrapped_or_refused_by_path() -> None:
    run_ranks(wrap_models, 2, preload=PRELOAD)


# -- adapters ---------------------------------------------------------------------------------


class TokenShift(nn.Module):
    """y_t = x_t + mix * x_{t-1}: knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, hidden_states: Tensor, before: Tensor | None = None) -> Tensor:
        if before is None:
            before = torch.zeros_like(hidden_states[:, :1])
        previous = torch.cat([before, hidden_states], 1)[:, :-1]
        return hidden_states + self.mix * previous


class TokenShiftAdapter:
    def tokens(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        return kwargs["hidden_states"]

    def forward(
        self,
        layer: nn.Module,
        original: Any,
        exchange: SequenceExchange,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Tensor:
        assert exchange.position_ids.shape == (1, kwargs["hidden_states"].shape[1])
        return original(**kwargs, before=exchange.halo(kwargs["hidden_states"], 1))


def adapted(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    register_adapter(TokenShift, TokenShiftAdapter())
    group = dist.group.WORLD
    layer = SequenceParallelLA(TokenShift(), group=group)
    x = shard_sequence(tokens(6), group, lengths=(2, 0, 1, 3)).requires_grad_()
    y = layer(hidden_states=x)
    y.square().sum().backward()
    assert x.grad is not None and layer.mix.grad is not None
    return y.detach(), x.grad, layer.mix.grad


def test_adapter_of_a_foreign_layer() -> None:
    results = run_ranks(adapted, 4, preload=PRELOAD)
    layer, x = TokenShift(), tokens(6).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results], 1), y.detach())
    torch.testing.assert_close(torch.cat([r[1] for r in results], 1), x.grad)
    torch.testing.assert_close(sum(r[2] for r in results), layer.mix.grad)


# -- precision --------------------------------------------------------------------------------


def in_dtype(rank: int, world: int, dtype: torch.dtype, strategy: str) -> dict[str, Tensor]:
    spec = get_variant("gated_delta_rule")
    group = dist.group.WORLD
    op = SequenceParallelOp(compile(spec), group=group, strategy=strategy)
    given = make_inputs(spec, batch=1, tokens=150, dtype=dtype, requires_grad=False)
    found = []
    for _ in range(2):
        local = {n: shard_sequence(x, group).requires_grad_() for n, x in given.inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output, _ = op(**local, **given.scalars)
        output.float().square().sum().backward()
        grads = {f"d{name}": x.grad for name, x in local.items() if x.grad is not None}
        found.append({"o": output.detach(), **grads})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    return found[0]


def test_low_precision_and_same_bits() -> None:
    """fp32 and bf16 against unsharded within the package's bounds; twice the same bits."""
    for dtype, strategy in ((torch.float32, "log_scan"), (torch.bfloat16, "chain")):
        results = run_ranks(in_dtype, 3, dtype, strategy, preload=PRELOAD)
        spec = get_variant("gated_delta_rule")
        given = make_inputs(spec, batch=1, tokens=150, dtype=dtype)
        output, _ = compile(spec)(**given.inputs, **given.scalars)
        output.float().square().sum().backward()
        want = {"o": output, **{f"d{name}": x.grad for name, x in given.inputs.items()}}
        for name, expected in want.items():
            got = torch.cat([values[name] for values in results], 1)
            assert expected is not None and got.dtype == expected.dtype
            report = measure(got, expected, dim=1)
            assert report.within(SHARDED[dtype].of(name)), f"{name} in {dtype}: {report}"


# -- torch.compile ----------------------------------------------------------------------------


def compiled_model(rank: int, world: int) -> None:
    """The model around the layers may be compiled; the exchanges stay outside of its graphs."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    config = ModelConfig(layers=2, width=WIDTH, heads=1, mlp_width=8, vocab=9)
    model = LinearAttentionModel(config).double()
    ids = torch.arange(10).remainder(9).view(1, 10)
    whole = model(ids)
    parallelize_sequence(model, group, timeout=60.0)
    output = torch.compile(model, backend="eager")(shard_sequence(ids, group))
    torch.testing.assert_close(output, shard_sequence(whole, group), rtol=1e-10, atol=1e-12)
    output.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_around_may_be_compiled() -> None:
    run_ranks(compiled_model, 2, preload=PRELOAD)
