"""Result rows in a CSV file, one a key, and their printing.

Contract: a file has the columns it was opened with, in order; a row with the key of an older one
takes its place; the file is whole after every `put`, so that a run may be stopped at any time. In a
file that was written before the last columns were thought of, these are empty.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Row = dict[str, str]


class RowStore:
    """Rows of one CSV file by key."""

    def __init__(self, path: Path, columns: Sequence[str], key: Sequence[str]):
        missing = [name for name in key if name not in columns]
        if missing:
            raise ValueError(f"key columns {missing} are not among the columns {list(columns)}")
        self.path, self.columns, self.key = path, tuple(columns), tuple(key)
        self._rows: dict[tuple[str, ...], Row] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            found = tuple(reader.fieldnames or ())
            if not found or found != self.columns[: len(found)]:
                raise ValueError(
                    f"{self.path} has the columns {','.join(found)}; expected "
                    f"{','.join(self.columns)}. Move it away to begin a new one"
                )
            for row in reader:
                whole = dict.fromkeys(self.columns, "") | row
                self._rows[self.key_of(whole)] = whole

    def key_of(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """The key of a row, as text."""
        return tuple(str(row[name]) for name in self.key)

    def get(self, row: Mapping[str, object]) -> Row | None:
        """The row kept under the key of `row`."""
        return self._rows.get(self.key_of(row))

    def rows(self) -> list[Row]:
        """All rows, oldest key first."""
        return list(self._rows.values())

    def put(self, row: Mapping[str, object]) -> Row:
        """Keep a row in place of an older one of its key, and write the file."""
        unknown = [name for name in row if name not in self.columns]
        if unknown:
            raise ValueError(f"columns {unknown} do not exist; expected {list(self.columns)}")
        text = {name: _text(row.get(name, "")) for name in self.columns}
        self._rows[self.key_of(text)] = text
        self._write()
        return text

    def remove(self, columns: Mapping[str, str]) -> None:
        """Forget the rows that have these values; the file changes with the next `put`."""
        self._rows = {
            key: row
            for key, row in self._rows.items()
            if any(row[name] != value for name, value in columns.items())
        }

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows.values())
        temporary.replace(self.path)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_table(rows: Iterable[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Rows as text in aligned columns; columns that are empty in every row are left out."""
    lines = [[_text(row.get(name, "")) for name in columns] for row in rows]
    used = [i for i in range(len(columns)) if any(line[i] for line in lines)]
    table = [[columns[i] for i in used], *([line[i] for i in used] for line in lines)]
    widths = [max(len(line[i]) for line in table) for i in range(len(used))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )
