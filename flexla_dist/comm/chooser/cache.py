"""Measured links and rates on disk, one file for a host, a device and a carrier.

A file is replaced as a whole, so readers see the old one or the new one; a file that is broken, of
another format or of another host counts as none, and is replaced by the next measurement.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexla_dist.comm.chooser.links import Curve, Link, Rates

FORMAT = 1
Found = tuple[dict[str, Link], Rates | None]


def cache_folder() -> Path:
    """Where files are kept: flexla_dist/links in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flexla_dist" / "links"


def read_cache(key: str, folder: Path | None = None) -> Found:
    """(links by class, rates) that were kept under this key."""
    try:
        content = json.loads(_path(key, folder).read_text())
        if content["format"] != FORMAT or content["key"] != key:
            return {}, None
        return parse(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, None


def write_cache(
    key: str, links: Mapping[str, Link], rates: Rates | None, folder: Path | None = None
) -> None:
    """Keep what was measured under this key, beside classes kept earlier.

    A folder that cannot be written is no error: the next group measures again.
    """
    earlier, known_rates = read_cache(key, folder)
    content = {"format": FORMAT, "key": key} | serialise(
        {**earlier, **{n: x for n, x in links.items() if x.measured}},
        rates if rates is not None and rates.measured else known_rates,
    )
    path = _path(key, folder)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)


def serialise(links: Mapping[str, Link], rates: Rates | None) -> dict[str, Any]:
    """As plain values for JSON."""
    lines = {}
    for name, link in links.items():
        line = asdict(link)
        line["one"] = link.one.points
        line["both"] = None if link.both is None else link.both.points
        line["lanes"] = None if math.isinf(link.lanes) else link.lanes
        lines[name] = line
    return {"links": lines, "rates": None if rates is None else asdict(rates)}


def parse(content: Mapping[str, Any]) -> Found:
    """Inverse of `serialise`. ValueError, KeyError, TypeError: something else was written there."""
    links = {}
    for name, line in content["links"].items():
        values = dict(line)
        values["one"] = _curve(values["one"])
        values["both"] = None if values["both"] is None else _curve(values["both"])
        values["lanes"] = math.inf if values["lanes"] is None else float(values["lanes"])
        links[str(name)] = Link(**values)
    rates = content["rates"]
    return links, None if rates is None else Rates(**rates)


def _curve(points: Any) -> Curve:
    return Curve(tuple((int(size), float(seconds)) for size, seconds in points))


def _path(key: str, folder: Path | None) -> Path:
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return (cache_folder() if folder is None else folder) / f"{name}.json"
