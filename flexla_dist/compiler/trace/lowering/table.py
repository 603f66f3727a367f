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


def is_traced(x: Any) -> bool:
    """Whether an argument is a value of the chunk."""
    return hasattr(x, "node") and hasattr(x, "tracer")


def check_dtype(t: Tracer, dtype: Any, whole: bool = False) -> None:
    """Refuse a dtype that would change numbers: the compiler decides about floating types alone.
    `whole` tells that the values are whole numbers, which integer types hold as well."""
    if dtype is None or dtype.is_floating_point or (whole and not dtype.is_complex):
        return
    kind = "complex numbers" if dtype.is_complex else "whole numbers, which would be rounded"
    raise t.error(
        f"dtype={dtype}: values of a chunk are real numbers of a floating type, not {kind}. Leave "
        "the dtype out, or convert outside and pass the result as an input"
    )


def axis_of(t: Tracer, x: Any, dim: Any) -> int:
    """A dim that the user named by number, counted from the end."""
    rank = len(x.dims)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise t.error(f"dim {dim!r} does not exist in a value with {rank} dims")
    return int(dim) - rank if dim >= 0 else int(dim)


def axes_of(t: Tracer, x: Any, dim: Any) -> list[int]:
    """One dim, several, or all (None or no dim, as in torch), counted from the end, in order."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(-len(x.dims), 0))
    axes = [axis_of(t, x, a) for a in (dim if isinstance(dim, list | tuple) else (dim,))]
    if len(set(axes)) != len(axes):
        raise t.error(f"dim={dim!r} names a dim twice in a value with {len(x.dims)} dims")
    return sorted(axes)


def value_of(t: Tracer, x: Any) -> Any:
    """The argument as a traced value; a number becomes a constant."""
    operand = t.operand(x)
    if isinstance(operand, float):
        operand = t.builder.expand(operand, ())
    return t.wrap(operand)
