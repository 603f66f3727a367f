"""Measured configurations by what they depend on, kept in a JSON file for each architecture.

Contract: plain data; imports no Triton. An entry's key is the structure of a kernel (a hash of its
generated text), the dtype, the sizes of dims and chunk, and two buckets: how many programs there
are for each multiprocessor, and whether the call is short or long. T itself is in no key. The file
has one entry a line, sorted, so that a change of it can be read.

`kernels` hold tile, warps, stages and registers; `scans` how many programs a multiprocessor should
have in the scans of a spec, which decides their number of segments.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flexla_dist.errors import TuningError
from flexla_dist.generated import cache_folder

LOADS = ("few", "some", "many")
LENGTHS = ("short", "long")
LONG = 8192  # tokens of a whole call
CHUNK_LOADS = (2.0, 16.0)  # chunks times heads for each multiprocessor: below some, below many
LOOP_LOADS = (0.5, 2.0)  # documents times heads
NEAR = 1  # buckets away from where an entry was measured, and still used
WARPS = (1, 2, 4, 8, 16)
MOST_STAGES = 8


@dataclass(frozen=True, order=True)
class Key:
    """What a configuration depends on; `load` is one of LOADS, `length` one of LENGTHS."""

    structure: str
    dtype: str
    sizes: str
    load: str
    length: str

    @property
    def plain(self) -> tuple[str, str, str]:
        """The key without its buckets."""
        return self.structure, self.dtype, self.sizes

    def distance(self, other: Key) -> int:
        """Buckets between two keys that are alike else."""
        loads = abs(LOADS.index(self.load) - LOADS.index(other.load))
        return loads + abs(LENGTHS.index(self.length) - LENGTHS.index(other.length))


@dataclass(frozen=True)
class Measured:
    """Where an entry comes from: microseconds with it and with the choice before it."""

    us: float
    before_us: float
    date: str
    commit: str
    gpu: str


@dataclass(frozen=True)
class KernelEntry:
    """Column tile, warps, pipeline stages, most registers a thread (None: no limit), and the bytes
    of shared memory that the kernel then needs (None: not known)."""

    key: Key
    name: str
    tile: int
    warps: int
    stages: int
    registers: int | None
    shared: int | None
    measured: Measured


@dataclass(frozen=True)
class ScanEntry:
    """Programs for each multiprocessor that the scans of a spec are cut for."""

    key: Key
    name: str
    programs: int
    measured: Measured


Entry = KernelEntry | ScanEntry


@dataclass
class Database:
    """The entries of one architecture, by key."""

    arch: str
    kernels: dict[Key, KernelEntry] = field(default_factory=dict)
    scans: dict[Key, ScanEntry] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Add an entry, in place of one with the same key."""
        if isinstance(entry, KernelEntry):
            self.kernels[entry.key] = entry
        else:
            self.scans[entry.key] = entry

    def copy(self) -> Database:
        """One with the same entries, to be added to by itself."""
        return Database(self.arch, dict(self.kernels), dict(self.scans))

    def near(self, key: Key) -> KernelEntry | None:
        """The entry of the nearest bucket that is not far; equally near ones in sorted order."""
        alike = [(key.distance(k), k) for k in self.kernels if k.plain == key.plain]
        found = min(alike, default=None)
        return None if found is None or found[0] > NEAR else self.kernels[found[1]]

    def text(self) -> str:
        """The JSON of the file."""
        lines = ["{", f'  "arch": {json.dumps(self.arch)},', '  "kernels": [']
        lines += _rows(self.kernels.values())
        lines += ["  ],", '  "scans": [']
        lines += _rows(self.scans.values())
        return "\n".join([*lines, "  ]", "}", ""])


def _rows(entries: Iterable[Entry]) -> list[str]:
    ordered = sorted(entries, key=lambda entry: (entry.name, entry.key))
    texts = [f"    {json.dumps(_flat(entry))}" for entry in ordered]
    return [f"{text}," for text in texts[:-1]] + texts[-1:]


def _flat(entry: Entry) -> dict[str, Any]:
    own = asdict(entry)
    key, measured = own.pop("key"), own.pop("measured")
    return {"name": own.pop("name"), **key, **own, **measured}


# -- files ----------------------------------------------------------------------------------------


def package_file(arch: str) -> Path:
    """The file of the package; it is not there for architectures that were never measured."""
    return Path(__file__).parent / f"{arch}.json"


def user_file(arch: str) -> Path:
    """The user's own: `tuned/<arch>.json` in the package's cache folder."""
    return cache_folder() / "tuned" / f"{arch}.json"


def read(path: Path, arch: str) -> Database:
    """The database of a file; empty where there is no file.

    Raises:
        TuningError: the file is not JSON, is of another architecture, or an entry is not right.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Database(arch)
    except OSError as error:
        raise TuningError(f"cannot read the tuning database {path}: {error.strerror}") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TuningError(
            f"the tuning database {path} is not JSON ({error}); mend or remove it"
        ) from error
    if not isinstance(data, dict) or data.get("arch") != arch:
        got = data.get("arch") if isinstance(data, dict) else type(data).__name__
        raise TuningError(
            f"the tuning database {path} has arch {got!r}; expected {arch!r}: entries are of one "
            "architecture, name another file"
        )
    found = Database(arch)
    kinds: tuple[tuple[str, type[Entry]], ...] = (("kernels", KernelEntry), ("scans", ScanEntry))
    for section, kind in kinds:
        for at, row in enumerate(data.get(section, ())):
            found.add(_entry(kind, row, f"{path}: {section}[{at}]"))
    return found


def write(database: Database, path: Path) -> None:
    """Write a database by renaming a finished file; raises TuningError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
        with os.fdopen(handle, "w") as file:
            file.write(database.text())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise TuningError(
            f"cannot write the tuning database {path}: {error.strerror or error}; name a file in a "
            "folder that you may write to"
        ) from error


def _entry(kind: type[Entry], row: Mapping[str, Any], where: str) -> Entry:
    if not isinstance(row, dict):
        raise TuningError(f"{where} is {row!r}; expected an object with the fields of an entry")
    own = [f.name for f in fields(kind) if f.name not in ("key", "measured")]
    names = [*own, *(f.name for f in fields(Key)), *(f.name for f in fields(Measured))]
    if set(row) != set(names):
        missing, unknown = sorted({*names} - {*row}), sorted({*row} - {*names})
        raise TuningError(f"{where}: fields missing {missing}, unknown {unknown}; remove the entry")
    _check(row, where)
    key = Key(**{f.name: row[f.name] for f in fields(Key)})
    measured = Measured(**{f.name: row[f.name] for f in fields(Measured)})
    return kind(key=key, measured=measured, **{name: row[name] for name in own})


def _check(row: Mapping[str, Any], where: str) -> None:
    """Raise for values that no kernel can have."""

    def refuse(name: str, expected: str) -> None:
        raise TuningError(
            f"{where}: {name} is {row[name]!r}; expected {expected}: remove the entry and tune anew"
        )

    def whole(name: str, least: int, most: int) -> bool:
        return type(row[name]) is int and least <= row[name] <= most

    if row["load"] not in LOADS:
        refuse("load", f"one of {', '.join(LOADS)}")
    if row["length"] not in LENGTHS:
        refuse("length", f"one of {', '.join(LENGTHS)}")
    if "programs" in row:
        if not whole("programs", 1, 64):
            refuse("programs", "1 to 64")
        return
    if not whole("tile", 16, 256) or row["tile"] & (row["tile"] - 1):
        refuse("tile", "a power of two from 16 to 256")
    if row["warps"] not in WARPS:
        refuse("warps", f"one of {WARPS}")
    if not whole("stages", 1, MOST_STAGES):
        refuse("stages", f"1 to {MOST_STAGES}")
    if row["registers"] is not None and (not whole("registers", 24, 255) or row["registers"] % 8):
        refuse("registers", "null or a multiple of 8 from 24 to 248")
    if row["shared"] is not None and not whole("shared", 0, 1 << 20):
        refuse("shared", "null or bytes")
