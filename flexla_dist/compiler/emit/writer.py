"""Source text with indentation and fresh, readable names."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_COMMENT_COLUMN = 64


class Writer:
    """Collects lines; `assign` gives every value its own name."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.lines: list[str] = []
        self._depth = 0
        self._taken = set(reserved) | set(keyword.kwlist)

    def line(self, text: str = "") -> None:
        """One line at the current depth."""
        self.lines.append("    " * self._depth + text if text else "")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """An indented block below `head`."""
        self.line(head)
        with self.indent():
            yield

    @contextmanager
    def indent(self) -> Iterator[None]:
        """One level deeper."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def fresh(self, base: str) -> str:
        """A name not used yet that begins with `base`."""
        base = re.sub(r"\W", "_", base)
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name

    def assign(self, base: str, text: str, note: str = "") -> str:
        """`name = text  # note`; returns the name."""
        name = self.fresh(base)
        code = f"{name} = {text}"
        self.line(f"{code:<{_COMMENT_COLUMN}}  # {note}" if note else code)
        return name

    def text(self) -> str:
        """Everything written."""
        return "\n".join(self.lines) + "\n"
