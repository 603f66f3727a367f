"""Composition of elements: associativity, identity, resets, log scales, packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexla_dist.comm import (
    Element,
    StateElement,
    Tag,
    after_reset,
    apply,
    combine,
    element_bytes,
    identity_like,
    state_bytes,
    zero_state,
)
from flexla_dist.comm.element import element_tensors, with_tensors
from flexla_dist.comm.packing import empty_message, header_words, pack, packed_bytes, views
from flexla_dist.comm.tag import Header, Kind, describe_words, same_message
from flexla_dist.testing.elements import ELEMENT_KINDS, random_element


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_same(left, right, tolerance: float = 1e-12) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def entering(element: Element, seed: int = 5) -> tuple[torch.Tensor, ...]:
    g = generator(seed)
    return tuple(torch.randn(t.shape, generator=g, dtype=t.dtype) for t in zero_state(element))


@pytest.mark.parametrize("kind", ELEMENT_KINDS)
def test_combining_is_applying_one_after_the_other(kind: str) -> None:
    g = generator()
    a, b, c = (random_element(kind, g) for _ in range(3))
    state = entering(a)
    for start in (state, zero_state(a)):
        expected = apply(c, apply(b, apply(a, start)))
        assert_same(apply(combine(combine(c, b), a), start), expected)
        assert_same(apply(combine(c, combine(b, a)), start), expected)


@pytest.mark.parametrize("kind", ELEMENT_KINDS)
def test_identity_changes_nothing(kind: str) -> None:
    a = random_element(kind, generator())
    one = identity_like(a)
    state = entering(a)
    assert_same(apply(one, state), state, 0.0)
    assert_same(apply(one, zero_state(a)), zero_state(a), 0.0)
    for both in (combine(one, a), combine(a, one)):
        assert_same(apply(both, state), apply(a, state))
    assert element_bytes(one) == element_bytes(a)


@pytest.mark.parametrize("kind", ELEMENT_KINDS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_reset_hides_everything_before_it(kind: str, as_tensor: bool) -> None:
    g = generator()
    a, b, c = (random_element(kind, g) for _ in range(3))
    flag = torch.tensor(True) if as_tensor else True
    b = replace(b, reset=flag)
    poisoned = tuple(torch.full_like(t, torch.nan) for t in zero_state(a))
    bad = with_tensors(a, [torch.full_like(t, torch.inf) for t in element_tensors(a)], False)
    expected = apply(c, after_reset(b))
    assert_same(apply(c, apply(b, poisoned)), expected, 0.0)
    assert_same(apply(combine(c, b), poisoned), expected)
    assert_same(apply(combine(combine(c, b), bad), poisoned), expected)
    not_set = torch.tensor(False) if as_tensor else False
    state = entering(a)
    assert_same(apply(replace(c, reset=not_set), state), apply(c, state), 0.0)
    chained = combine(replace(c, reset=not_set), combine(b, bad))
    assert bool(chained.reset)
    assert_same(apply(chained, poisoned), expected)


def test_decay_of_a_reset_element_may_hold_anything() -> None:
    g = generator()
    a, b = (random_element("scalar", g) for _ in range(2))
    [state] = b.states
    decay = torch.full((2, 3, 1, 1), torch.nan, dtype=torch.float64)
    b = Element((StateElement(state.local, decay),), reset=True)
    assert_same(apply(combine(a, b), entering(a)), apply(a, (state.local,)))


def test_dense_matrices_do_not_commute() -> None:
    g = generator()
    a, b = (random_element("dense", g) for _ in range(2))
    state = entering(a)
    left, right = apply(combine(a, b), state)[0], apply(combine(b, a), state)[0]
    assert (left - right).abs().max() > 1e-3


def test_log_scaled_follows_the_true_state() -> None:
    g = generator()
    elements = [random_element("log_scaled", g) for _ in range(4)]
    small = [replace(e, log_weight=e.log_weight / 80) for e in elements]
    state, true = zero_state(small[0]), torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    for e in small:
        state = apply(e, state)
        carry = e.log_decay.exp()[..., None, None]
        true = carry * true + e.log_weight.exp()[..., None, None] * e.states[0].local
    torch.testing.assert_close(state[-1].exp()[..., None, None] * state[0], true)


def test_log_scaled_starts_from_minus_infinity_without_nan() -> None:
    element = identity_like(random_element("log_scaled", generator()))
    for state in (zero_state(element), apply(element, zero_state(element))):
        assert torch.isneginf(state[-1]).all() and not state[0].isnan().any()
    both = combine(element, element)
    assert torch.isneginf(both.log_weight).all()
    assert not any(t.isnan().any() for t in element_tensors(both))
    hidden = replace(
        element, states=tuple(StateElement(s.local + torch.inf) for s in element.states)
    )
    assert all((t == 0).all() for t in after_reset(hidden)[:-1])


def test_contradicting_elements_are_refused() -> None:
    local, decay = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 1, 1)
    with pytest.raises(ValueError, match="both decay and matrix"):
        StateElement(local, decay, torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match="together"):
        Element((StateElement(local),), False, torch.zeros(1, 1))
    with pytest.raises(ValueError, match="log_decay alone"):
        Element((StateElement(local, decay),), False, torch.zeros(1, 1), torch.zeros(1, 1))
    dense = Element((StateElement(local, matrix=torch.zeros(1, 1, 4, 4)),))
    with pytest.raises(ValueError, match="same kind of M"):
        combine(dense, Element((StateElement(local, decay),)))


@pytest.mark.parametrize("kind", ELEMENT_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_message_holds_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    element = random_element(kind, generator(), dtype)
    tensors = element_tensors(element)
    header = Header(Kind.ELEMENT, Tag(7, 1, 2, 3, "backward"), True, packed_bytes(tensors))
    buffer = pack(header, tensors, torch.device("cpu"))
    assert buffer.numel() == empty_message(tensors, buffer.device).numel()
    for a, b in zip(views(buffer, tensors), tensors, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    words = header_words(buffer).tolist()
    assert words == header.words()
    assert "step 7, micro-batch 1, layer 2, call 3, backward" in describe_words(words)
    other = Header(Kind.ELEMENT, Tag(7, 1, 2, 3, "forward"), True, packed_bytes(tensors))
    assert not same_message(words, other.words())
    assert "no header" in describe_words([1] * 8)
    assert element_bytes(element) == state_bytes(tensors) <= packed_bytes(tensors)


def test_expanded_and_odd_sized_tensors_are_packed() -> None:
    tensors = [torch.arange(3).float().expand(5, 3), torch.ones(1), torch.ones(3).double()]
    header = Header(Kind.STATE, Tag(), False, packed_bytes(tensors))
    for a, b in zip(
        views(pack(header, tensors, torch.device("cpu")), tensors), tensors, strict=True
    ):
        assert torch.equal(a, b)
