"""Attribute access to a stage's named values.

Contract: `Values` is what the three callables receive (`x.q`, `p.scale`, `c.decay`). A name that
does not exist is an error that lists the names that do, at the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flexla_dist.errors import SpecError
from flexla_dist.shapes import nearest

_MAPPING_METHODS = frozenset({"get", "items", "keys", "values"})


class Values(Mapping[str, Any]):
    """Named values of a stage, readable as attributes and as items.

    `kind` names them in messages ("input", "parameter", "local value", "state"). `fail` turns a
    message into the exception to raise; the tracer passes one that adds the user's source line.
    """

    __slots__ = ("_fail", "_kind", "_values")

    def __init__(
        self,
        values: Mapping[str, Any],
        kind: str = "value",
        fail: Callable[[str], Exception] = SpecError,
    ):
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_fail", fail)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        values = object.__getattribute__(self, "_values")
        if name in values:  # first, so that a value may be called `keys` or `items`
            return values[name]
        if name in _MAPPING_METHODS:
            return object.__getattribute__(self, name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            known = ", ".join(self._values) or "none"
            hint = nearest(name, self._values)
            raise self._fail(f"no {self._kind} named {name!r}{hint}; known: {known}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._fail(
            f"{self._kind} {name!r} cannot be assigned; return new values from the stage instead"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Values({', '.join(self._values)})"
