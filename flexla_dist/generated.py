"""Generated source in the user's cache, as modules.

Contract: a module is written once, by renaming a finished file, so that many ranks may do it at
once, and imported by one thread at a time, so that nobody gets a module that is half made. A file
that does not hold exactly the text that was asked for is written again.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from flexla_dist.errors import CacheFolderError

_IMPORTING = threading.RLock()


def cache_folder() -> Path:
    """Where generated source is kept: `$XDG_CACHE_HOME/flexla_dist` or `~/.cache/flexla_dist`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "flexla_dist"


def load_text(
    name: str,
    text: str,
    folder: Path | None = None,
    finish: Callable[[ModuleType], None] | None = None,
) -> ModuleType:
    """The text as a module, written to `folder` (default `cache_folder()`) if it is not there.

    `finish` is called once, before anybody else sees the module. Raises CacheFolderError if the
    file cannot be written.
    """
    module_name = f"flexla_dist_generated_{name}"
    with _IMPORTING:
        if module_name in sys.modules:
            return sys.modules[module_name]
        path = (folder or cache_folder()) / f"{name}.py"
        if not _holds(path, text):
            _write(path, text)
        return _import(module_name, path, finish)


def _import(
    module_name: str, path: Path, finish: Callable[[ModuleType], None] | None
) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import generated source {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where Triton looks while the module is made
    try:
        spec.loader.exec_module(module)
        if finish is not None:
            finish(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".py")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CacheFolderError(
            f"cannot write generated source to {path}: {error.strerror or error}. Triton needs it "
            "in a file of a folder that you may write to: remove what is in the way, or choose "
            "another folder with the environment variable XDG_CACHE_HOME (default ~/.cache)"
        ) from error
