"""Specs by the name of a variant or by file.

Contract: `load_spec("gla")` or `load_spec("path/to/file.py:NAME")`; the name may be left out where
the file has one spec. The file is executed: imported, with its folder importable
as it is for a script.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from flexla_dist.errors import SpecError
from flexla_dist.shapes import nearest
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.registry import get_variant


def load_spec(text: str) -> Any:
    """The spec, or compiled operator, that `text` names.

    Raises:
        SpecError: no such variant, file or name; the file has several specs and none is named; or
            importing it failed, with the line.
    """
    path, name = _split(text)
    if path is None and ":" in text:
        dotted, _, attribute = text.partition(":")
        raise SpecError(
            f"{text!r} is neither a variant nor FILE.py:SPEC; give the file: "
            f"{dotted.replace('.', '/')}.py:{attribute or 'SPEC'}"
        )
    if path is None:
        return get_variant(text)
    if not path.is_file():
        raise SpecError(f"there is no file {path}; expected VARIANT or path/to/file.py:SPEC")
    module = _import(path)
    specs = {key: x for key, x in vars(module).items() if _is_spec(x)}
    if name is None:
        if len({id(x) for x in specs.values()}) == 1:
            return next(iter(specs.values()))
        raise SpecError(
            f"{path} has {len(specs)} specs; name one: {path}:{next(iter(specs), 'SPEC')}"
            + (f" ({', '.join(specs)})" if specs else "")
        )
    value = getattr(module, name, None)
    if not _is_spec(value):
        found = "has no such name" if value is None else f"has a {type(value).__name__} there"
        raise SpecError(
            f"{path}:{name}: the file {found}{nearest(name, specs)}; its specs: "
            f"{', '.join(specs) or 'none'}"
        )
    return value


def _split(text: str) -> tuple[Path | None, str | None]:
    head, colon, name = text.rpartition(":")
    if colon and head.endswith(".py"):
        return Path(head), name
    if text.endswith(".py") or "/" in text:
        return Path(text), None
    return None, None


def _is_spec(value: Any) -> bool:
    compiled = isinstance(getattr(value, "spec", None), LinearAttentionSpec)
    return isinstance(value, LinearAttentionSpec) or (
        compiled and hasattr(value, "graphs") and not isinstance(value, type)
    )


def _import(path: Path) -> ModuleType:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} cannot be imported; expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise SpecError(f"{_place(path, error)}: {type(error).__name__}: {error}") from error
    return module


def _place(path: Path, error: BaseException) -> str:
    """`file:line` where importing a file failed: its innermost line that was running."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename).name == path.name
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)
