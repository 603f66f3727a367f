"""Which groups of heads a call takes, and into how many segments its scans are cut then."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.compiler.aot import describe_call
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.errors import ShardingError
from flexla_dist.parallel.engine import check_groups, cut_heads

from .compiled import graphs_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes all heads at once"
)
LONG, HALVES = 16384, ((0, 16), (16, 16))


@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule"])
def test_two_groups_where_half_of_the_heads_fill_the_device(name: str) -> None:
    executor = TritonExecutor(graphs_of(name))

    def groups(heads: int, tokens: int, mean: int | None = None) -> tuple[tuple[int, int], ...]:
        sizes = {"K": 128, "V": 128}
        problem = describe_call(
            executor.graphs, tokens=tokens, heads=heads, sizes=sizes, dtype=torch.bfloat16
        )
        return executor.head_groups(problem, tokens if mean is None else mean)

    assert groups(32, LONG) == HALVES
    assert groups(32, 256) == ((0, 32),)
    assert groups(31, LONG) == ((0, 31),)
    assert groups(1, LONG) == ((0, 1),)
    # A rank with few tokens does as the others do.
    assert groups(32, 1, LONG) == groups(32, 300, LONG) == HALVES


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_each_group_has_segments_enough(name: str) -> None:
    executor = TritonExecutor(graphs_of(name))
    sizes = {"K": 128, "V": 128}
    problem = describe_call(executor.graphs, tokens=LONG, heads=32, sizes=sizes)
    programs = 32 * executor.scan_tiles(problem)
    for groups in (2, 4):
        cutting = executor.cutting(problem, groups)
        assert cutting is not None
        assert cutting.segments * programs // groups <= 2 * 132
        assert cutting.segments * programs // groups > 60
    whole = executor.cutting(problem)
    assert whole is None or whole.segments >= 4


def test_cut_heads() -> None:
    assert cut_heads(2, 6) == ((0, 3), (3, 3))
    assert cut_heads(3, 7) == ((0, 2), (2, 2), (4, 3))
    assert cut_heads(4, 2) == ((0, 1), (1, 1))
    assert cut_heads((1, 3), 4) == ((0, 1), (1, 3))
    with pytest.raises(ShardingError, match="3 together; expected the 4 of a state"):
        cut_heads((1, 2), 4)
    for wrong in (0, -1, (1, 0), (), 1.5, ("2",)):
        with pytest.raises(ShardingError, match="how many groups of heads"):
            check_groups(wrong)  # type: ignore[arg-type]
    for right in (None, 1, 2, (3, 1)):
        check_groups(right)
