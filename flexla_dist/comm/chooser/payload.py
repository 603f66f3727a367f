"""What travels in a scan and what composing it costs, in bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from flexla_dist.comm.device.panels import LARGEST_DENSE, StateForm, tiling
from flexla_dist.comm.element import Element, element_bytes, state_bytes

KINDS = ("none", "scalar", "rows", "full", "dense")
PANEL_COLUMNS = 64
_READ_WRITE_STATE = {"none": 3, "scalar": 5, "rows": 5, "full": 6, "dense": 5}


@dataclass(frozen=True)
class Payload:
    """The element of one rank as the cost model sees it.

    state, transition: bytes of the state and of M. kind: M's kind, one of `KINDS`.
    apply_flops, compose_flops: of M times a state, and of M times M; zero unless M is dense.
    panels: parts of a state that the device engine signals by themselves. repeats: panels of a
    head that each carry and compose the whole of a dense M there.
    """

    state: int
    transition: int
    kind: str
    apply_flops: float = 0.0
    compose_flops: float = 0.0
    panels: int = 1
    repeats: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind of M is {self.kind!r}, expected one of: {', '.join(KINDS)}")
        if self.state < 0 or self.transition < 0 or self.panels < 1 or self.repeats < 1:
            raise ValueError(
                f"got {self.state} bytes of state, {self.transition} of M, {self.panels} panels, "
                f"{self.repeats} repeats; expected no negative bytes and at least one panel"
            )

    @classmethod
    def of_heads(cls, kind: str, heads: int, key_dim: int = 128, value_dim: int = 128) -> Payload:
        """float32 states [heads, key_dim, value_dim] with an M of `kind`; heads: batch included."""
        state = 4 * heads * key_dim * value_dim
        per_head = {"none": 0, "scalar": 1, "rows": key_dim, "full": key_dim * value_dim}
        dense = kind == "dense"
        transition = 4 * heads * (key_dim * key_dim if dense else per_head.get(kind, 0))
        tiles = _tiles((key_dim, value_dim), dense)
        return cls(
            state,
            transition,
            kind,
            2.0 * key_dim * state / 4 if dense else 0.0,
            2.0 * key_dim * transition / 4 if dense else 0.0,
            max(1, heads * tiles),
            tiles if dense else 1.0,
        )

    @classmethod
    def of_element(cls, element: Element, template: Sequence[Tensor]) -> Payload:
        """The payload of an element and the states that it acts on."""
        state = state_bytes(template)
        apply = compose = repeated = 0.0
        panels = 0
        for part in element.states:
            groups, heads, *dims = part.local.shape
            tiles = _tiles(tuple(dims), part.matrix is not None)
            panels += groups * heads * tiles
            if part.matrix is not None:
                width = part.matrix.shape[-1]
                repeated += tiles * 2.0 * width * part.matrix.numel()
                apply += 2.0 * width * part.local.numel()
                compose += 2.0 * width * part.matrix.numel()
        return cls(
            state,
            element_bytes(element) - state,
            _kind(element),
            apply,
            compose,
            max(1, panels),
            repeated / compose if compose else 1.0,
        )

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return self.state + self.transition

    @property
    def apply_bytes(self) -> float:
        """Bytes read and written to take a state through the element, one operation after another:
        M's action and the sum, each with its operands and its result."""
        return _READ_WRITE_STATE[self.kind] * self.state + self.transition

    @property
    def compose_bytes(self) -> float:
        """Bytes read and written to compose two M."""
        return 3.0 * self.transition


def _tiles(dims: tuple[int, ...], dense: bool) -> int:
    """Panels of one head's state, as the device engine cuts it; what it cannot hold, by columns."""
    if len(dims) not in (1, 2) or (dense and dims[0] > LARGEST_DENSE):
        return ceil(dims[-1] / PANEL_COLUMNS) if dims else 1
    return tiling(StateForm(dims, None, dense)).tiles


def _kind(element: Element) -> str:
    """The costliest kind of M among the states."""
    kinds = ["scalar" if element.log_scaled else "none"]
    for part in element.states:
        if part.matrix is not None:
            kinds.append("dense")
        elif part.decay is not None:
            shares = part.local.numel() // max(1, part.decay.numel())
            small = part.decay.shape[2:].numel() == 1
            kinds.append("scalar" if small else "full" if shares <= 1 else "rows")
    return max(kinds, key=KINDS.index)
