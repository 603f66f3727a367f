"""Specs and operators through pickle and copy: by the names of their callables, or refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flexla_dist import LinearAttentionSpec, compile
from flexla_dist.errors import NumericsWarning, SpecPicklingError
from flexla_dist.spec.variants import get_variant, variant_names

from .comparing import small


def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
    return {"q": x.q.exp(), "k": x.k, "v": x.v}


def decay_mode(S: Any, c: Any, factor: float = 1.0) -> Any:
    return S + factor * (c.k.T @ c.v)


def merge_mode(S: Any, c: Any) -> Any:
    return c.q @ S + (c.q @ c.k.T).tril() @ c.v


OWN = LinearAttentionSpec(
    "own",
    inputs={"q": "C K", "k": "C K", "v": "C V"},
    chunk_mode=chunk_mode,
    decay_mode=partial(decay_mode, factor=2.0),
    merge_mode=merge_mode,
)


@pytest.mark.parametrize("name", variant_names())
def test_specs_come_back_equal(name: str) -> None:
    spec = get_variant(name)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) is copy.copy(spec) is spec


def test_operators_are_compiled_again() -> None:
    op = compile(get_variant("gla"), chunk_size=16, executor="torch")
    again = pickle.loads(pickle.dumps(op))
    assert again is not op and again.chunk_size == 16
    call = small()
    want, _ = op(**call.inputs, **call.scalars)
    got, _ = again(**call.inputs, **call.scalars)
    assert torch.equal(got, want) and again.last_plan == op.last_plan
    assert copy.copy(op) is copy.deepcopy(op) is op


def test_loading_warns_of_nothing_that_was_told() -> None:
    with pytest.warns(NumericsWarning, match="exp of q"):
        stored = pickle.dumps(compile(OWN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(stored)
    assert again.spec.decay_mode.keywords == {"factor": 2.0}


def test_another_process_can_load(tmp_path: Path) -> None:
    path = tmp_path / "op.pickle"
    path.write_bytes(pickle.dumps(compile(get_variant("gated_delta_rule"))))
    code = f"import pickle; print(pickle.load(open({str(path)!r}, 'rb')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("LinearAttentionOp(gated_delta_rule"), done.stderr


def test_callables_without_a_name_are_named() -> None:
    spec = replace(OWN, merge_mode=lambda S, c: c.q @ S)
    with pytest.raises(SpecPicklingError, match=r"own\.merge_mode cannot be pickled .*with def at"):
        pickle.dumps(spec)
    assert isinstance(SpecPicklingError("x"), pickle.PicklingError)
    with pytest.warns(NumericsWarning):
        op = compile(spec)
    with pytest.raises(SpecPicklingError, match=r"own\.merge_mode"):
        pickle.dumps(op)
    assert copy.deepcopy(spec) is spec and copy.deepcopy(op) is op
