"""Names, dims and padding that a spec refuses before anything is traced."""

from __future__ import annotations

from typing import Any

import pytest

from flexla_dist.errors import SpecError
from flexla_dist.spec import LinearAttentionSpec


def build(**changes: Any) -> LinearAttentionSpec:
    fields = {
        "inputs": {"q": "C K", "k": "C K", "v": "C V"},
        "chunk_mode": lambda x, p: {},
        "decay_mode": lambda S, c: S,
        "merge_mode": lambda S, c: S,
    }
    return LinearAttentionSpec("own", **{**fields, **changes})


@pytest.mark.parametrize("name", ["lambda", "class", "None", "2x", "a b", ""])
def test_names_are_identifiers_and_no_keywords(name: str) -> None:
    with pytest.raises(SpecError, match="not an identifier, or a Python keyword"):
        build(inputs={name: "C K", "k": "C K", "v": "C V"})


@pytest.mark.parametrize(
    "name", ["self", "executor", "valid", "sizes", "state_S", "next_S", "decay_S", "grad_k"]
)
def test_names_in_use_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=rf"'{name}' in inputs is already a .*; rename it"):
        build(inputs={name: "C K", "k": "C K", "v": "C V"})
    with pytest.raises(SpecError, match=rf"'{name}' in params is already a .*; rename it"):
        build(params={name: "K"})


@pytest.mark.parametrize("output", ["C C", "C V V", "V C", "V"])
def test_an_output_has_one_row_a_token(output: str) -> None:
    with pytest.raises(SpecError, match="output has dims"):
        build(output=output)


@pytest.mark.parametrize("value", [float("nan"), "a", None, True])
def test_padding_is_a_number(value: Any) -> None:
    with pytest.raises(SpecError, match=r"padding of 'q' .*expected a number"):
        build(padding={"q": value})


def test_ordinary_names_are_welcome() -> None:
    spec = build(inputs={"keys": "C K", "values": "C V", "decay": "C <=0"}, scalars={"T": 1.0})
    assert list(spec.inputs) == ["keys", "values", "decay"]
