"""Layers and model: every variant alone, packed, decoded, in grouped heads."""

import copy
import pickle
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from flexla_dist.errors import ArgumentError
from flexla_dist.layers import (
    RECIPES,
    LayerCache,
    LayerConfig,
    LinearAttentionLayer,
    LinearAttentionModel,
    LocalExchange,
    ModelConfig,
    generate,
)

SMALL = LayerConfig(width=24, heads=2, key_dim=8, value_dim=12)
TINY = ModelConfig(layers=2, width=24, heads=2, key_dim=8, value_dim=12, mlp_width=32)


def make_layer(variant: str, **changes: object) -> LinearAttentionLayer:
    torch.manual_seed(1)
    return LinearAttentionLayer(replace(SMALL, variant=variant, **changes), 1, 4).double()


def sequence(tokens: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, tokens, SMALL.width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("variant", RECIPES)
def test_every_parameter_learns(variant: str) -> None:
    layer = make_layer(variant)
    x = sequence(70).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("variant", RECIPES)
def test_decays_are_never_positive(variant: str) -> None:
    layer = make_layer(variant)
    if layer.decay is not None:
        decay = layer.decay(3.0 * sequence(5))
        assert (decay <= 0).all() and decay.dtype == torch.float64


@pytest.mark.parametrize("variant", RECIPES)
@pytest.mark.parametrize("conv_width", [0, 4])
def test_decoding_equals_the_whole_sequence(variant: str, conv_width: int) -> None:
    layer = make_layer(variant, conv_width=conv_width)
    x = sequence(13)
    whole = layer(x)
    cache = LayerCache()
    parts = [layer.step(x[:, :7], cache)]
    parts += [layer.step(x[:, t : t + 1], cache) for t in range(7, 13)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", RECIPES)
def test_packed_documents_equal_separate_ones(variant: str) -> None:
    layer = make_layer(variant)
    x, starts = sequence(80, batch=1), [0, 3, 3, 4, 70, 80]
    packed = layer(x, cu_seqlens=torch.tensor(starts))
    assert torch.equal(layer(x, cu_seqlens=starts), packed)
    apart = [layer(x[:, a:b]) for a, b in pairwise(starts) if a < b]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", RECIPES)
def test_grouped_heads(variant: str) -> None:
    layer = make_layer(variant, value_heads=6)
    y = layer(sequence(9))
    y.sum().backward()
    assert y.shape == (2, 9, SMALL.width)
    cache = LayerCache()
    last = [layer.step(sequence(9)[:, t : t + 1], cache) for t in range(9)]
    torch.testing.assert_close(torch.cat(last, 1), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", ["gated_delta_rule", "gla", "mamba2", "hgrn"])
def test_bfloat16_autocast(variant: str) -> None:
    torch.manual_seed(0)
    layer = LinearAttentionLayer(replace(SMALL, variant=variant))
    x = sequence(20).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    error = (y.float() - layer(x)).square().mean().sqrt() / layer(x).square().mean().sqrt()
    assert error < 0.05
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_unknown_variant_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'gated_delta_rule'"):
        LayerConfig(variant="gated_delta_rul")


def test_uneven_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 value heads and 2 heads"):
        LayerConfig(heads=2, value_heads=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": None}, "unknown variant None"),
        ({"width": 0}, "width is 0; expected a whole number, at least 1"),
        ({"width": -8}, "width is -8"),
        ({"width": "64"}, "width is '64'"),
        ({"width": 64.0}, "width is 64.0"),
        ({"heads": 0}, "heads is 0"),
        ({"heads": True}, "heads is True"),
        ({"value_heads": 0}, "value_heads is 0"),
        ({"key_dim": 0}, "key_dim is 0"),
        ({"value_dim": 0}, "value_dim is 0"),
        ({"conv_width": -1}, "conv_width is -1; expected a whole number, at least 0"),
        ({"norm_eps": "a"}, "norm_eps is 'a'"),
    ],
    ids=str,
)
def test_sizes_of_a_layer_are_whole_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LayerConfig(**changes)


@pytest.mark.parametrize("shape", [(5, 24), (1, 5, 23), (24,)], ids=str)
def test_shape_of_what_a_layer_gets(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"x is \[.*\]; expected \[B, T, D\] with D = 24"):
        make_layer("linear_attn")(torch.zeros(shape))


def test_documents_come_from_one_place() -> None:
    layer = make_layer("linear_attn")
    with pytest.raises(ValueError, match="both given"):
        layer(sequence(4), cu_seqlens=torch.tensor([0, 4]), exchange=LocalExchange())


def test_recomputation_changes_nothing() -> None:
    torch.manual_seed(0)
    model = LinearAttentionModel(TINY).double()
    tokens = torch.randint(256, (2, 20))
    gradients = []
    for recompute in (False, True):
        model.checkpoint_activations = recompute
        model.zero_grad()
        model(tokens).logsumexp(-1).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=0, atol=0)


def test_model_starts_near_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = LinearAttentionModel(TINY)
    tokens, others = torch.randint(256, (2, 2, 64))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), others.flatten())
    assert abs(float(loss.detach()) - 5.545) < 0.3


def test_model_step_equals_forward_and_generation_is_repeatable() -> None:
    torch.manual_seed(0)
    model = LinearAttentionModel(TINY).double().eval()
    tokens = torch.randint(256, (1, 9))
    cache = model.new_cache()
    parts = [model.step(tokens[:, :4], cache), model.step(tokens[:, 4:], cache)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-9, atol=1e-9)
    greedy = generate(model, tokens, 5, temperature=0)
    assert greedy.shape == (1, 14) and torch.equal(greedy[:, :9], tokens)
    expected = model(greedy[:, :-1])[:, 8:].argmax(-1)
    assert torch.equal(greedy[:, 9:], expected)
    sampled = [generate(model, tokens, 5, 1.0, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*sampled)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="T >= 1"):
        generate(LinearAttentionModel(TINY), torch.zeros(1, 0, dtype=torch.int64), 3)


def test_state_dict_names_are_plain() -> None:
    names = set(LinearAttentionModel(TINY).state_dict())
    assert {"embedding.weight", "blocks.0.attn.qkv.weight", "blocks.1.attn.decay.A_log"} <= names


def test_models_can_be_copied_and_pickled() -> None:
    torch.manual_seed(0)
    model = LinearAttentionModel(TINY)
    tokens = torch.randint(256, (1, 9))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens), model(tokens))
        assert other.blocks[0].attn.qkv.weight is not model.blocks[0].attn.qkv.weight
