"""What groups of heads are, and into how many segments its scans are cut then."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

from flexla_dist.compiler.aot import describe_call
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.errors import ShardingError
from flexla_dist.parallel.engine import check_groups, cut_heads

from .compiled import graphs_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes all heads at once"
)
LONG = 16384


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
