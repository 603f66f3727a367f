"""What a message is for: the tag in its header, and the header's layout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

HEADER_WORDS = 8
HEADER_BYTES = 8 * HEADER_WORDS
_MAGIC = 0x464C41  # "FLA"
_NO_CONTEXT = 1 << 62
_DIRECTIONS: tuple[Literal["forward"], Literal["backward"]] = ("forward", "backward")


class Kind(IntEnum):
    """What the payload of a message is."""

    STATE = 1
    ELEMENT = 2
    ROWS = 3
    ROW_GRADIENTS = 4
    TENSOR = 5


def outside_context(lengths_id: int) -> int:
    """The number that stands for a micro-batch outside of any context; lengths_id: 32 bits that
    tell other shard lengths apart."""
    return _NO_CONTEXT | lengths_id


def micro_batch_words(number: int) -> str:
    """`micro-batch 3`, or that there was no context."""
    if number < _NO_CONTEXT:
        return f"micro-batch {number}"
    return f"no context with lengths of hash {number - _NO_CONTEXT:08x}"


@dataclass(frozen=True, slots=True)
class Tag:
    """Place of an exchange in the program; equal on all ranks for the same exchange."""

    step: int = 0
    micro_batch: int = 0
    layer: int = 0
    call: int = 0
    direction: Literal["forward", "backward"] = "forward"

    def __str__(self) -> str:
        return (
            f"step {self.step}, {micro_batch_words(self.micro_batch)}, layer {self.layer}, "
            f"call {self.call}, {self.direction}"
        )


@dataclass(frozen=True, slots=True)
class Header:
    """First 64 bytes of a message: eight 64-bit words, native byte order."""

    kind: Kind
    tag: Tag
    reset: bool
    payload_bytes: int

    def words(self) -> list[int]:
        """The header as integers."""
        tag = self.tag
        kind = _MAGIC << 8 | int(self.kind)
        direction = _DIRECTIONS.index(tag.direction)
        place = [tag.step, tag.micro_batch, tag.layer, tag.call, direction]
        return [kind, *place, int(self.reset), self.payload_bytes]

    def describe(self) -> str:
        """The header in words, for messages."""
        return describe_words(self.words())


def same_message(words: list[int], expected: list[int]) -> bool:
    """Whether two headers agree in everything but the reset flag."""
    return words[:6] == expected[:6] and words[7] == expected[7]


def describe_words(words: list[int]) -> str:
    """A received header in words; says so when it is none."""
    kinds = {int(kind): kind.name.lower() for kind in Kind}
    if words[0] >> 8 != _MAGIC or words[0] & 0xFF not in kinds or not 0 <= words[5] < 2:
        return f"no header of this package (words {words})"
    tag = Tag(words[1], words[2], words[3], words[4], _DIRECTIONS[words[5]])
    return f"{kinds[words[0] & 0xFF]} of {words[7]} bytes for ({tag})"
