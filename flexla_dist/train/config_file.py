"""Where in which YAML file a setting stands, so that a mistake is told with its place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class ConfigFileProblem(ValueError):
    """A file of settings cannot be read; the message names the file and the line."""


@dataclass(frozen=True)
class ConfigFile:
    """A YAML file of settings: the line of every one, by its dotted name."""

    path: str
    lines: dict[str, int]

    def place(self, key: str) -> str | None:
        """`FILE, line N` of a setting, or None where the file has no such setting."""
        line = self.lines.get(key)
        return None if line is None else f"{self.path}, line {line}"


def config_files(words: Sequence[str], groups: Collection[str]) -> list[ConfigFile]:
    """The files that `--config FILE` names, in order.

    groups: settings that hold others. Raises ConfigFileProblem for a file that is missing, is no
    YAML, or gives a group a single value.
    """
    return [_read(path, groups) for path in _paths(words)]


def _paths(words: Sequence[str]) -> Iterator[str]:
    for place, word in enumerate(words):
        if word.startswith("--config="):
            yield word.removeprefix("--config=")
        elif word == "--config" and place + 1 < len(words):
            yield words[place + 1]


def _read(path: str, groups: Collection[str]) -> ConfigFile:
    if not Path(path).is_file():
        raise ConfigFileProblem(f"--config: no such file: {path}")
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}, line {mark.line + 1}"
        what = getattr(error, "problem", None) or str(error)
        raise ConfigFileProblem(f"{where}: not YAML: {what}") from None
    except UnicodeDecodeError as error:
        raise ConfigFileProblem(f"{path}: no text in UTF-8: {error}") from None
    if root is None:
        return ConfigFile(path, {})
    if not isinstance(root, yaml.MappingNode):
        raise ConfigFileProblem(
            f"{path}, line {root.start_mark.line + 1}: expected settings, each `name: value`"
        )
    lines: dict[str, int] = {}
    for key, line, value in _settings(root, ""):
        lines[key] = line
        if key in groups and not isinstance(value, yaml.MappingNode):
            raise ConfigFileProblem(
                f"{path}, line {line}: {key} is a group of settings; expected `name: value` below "
                "it, indented"
            )
    return ConfigFile(path, lines)


def _settings(node: Any, prefix: str) -> Iterator[tuple[str, int, Any]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1, value
        if isinstance(value, yaml.MappingNode):
            yield from _settings(value, f"{name}.")
