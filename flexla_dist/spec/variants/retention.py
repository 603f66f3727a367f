"""RetNet's retention (arXiv 2307.08621): `simple_gla` with one constant decay a head.

The decay is an input `g`, `head_decay` broadcast over batch and tokens, so that ragged chunks can
be masked like any other gate.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexla_dist.spec.variants import simple_gla


def head_decay(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Natural-log decays `log(1 - 2^(-5-h))` of the heads, `[heads]`, float32."""
    heads_index = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.log1p(-(2.0 ** (-5.0 - heads_index))).float()


SPEC = replace(simple_gla.SPEC, name="retention")
