"""The one glossary of shape letters, and the checks that speak in them.

    B   batch                     T   tokens of the whole call
    H   heads of q and k          HV  heads of v, of the state and of the output
    K   key width of a head       V   value width of a head
    C   tokens of one chunk       N   documents: B, or len(cu_seqlens) - 1 when packed
    P   ranks of a sequence group W   taps of a short convolution
    D   model width, or the width of a vector state (hgrn)

"chunk" is the compute tile, "segment" a run of chunks within one device, "shard" a rank's span of
the sequence. Tensors are `[B, T, H, K]`, states `[N, HV, K, V]`, gates natural logarithms.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable

TOKEN_DIM = "C"
UNIT_DIM = "1"
Dims = tuple[str, ...]


def format_dims(dims: Dims) -> str:
    """`("C", "K")` as `[C, K]`, for messages and printed graphs."""
    return "[" + ", ".join(dims) + "]"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint ` (did you mean 'x'?)` for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def whole_numbers(name: str, values: object, error: type[Exception]) -> tuple[int, ...]:
    """A sequence of integers of any kind as Python integers; `error` for fractions and booleans."""
    kind = type(values).__name__
    fix = "expected whole numbers: give ints, an integer array or an integer tensor"
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise error(f"{name} is {values!r}, a {kind}; {fix}")
    found = []
    for place, value in enumerate(values):
        if type(value) is int:  # also those that Dynamo made symbolic, of which it knows no more
            found.append(value)
            continue
        kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        try:
            if kind == "bool":
                raise TypeError
            found.append(operator.index(value))
        except TypeError:
            raise error(f"{name}: entry {place} is {value!r}, a {kind}; {fix}") from None
    return tuple(found)
