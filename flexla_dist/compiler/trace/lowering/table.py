"""The table of spellings, and what its entries share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer

LOWERINGS: dict[str, Callable[..., Any]] = {}
_HIDDEN = {"getitem", "mT", "clone", "contiguous", "rsub"}


def supported_names() -> list[str]:
    """Spellings that may be used inside a callable."""
    return sorted(set(LOWERINGS) - _HIDDEN)


def lowering(*names: str) -> Callable[[Any], Any]:
    """Register a function for one or more spellings."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            LOWERINGS[name] = fn
        return fn

    return register


def axis_of(t: Tracer, x: Any, dim: Any) -> int:
    """A dim that the user named by number, counted from the end."""
    rank = len(x.dims)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise t.error(f"dim {dim!r} does not exist in a value with {rank} dims")
    return int(dim) - rank if dim >= 0 else int(dim)


def value_of(t: Tracer, x: Any) -> Any:
    """The argument as a traced value; a number becomes a constant."""
    operand = t.operand(x)
    if isinstance(operand, float):
        operand = t.builder.expand(operand, ())
    return t.wrap(operand)
