"""Where the slots, flags and counters of an exchange lie in a symmetric block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flexla_dist.comm.device.panels import StateForm, Tiling, tiling
from flexla_dist.comm.links import node_runs

WORD = 8
RECORD_WORDS = 8  # of what a rank reports when a wait expires
_ALIGNMENT = 256


@dataclass(frozen=True)
class Signature:
    """What is exchanged, the same on all ranks: lanes (groups times heads), states, entry or not.

    entry: a state is given that enters the first rank.
    """

    lanes: int
    states: tuple[StateForm, ...]
    entry: bool = False

    def __str__(self) -> str:
        states = "; ".join(map(str, self.states))
        return f"{self.lanes} heads of {states}" + (" with an entry" if self.entry else "")


@dataclass(frozen=True)
class Layout:
    """Byte offsets in a rank's part of the block for one direction; the same on all ranks.

    rounds: of doubling; slots: messages that a panel can hold of one parity; channels: ways out of
    a panel. slots_at and staging_at: by state. Every panel has two slots of each kind, two flags,
    two credits and two words that say what was sent last; one epoch; one staging message.
    """

    strategy: str
    size: int
    rounds: int
    slots: int
    channels: int
    tilings: tuple[Tiling, ...]
    panels: tuple[int, ...]
    errors: int
    flags: int
    credits: int
    sent: int
    epochs: int
    slots_at: tuple[int, ...]
    staging_at: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(
        cls, signature: Signature, strategy: str, size: int, nodes: Sequence[int], staging: bool
    ) -> Layout:
        """Lay out an exchange of `size` ranks; staging: the dialect writes messages here first."""
        tilings = tuple(tiling(form) for form in signature.states)
        panels = tuple(signature.lanes * t.tiles for t in tilings)
        rounds, slots, channels = _ways(strategy, size, nodes)
        messages = [t.message_bytes(strategy) for t in tilings]
        total = sum(panels)
        sizes = [
            WORD * RECORD_WORDS * (size + 1),
            2 * WORD * slots * total,
            2 * WORD * channels * total,
            2 * WORD * channels * total,
            WORD * total,
            *(2 * slots * count * each for count, each in zip(panels, messages, strict=True)),
            *(count * each * staging for count, each in zip(panels, messages, strict=True)),
        ]
        ends = list(accumulate(_aligned(nbytes) for nbytes in sizes))
        starts = [0, *ends]
        states = len(tilings)
        errors, flags, credits, sent, epochs = starts[:5]
        return cls(
            strategy=strategy,
            size=size,
            rounds=rounds,
            slots=slots,
            channels=channels,
            tilings=tilings,
            panels=panels,
            errors=errors,
            flags=flags,
            credits=credits,
            sent=sent,
            epochs=epochs,
            slots_at=tuple(starts[5 : 5 + states]),
            staging_at=tuple(starts[5 + states : 5 + 2 * states]),
            nbytes=ends[-1],
        )

    def moved_by(self, nbytes: int) -> Layout:
        """The same layout further back in the block."""
        return replace(
            self,
            errors=self.errors + nbytes,
            flags=self.flags + nbytes,
            credits=self.credits + nbytes,
            sent=self.sent + nbytes,
            epochs=self.epochs + nbytes,
            slots_at=tuple(at + nbytes for at in self.slots_at),
            staging_at=tuple(at + nbytes for at in self.staging_at),
        )


def _ways(strategy: str, size: int, nodes: Sequence[int]) -> tuple[int, int, int]:
    """(rounds, slots, channels) of a strategy; see `elementwise` for who uses which."""
    if strategy == "chain":
        return 0, 1, 1
    if strategy == "all_gather":
        return 0, size, size
    if strategy == "log_scan":
        rounds = (size - 1).bit_length()
        return rounds, max(1, rounds), max(1, rounds)
    rounds = (max(node_runs(nodes)) - 1).bit_length()
    return rounds, rounds + 1, rounds + size


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
