"""Names of files in shared memory, and removal of those that ended processes left.

A file lives from its creation until every rank has mapped it, so only a process that is killed in
between leaves one. Its name carries the pid namespace, the pid and the start of its creator, which
says later whether that process still runs.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from flexla_dist.comm.heaps.place import Place, pid_namespace, start_of

_NAME = re.compile(r"flexla_dist-(\d+)-(\d+)-(\d+)-[0-9a-f]{32}")
FOREIGN_SECONDS = 3600.0


def new_name() -> str:
    """A name that nobody can guess, and that tells the calling process."""
    here = Place.here()
    token = secrets.token_hex(16)
    return f"flexla_dist-{here.pid_namespace}-{here.pid}-{here.started}-{token}"


def is_name(name: str) -> bool:
    """Whether `new_name` could have made it."""
    return _NAME.fullmatch(name) is not None


def remove_leftovers(folder: Path) -> list[str]:
    """Remove this user's files whose process has ended; returns their names.

    Processes of another pid namespace cannot be seen: their files go when they are an hour old.
    """
    removed = []
    for path in folder.glob("flexla_dist-*"):
        with suppress(OSError):  # another process may remove it first
            if _is_leftover(path):
                path.unlink()
                removed.append(path.name)
    return removed


def _is_leftover(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    status = path.lstat()
    if match is None or status.st_uid != os.geteuid():
        return False
    namespace, pid, started = map(int, match.groups())
    if namespace != pid_namespace():
        return time.time() - status.st_mtime > FOREIGN_SECONDS
    return start_of(pid) != started
