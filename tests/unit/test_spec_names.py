"""Names, dims and padding that a spec refuses before anything is traced."""

from __future__ import annotations

from typing import Any

import pytest

from flexla_dist.errors import SpecError
from flexla_dist.spec import LinearAttentionSpec, LogScaled


def build(**changes: Any) -> LinearAttentionSpec:
    fields = {
        "name": "own",
        "inputs": {"q": "C K", "k": "C K", "v": "C V"},
        "chunk_mode": lambda x, p: {},
        "decay_mode": lambda S, c: S,
        "merge_mode": lambda S, c: S,
    }
    return LinearAttentionSpec(**{**fields, **changes})


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


@pytest.mark.parametrize("name", ["at_K", "size_K", "tile_C", "heads_g", "range"])
def test_names_of_kernels_are_refused(name: str) -> None:
    inputs = {"q": "C K @g", "k": "C K", "v": "C V"}
    with pytest.raises(SpecError, match=rf"'{name}' in inputs is already a name of the kernels"):
        build(inputs={**inputs, name: "C K"})
    with pytest.raises(SpecError, match=rf"'{name}' in scalars is already a name of the kernels"):
        build(inputs=inputs, scalars={name: 1.0})
    if name.endswith("K"):
        assert build(inputs={"q": "C D", name: "C V"}, state="D V").inputs  # no dim is called K


def test_a_scalar_is_no_pointer() -> None:
    with pytest.raises(SpecError, match="'q_ptr' in scalars is already a name of the kernels"):
        build(scalars={"q_ptr": 1.0})


def test_one_name_twice() -> None:
    with pytest.raises(SpecError, match="'q' in params is already an input; rename it"):
        build(params={"q": "K"})
    with pytest.raises(SpecError, match="'a' in scalars is already a parameter; rename it"):
        build(params={"a": "K"}, scalars={"a": 1.0})


def test_the_log_scale_has_its_name_for_itself() -> None:
    with pytest.raises(SpecError, match="state name 'm' is taken by the log scale"):
        build(state={"m": "K V"})


def test_long_names() -> None:
    with pytest.raises(SpecError, match="name has 240 letters; expected at most 100"):
        build(name="a" * 240)
    assert build(name="a" * 100).name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ["q"]}, r"inputs is \['q'\]; expected a dict by name of an input"),
        ({"inputs": None}, "inputs is None; expected a dict"),
        ({"inputs": {}}, "at least one input"),
        ({"params": ["u"]}, "params is .*; expected a dict"),
        ({"scalars": ["scale"]}, "scalars is .*; expected a dict"),
        ({"padding": 0.0}, "padding is 0.0; expected a dict"),
        ({"state": 3}, "state is 3; expected dims such as 'K V'"),
        ({"state": None}, "state is None; expected dims"),
        ({"state": {}}, "at least one state"),
        ({"state": {1: "K V"}}, "state name 1 is not an identifier"),
        ({"state": "K V @g"}, r"state 'S' is 'K V @g'; '@group' and '<=0' belong to inputs"),
        ({"state": {"A": "K V <=0"}}, "state 'A' is 'K V <=0'.*write 'K V'"),
        ({"output": 1}, "output is 1; expected dims such as 'C V'"),
        ({"output": "C V <=0"}, "belong to inputs, write 'C V'"),
        ({"output": "C"}, "output has dims 'C'; expected a dim .* or 'C 1'"),
        ({"scalars": {"s": "x"}}, "default of scalar 's' is 'x'; expected a number"),
        ({"scalars": {"s": True}}, "default of scalar 's' is True"),
        ({"log_scaled": LogScaled(None, "w")}, "log_scaled decay is None; expected the name"),
    ],
    ids=str,
)
def test_fields_of_another_kind(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(**changes)
