"""Values that forward keeps for backward."""

from __future__ import annotations

import pytest
import torch

from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell
from flexla_dist.compiler.kernels import buffer_name
from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.compiler.shared_values import shared_values
from flexla_dist.spec.variants import get_variant

COUNTS = {"linear_attn": 0, "simple_gla": 0, "gla": 1, "delta_rule": 1, "kda": 3}


@pytest.mark.parametrize("name", COUNTS)
def test_backward_reads_what_forward_keeps(name: str) -> None:
    executor = TritonExecutor(compile_graphs(get_variant(name)))
    assert len(executor.kept) == COUNTS[name]
    stored = {n for k in executor.forward_schedule.kernels for n in k.stores.values()}
    backward = executor.backward_schedule.kernels
    read = {n for k in backward for n in k.loads}
    computed = {n for k in backward for n in k.body}
    for mine, theirs in executor.kept:
        assert mine in stored
        assert theirs in read and theirs not in computed
        assert mine.target is theirs.target
    assert not any(n.target in (ops.decay_scores, ops.unit_tril_inverse) for n in computed)


def scores(first: str, second: str, strict: bool = False) -> Cell:
    builder = Builder()
    named = {n: builder.placeholder(n, ("C", "K"), "input") for n in ("q", "k", "b")}
    found = builder.emit(
        ops.decay_scores, named[first], named[second], named["b"], named["b"], strict=strict
    )
    return builder.finish({"o": found})


def test_equal_means_the_same_operands_and_attributes() -> None:
    one = scores("q", "k")
    assert [a.name for a, _ in shared_values(one, scores("q", "k"))] == ["decay_scores"]
    assert shared_values(one, scores("k", "q")) == ()
    assert shared_values(one, scores("q", "k", strict=True)) == ()


def test_kept_values_have_the_shape_that_is_told_in_advance() -> None:
    executor = TritonExecutor(compile_graphs(get_variant("kda")))
    names = [buffer_name(mine) for mine, _ in executor.kept]
    assert len(set(names)) == 3
    kinds = {executor.kept_dtype(mine, torch.bfloat16) for mine, _ in executor.kept}
    assert kinds == {torch.float32, torch.bfloat16}  # what an inverse reads, and the rest
