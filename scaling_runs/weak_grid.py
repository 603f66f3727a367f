"""What `weak_scaling.py` measures: a grid from a YAML file and the command line, point by point."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flexla_dist.shapes import nearest
from flexla_dist.spec.variants import variant_names
from scaling_runs.baselines import SYSTEMS

MODES = ("weak", "strong")
DIRECTIONS = ("fwd", "fwdbwd")
PLACEMENTS = ("barrier", "stream", "step", "exchange")
DTYPES = ("float64", "float32", "bfloat16", "float16")


class GridProblem(ValueError):
    """A grid that cannot be measured; the message says what was got and what is expected."""


@dataclass(frozen=True)
class CallShape:
    """Rows B, heads H, key width K and value width V of a call."""

    B: int
    H: int
    K: int
    V: int

    @classmethod
    def parse(cls, text: str) -> CallShape:
        """From `4x32x128x128`."""
        words = str(text).lower().split("x")
        if len(words) != 4 or not all(w.isdigit() and int(w) > 0 for w in words):
            raise GridProblem(
                f"shape is {text!r}, expected BxHxKxV of four positive numbers: 4x32x128x128"
            )
        return cls(*(int(word) for word in words))


@dataclass(frozen=True)
class Point:
    """One measurement. T: tokens of the longest shard; total: tokens over all ranks."""

    system: str
    variant: str
    mode: str
    placement: str
    direction: str
    P: int
    T: int
    total: int
    B: int
    H: int
    K: int
    V: int
    dtype: str

    @property
    def heads(self) -> int:
        """Heads of the call; hgrn has one that is H * V wide."""
        return 1 if self.variant == "hgrn" else self.H

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the named dims."""
        return {"K": self.K, "V": self.V, "D": self.H * self.V}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every rank: as equal as they can be."""
        least, more = divmod(self.total, self.P)
        return tuple(least + (rank < more) for rank in range(self.P))

    @property
    def state_bytes(self) -> int:
        """S of a layer: float32, or float64 with float64 inputs."""
        width = 8 if self.dtype == "float64" else 4
        if self.variant == "hgrn":
            return width * self.B * self.H * self.V
        return width * self.B * self.H * self.K * self.V

    @property
    def group(self) -> tuple:
        """What the points that are compared with each other have in common."""
        return tuple(value for name, value in vars(self).items() if name != "system")

    def words(self) -> str:
        """The point in one line."""
        return (
            f"{self.system} {self.variant} {self.mode} P={self.P} T={self.T} "
            f"{self.B}x{self.H}x{self.K}x{self.V} {self.dtype} {self.direction} {self.placement}"
        )


@dataclass(frozen=True)
class Grid:
    """A product of lists.

    tokens_per_rank are the T of weak scaling, total_tokens those of strong scaling. shapes:
    BxHxKxV. placements: the operator after a barrier, many calls in a row (stream), inside a
    training step, or the exchange of states alone. seconds: of timed calls a point and round.
    rounds: the systems of a group take turns this often, where the machine is not quiet. phases:
    also time the local parts of each call, and the links, for the model. threads: of a CPU process.
    """

    systems: tuple[str, ...] = ("chain", "lasp2", "lasp", "ulysses", "ideal_same_plan")
    variants: tuple[str, ...] = ("simple_gla", "gated_delta_rule")
    ranks: tuple[int, ...] = (2,)
    modes: tuple[str, ...] = ("weak",)
    tokens_per_rank: tuple[int, ...] = (32768,)
    total_tokens: tuple[int, ...] = (262144,)
    shapes: tuple[str, ...] = ("4x32x128x128",)
    dtype: str = "bfloat16"
    directions: tuple[str, ...] = DIRECTIONS
    placements: tuple[str, ...] = ("barrier", "stream")
    seconds: float = 3.0
    rounds: int = 1
    phases: bool = False
    threads: int = 1
    node_size: int | None = None
    panels: int = 2
    blocks: int = 4
    layers: int = 1
    timeout: float = 300.0

    def checked(self) -> Grid:
        """Itself. Raises GridProblem for names that do not exist and numbers that cannot be."""
        for name, known in (
            ("systems", tuple(SYSTEMS)),
            ("variants", variant_names()),
            ("modes", MODES),
            ("directions", DIRECTIONS),
            ("placements", PLACEMENTS),
        ):
            for word in getattr(self, name):
                if word not in known:
                    raise GridProblem(
                        f"{name}: {word!r} does not exist{nearest(str(word), known)}; "
                        f"expected some of {', '.join(known)}"
                    )
        if self.dtype not in DTYPES:
            raise GridProblem(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        for name in ("ranks", "tokens_per_rank", "total_tokens"):
            if not all(isinstance(n, int) and n > 0 for n in getattr(self, name)):
                raise GridProblem(f"{name} is {getattr(self, name)}, expected positive numbers")
        for name in ("seconds", "rounds", "timeout", "threads", "panels", "blocks", "layers"):
            if not getattr(self, name) > 0:
                raise GridProblem(f"{name} is {getattr(self, name)}, expected a positive number")
        for shape in self.shapes:
            CallShape.parse(shape)
        return self

    def points(self) -> list[Point]:
        """All points; systems change fastest, so that a short run compares them."""
        return list(self._points())

    def _points(self) -> Iterator[Point]:
        for shape_text in self.shapes:
            shape = CallShape.parse(shape_text)
            for mode in self.modes:
                amounts = self.tokens_per_rank if mode == "weak" else self.total_tokens
                for amount in amounts:
                    for ranks in self.ranks:
                        total = amount * ranks if mode == "weak" else amount
                        for rest in self._rest():
                            variant, placement, direction, system = rest
                            yield Point(
                                system,
                                variant,
                                mode,
                                placement,
                                direction,
                                ranks,
                                -(-total // ranks),
                                total,
                                **vars(shape),
                                dtype=self.dtype,
                            )

    def _rest(self) -> Iterator[tuple[str, str, str, str]]:
        for variant in self.variants:
            for placement in self.placements:
                for direction in self.directions:
                    if placement == "step" and direction == "fwd":
                        continue
                    if placement == "exchange" and direction == "fwdbwd":
                        continue
                    for system in self.systems:
                        yield variant, placement, direction, system


def read_grid(path: Path | None, changes: Mapping[str, Any]) -> Grid:
    """The grid of a YAML file (None: the default one), with the changes that are not None."""
    grid = Grid() if path is None else Grid(**_from_yaml(path))
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(grid, **given).checked()


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as missing:
        raise GridProblem(
            f"reading {path} needs PyYAML ({missing}): pip install PyYAML, or give options instead"
        ) from missing
    if not path.is_file():
        raise GridProblem(f"no file {path}; configs/weak_scaling has those of the repository")
    found = yaml.safe_load(path.read_text()) or {}
    if not isinstance(found, dict):
        raise GridProblem(f"{path} holds a {type(found).__name__}, expected `name: value` lines")
    known = {item.name: item for item in fields(Grid)}
    for name in found:
        if name not in known:
            raise GridProblem(
                f"{path}: there is no setting {name!r}{nearest(str(name), known)}; "
                f"expected {', '.join(known)}"
            )
    return {name: _as_field(value) for name, value in found.items()}


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for every field of the grid."""
    whole: Sequence[tuple[str, Any]] = [(item.name, item.default) for item in fields(Grid)]
    for name, default in whole:
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, tuple):
            kind = _numbers if isinstance(default[0], int) else _words
            parser.add_argument(option, type=kind, help=f"comma-separated; {_shown(default)}")
        elif isinstance(default, bool):
            parser.add_argument(option, action="store_true", default=None, help=f"{default}")
        elif name == "node_size":
            parser.add_argument(option, type=int, help="ranks of a node; hosts tell otherwise")
        else:
            parser.add_argument(option, type=type(default), help=f"{default}")


def _shown(default: tuple) -> str:
    return ",".join(map(str, default))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
