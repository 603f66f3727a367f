"""The element of one span, as the communication layer takes it.

Contract: plain data with the fields that `flexla_dist.comm` reads; the compiler does not import
it. `states` holds one entry a state: `local` [G, HV, ...] is S_hat, `decay` an elementwise M
(None is one), `matrix` a dense M [G, HV, K, K]. G is B, or 1 when packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StateMap:
    """M and S_hat of one state over a span."""

    local: Tensor
    decay: Tensor | None = None
    matrix: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> StateMap:
        """The same map, every tensor changed."""
        decay = None if self.decay is None else change(self.decay)
        return StateMap(
            change(self.local), decay, None if self.matrix is None else change(self.matrix)
        )


@dataclass(frozen=True)
class SpanMap:
    """S_out = M S_in + S_hat over a span, for every state of a spec."""

    states: tuple[StateMap, ...]
    log_decay: Tensor | None = None
    log_weight: Tensor | None = None
