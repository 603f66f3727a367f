"""The short convolution: against torch's, cut in two, packed."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from flexla_dist.layers.convolution import ShortConvolution, document_positions


def make(channels: int = 3, width: int = 4) -> ShortConvolution:
    torch.manual_seed(0)
    return ShortConvolution(channels, width).double()


def oracle(conv: ShortConvolution, x: torch.Tensor) -> torch.Tensor:
    kernel = conv.weight.flip(0).T[:, None]
    padded = F.pad(x.transpose(1, 2), (conv.width - 1, 0))
    return F.silu(F.conv1d(padded, kernel, groups=x.shape[-1])).transpose(1, 2)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("width", [2, 4])
def test_equals_torch(tokens: int, width: int) -> None:
    conv, x = make(width=width), torch.randn(2, tokens, 3, dtype=torch.float64)
    y = conv(x, x.new_zeros(2, width - 1, 3))
    torch.testing.assert_close(y, oracle(conv, x))


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_halo_continues_a_sequence(cut: int) -> None:
    conv, x = make(), torch.randn(1, 9, 3, dtype=torch.float64)
    padded = F.pad(x, (0, 0, 3, 0))
    first = conv(x[:, :cut], padded[:, :3])
    second = conv(x[:, cut:], padded[:, cut : cut + 3])
    torch.testing.assert_close(torch.cat([first, second], 1), oracle(conv, x))


def test_documents_do_not_see_each_other() -> None:
    conv, x = make(), torch.randn(1, 12, 3, dtype=torch.float64)
    starts = [0, 0, 1, 3, 8, 8, 12]
    halo = torch.randn(1, 3, 3, dtype=torch.float64)
    y = conv(x, halo, torch.tensor(starts))
    for number, (start, stop) in enumerate(pairwise(starts)):
        if start == stop:
            continue
        before = halo if number == 1 else torch.zeros_like(halo)
        torch.testing.assert_close(y[:, start:stop], conv(x[:, start:stop], before))


def test_nothing_that_is_masked_leaks_nan() -> None:
    conv, x = make(), torch.randn(1, 6, 3, dtype=torch.float64)
    x[:, 2] = float("nan")
    y = conv(x, x.new_zeros(1, 3, 3), torch.tensor([0, 3, 6]))
    assert y[:, 3:].isfinite().all() and y[:, 2].isnan().all()


def test_empty_shard() -> None:
    conv = make()
    x = torch.zeros(1, 0, 3, dtype=torch.float64, requires_grad=True)
    y = conv(x, x.new_zeros(1, 3, 3), torch.tensor([0]))
    assert y.shape == (1, 0, 3)
    y.sum().backward()


def test_positions() -> None:
    positions = document_positions(torch.tensor([0, 2, 2, 5]), 5, torch.device("cpu"))
    assert positions.tolist() == [0, 1, 0, 1, 2]


def test_width_is_checked() -> None:
    with pytest.raises(ValueError, match="width >= 2"):
        ShortConvolution(4, 1)
