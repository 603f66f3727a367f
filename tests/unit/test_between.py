"""PyTorch operations between kernels: their results lie in memory of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexla_dist.compiler.executor import between
from flexla_dist.compiler.executor.segments import Segments

ONE = Segments((0,), (0, 32), (0, 2))
TWO = Segments((0, 1), (0, 16, 32), (0, 1, 2))
CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "one row": ((3, 2, 4, 4), lambda x: between.exit_rows(x, [1])),
    "rows in a row": ((3, 2, 4, 4), lambda x: between.exit_rows(x, [0, 1, 2])),
    "some rows": ((4, 2, 4, 4), lambda x: between.exit_rows(x, [0, 1, 3])),
    "one tile": ((1, 1, 8, 2, 4), lambda x: between.input_sum(x, 1, torch.float32)),
    "no tile": ((0, 1, 8, 2, 4), lambda x: between.input_sum(x, 1, torch.float32)),
    "two tiles": ((2, 1, 8, 2, 4), lambda x: between.input_sum(x, 1, torch.float32)),
    "a group": ((1, 1, 8, 2, 4), lambda x: between.input_sum(x, 2, torch.float32)),
    "parameter": ((1, 1, 2), lambda x: between.param_sum(x, torch.float32)),
    "folded": ((2, 1, 4, 4), lambda x: folded(x, reverse=False, segments=TWO)),
    "folded backwards": ((2, 1, 4, 4), lambda x: folded(x, reverse=True, segments=TWO)),
    "one segment": ((1, 1, 4, 4), lambda x: folded(x, reverse=False, segments=ONE)),
    "one segment backwards": ((1, 1, 4, 4), lambda x: folded(x, reverse=True, segments=ONE)),
}


def folded(x: Tensor, *, reverse: bool, segments: Segments) -> Tensor:
    return between.folded(x, x, x, reverse=reverse, segments=segments)


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_change_with_their_arguments(name: str) -> None:
    shape, function = CASES[name]
    x = torch.randn(shape)
    found = function(x)
    want = found.clone()
    x.fill_(0.0)
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert found.is_contiguous()
