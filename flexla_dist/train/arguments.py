"""Command line and YAML of the training program, read into a `TrainConfig`.

An unknown or mistyped key is an `ArgumentProblem` that names it and the nearest valid one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from flexla_dist.train.config import TrainConfig
from flexla_dist.train.limits import problem_of_numbers

_UNKNOWN = (
    re.compile(r"unrecognized arguments: --(?P<key>[^\s=+]+)", re.IGNORECASE),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"Key '(?P<key>[^']+)' is not expected"),
    re.compile(r'Key "(?P<key>[^"]+)" is not expected'),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),
)


class ArgumentProblem(ValueError):
    """The command line or a configuration file is wrong; the message says where and what fits."""


def valid_keys(kind: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Every setting by its dotted name."""
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        name = prefix + item.name
        yield name
        if dataclasses.is_dataclass(hints[item.name]):
            yield from valid_keys(hints[item.name], name + ".")


def parse(argv: Sequence[str], prog: str = "flexla-dist train") -> TrainConfig:
    """Settings from `--config FILE` and overrides `--model.width 256`.

    Raises ArgumentProblem; prints and exits on --help and --print_config.
    """
    parser = _parser(prog)
    words = _expand_data(argv)
    places = _places(words)
    try:
        values = parser.instantiate(parser.parse_args(words))
    except (argparse.ArgumentError, TypeError) as error:
        raise ArgumentProblem(_with_place(explain(str(error)), words, places)) from None
    fields = {item.name: getattr(values, item.name) for item in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**fields)
    problem = problem_of_numbers(config)
    if problem is not None:
        raise ArgumentProblem(_with_place(problem, words, places))
    return config


def explain(message: str) -> str:
    """The parser's message, with the nearest valid setting where a name is unknown."""
    message = re.sub(r"<class '([a-z]+)'>", r"\1", message).replace("typing.Literal", "one of ")
    message = re.sub(r'Parser key "([^"]+)":\s+', r"\1: ", message).replace(
        "Expected a one", "Expected one"
    )
    for pattern in _UNKNOWN:
        found = pattern.search(message)
        if found is None:
            continue
        group = found.groupdict().get("group")
        key = f"{group}.{found['key']}" if group else found["key"]
        return f"unknown setting {key!r}; {_nearest(key)}"
    return message


def _places(words: Sequence[str]) -> list[Any]:
    """The files of settings among the words, read for their lines."""
    from flexla_dist.train.config_file import ConfigFileProblem, config_files

    groups = {key.rsplit(".", 1)[0] for key in valid_keys() if "." in key}
    try:
        return config_files(words, groups)
    except ConfigFileProblem as error:
        raise ArgumentProblem(str(error)) from None


def _with_place(message: str, words: Sequence[str], files: Sequence[Any]) -> str:
    """The message, with file and line in front when its setting was read from a file."""
    found = re.match(r"unknown setting '([^']+)'|([\w.]+): ", message)
    key = (found[1] or found[2]) if found else None
    if key is None or any(re.match(rf"--{re.escape(key)}(=|\+|$)", word) for word in words):
        return message
    places = [place for file in files if (place := file.place(key))]
    return f"{places[-1]}: {message}" if places else message


def _nearest(key: str) -> str:
    known = list(valid_keys())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not close:
        tails = {name.rsplit(".", 1)[-1]: name for name in known}
        close = [
            tails[tail]
            for tail in difflib.get_close_matches(key.rsplit(".", 1)[-1], tails, n=1, cutoff=0.5)
        ]
    if close:
        return f"the nearest valid one is {close[0]!r} (--help lists all)"
    return "--help lists all settings"


def _parser(prog: str) -> Any:
    try:
        import jsonargparse
    except ImportError as error:
        raise ArgumentProblem(
            f"the training program needs {error.name}; install the extra: "
            "pip install 'flexla_dist[train]'"
        ) from None
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        exit_on_error=False,
        allow_abbrev=False,
        description="Train a linear-attention language model, each sequence sharded over ranks.",
        epilog="'--data PATH...' is short for --data.paths: files and folders to learn from. "
        "--check_settings, or --check_settings=RANKS, only says whether the settings fit, on that "
        "many ranks, and trains nothing.",
    )
    parser.add_argument("--config", action="config", help="a YAML file of settings")
    parser.add_class_arguments(TrainConfig)
    return parser


def _expand_data(argv: Sequence[str]) -> list[str]:
    """`--data a b` as `--data.paths=["a", "b"]`, checked to exist."""
    words = list(argv)
    if "--data" not in words:
        return words
    start = words.index("--data") + 1
    ends = (place for place in range(start, len(words)) if words[place].startswith("--"))
    stop = next(ends, len(words))
    paths = words[start:stop]
    if not paths:
        raise ArgumentProblem("--data wants at least one file or folder")
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        raise ArgumentProblem(f"--data: no such file or folder: {', '.join(missing)}")
    return [*words[: start - 1], *words[stop:], f"--data.paths={json.dumps(paths)}"]
