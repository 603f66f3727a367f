"""Rows of `multi_gpu.sh` that are not points of the weak grid: checks, links, training, failure."""

from __future__ import annotations

from pathlib import Path

from scaling_runs.machine import Machine
from scaling_runs.rows import Row, RowStore
from scaling_runs.weak_rows import cpu_count, cpu_name

NAME = ("step", "engine", "strategy", "variant", "quantity", "bytes")
COLUMNS = (
    *("date", "commit", "gpu", "host", "cores", "torch", "triton", "carrier", "ranks", "sizes"),
    *(*NAME, "value", "unit", "bound", "first", "middle", "last", "status", "note"),
)
KEY = ("gpu", "host", "ranks", "sizes", *NAME)
SHOWN = (*NAME, "value", "unit", "bound", "first", "middle", "last", "status", "note")
DONE = ("ok", "refused", "wrong", "failed", "begun")


class Rows:
    """The CSV file of a machine.

    A row that was begun and not finished counts as done, so that a step which is started again gets
    past what ended it; `fresh` measures all anew.
    """

    def __init__(self, folder: Path, machine: Machine, ranks: int, sizes: str, carrier: str):
        self.machine = machine
        self.store = RowStore(folder / f"multi_gpu_{machine.slug}.csv", COLUMNS, KEY)
        self._shared = {
            **machine.columns(),
            "host": cpu_name(),
            "cores": cpu_count(),
            "carrier": carrier,
            "ranks": ranks,
            "sizes": sizes,
        }

    def put(self, step: str, status: str, **columns: object) -> Row:
        """Keep a row; its name is made of `step` and those of NAME that are given."""
        unnamed = dict.fromkeys(NAME, "")
        return self.store.put(
            {**unnamed, **self._shared, **columns, "step": step, "status": status}
        )

    def known(self, step: str, **name: object) -> bool:
        """Whether the present commit has such a row, finished or not."""
        row = self.store.get({**dict.fromkeys(NAME, ""), **self._shared, **name, "step": step})
        if row is None or row["status"] not in DONE:
            return False
        return self.machine.measured_same_code(row)

    def of_this_run(self) -> list[Row]:
        """All rows of this number of ranks and these sizes."""
        same = ("gpu", "host", "ranks", "sizes")
        return [r for r in self.store.rows() if all(r[n] == str(self._shared[n]) for n in same)]
