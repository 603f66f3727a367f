"""What a search has done, so that it goes on where it stopped.

Contract: a file of JSON lines, one for each kernel, appended when the kernel is done.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flexla_dist.compiler.tuned.database import Key
from flexla_dist.errors import TuningError


class SearchState:
    """Kernels that were tuned; `again` forgets those of earlier runs."""

    def __init__(self, file: Path, again: bool = False):
        self.file = file
        self._known: set[Key] = set()
        if file.exists() and not again:
            for at, line in enumerate(file.read_text().splitlines()):
                try:
                    self._known.add(Key(**json.loads(line)["key"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise TuningError(
                        f"line {at + 1} of {file}, the state of a search, is not right ({error}); "
                        "remove the file, or search with --again"
                    ) from error

    def knows(self, key: Key) -> bool:
        """Whether a kernel was tuned."""
        return key in self._known

    def note(
        self, key: Key, name: str, before: float, after: float, tried: Sequence[Sequence[str]]
    ) -> None:
        """A kernel is done."""
        self._known.add(key)
        row = {"key": asdict(key), "name": name, "before_us": before, "us": after, "tried": tried}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
