"""Lightning Attention (arXiv 2405.17381): `simple_gla` with a constant decay by head and layer.

The decay is an input `g`, `head_decay` broadcast over batch and tokens, as in `retention`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError
from flexla_dist.spec.variants import simple_gla


def head_decay(
    heads: int, layer_idx: int, num_layers: int, device: torch.device | str | None = None
) -> Tensor:
    """Natural-log decays `-(8 h / heads) (1 - layer_idx / num_layers)`, `[heads]`, float32.

    Raises ArgumentError unless 0 <= layer_idx <= num_layers and there is a layer.
    """
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (layer_idx, num_layers))
    if not whole or num_layers < 1 or not 0 <= layer_idx <= num_layers:
        raise ArgumentError(
            f"layer_idx = {layer_idx!r} of num_layers = {num_layers!r}; expected whole "
            "numbers with 0 <= layer_idx <= num_layers and num_layers at least 1; elsewhere the "
            "decay would grow"
        )
    slope = 8 / heads * (1 - layer_idx / num_layers)
    return -slope * torch.arange(heads, dtype=torch.float32, device=device)


SPEC = replace(simple_gla.SPEC, name="lightning")
