"""Words of a command line that describe a call: sizes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexla_dist.errors import FlexlaError

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def parse_shape(text: str) -> dict[str, int]:
    """Sizes by letter of a word `B,T,H,K,V`, of which later ones may be missing."""
    names = ("B", "T", "H", "K", "V")
    numbers = [_number(word, "--shape B,T,H,K,V") for word in text.split(",")]
    if len(numbers) > len(names):
        raise Usage(f"--shape has {len(numbers)} numbers; expected at most five: B,T,H,K,V")
    return dict(zip(names, numbers, strict=False))


def parse_sizes(words: Sequence[str]) -> dict[str, int]:
    """Sizes by dim of words `DIM=N`."""
    out = {}
    for word in words:
        name, _, number = word.partition("=")
        out[name.strip()] = _number(number, f"--size {word}, which is DIM=N")
    return out


def refuse_twice(shape: dict[str, int], sizes: dict[str, int]) -> None:
    """Raise for a size that both have."""
    for name in sizes:
        if name in shape:
            raise Usage(
                f"{name} is given twice: --shape says {shape[name]} and --size says {sizes[name]}; "
                "leave one out"
            )


def _number(word: str, where: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise Usage(f"{word!r} in {where} is no whole number") from None


class Usage(FlexlaError, ValueError):
    """A word of the command line does not fit."""
