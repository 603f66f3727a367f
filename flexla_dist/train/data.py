"""Bytes of text files as training sequences.

Contract: everything is a function of the files, the seed and a sample's number, so that a run goes
on where it stopped on any number of ranks. No rank keeps a position of its own.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flexla_dist.train.arguments import ArgumentProblem
from flexla_dist.train.config import DataConfig

IGNORED_LABEL = -100
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Files laid end to end: their bytes [n], and where each begins."""

    data: Tensor
    starts: Tensor

    @staticmethod
    def of(documents: Iterable[bytes]) -> Text:
        """Lay documents end to end, empty ones left out."""
        documents = [document for document in documents if document]
        lengths = torch.tensor([0, *map(len, documents)])
        joined = bytearray(b"".join(documents))
        data = torch.empty(0, dtype=torch.uint8)
        if joined:
            data = torch.frombuffer(joined, dtype=torch.uint8)
        return Text(data, lengths.cumsum(0)[:-1])

    def windows(self, length: int) -> int:
        """How many sequences of `length` tokens, each with the byte that follows, it holds."""
        return max(0, (len(self.data) - 1) // length)


@dataclass(frozen=True)
class Batch:
    """Sequences of one micro-batch, whole: tokens and the labels that follow them, [B, T]."""

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None = None


def standard_library() -> Path:
    """The folder of the installed standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_files(config: DataConfig) -> list[Path]:
    """The files to read, sorted; raises ArgumentProblem where there are none."""
    roots = [Path(path) for path in config.paths] or [standard_library()]
    skipped = frozenset() if config.paths else _SKIPPED_FOLDERS
    suffixes = tuple(config.suffixes)
    found: set[Path] = set()
    for root in roots:
        if root.is_file():
            found.add(root)
        elif root.is_dir():
            found.update(_files_below(root, suffixes, skipped))
        else:
            raise ArgumentProblem(f"data.paths: no such file or folder: {root}")
    if not found:
        places = ", ".join(map(str, roots))
        raise ArgumentProblem(f"data: no file that ends in {' or '.join(suffixes)} in {places}")
    return sorted(found)


def _files_below(root: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            if name.endswith(suffixes):
                yield Path(folder, name)


def load_texts(config: DataConfig, seed: int) -> tuple[Text, Text]:
    """The text to train on and the held-out text, split by file (a single file: by place)."""
    files = find_files(config)
    random.Random(seed).shuffle(files)
    documents = [path.read_bytes() for path in files]
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1.0 - config.held_out))
        documents = [documents[0][cut:], documents[0][:cut]]
    count = _held_out_files(config, len(documents))
    texts = Text.of(documents[count:]), Text.of(documents[:count])
    _check_lengths(config, *(len(text.data) for text in texts))
    return texts


def check_texts(config: DataConfig, seed: int) -> None:
    """ArgumentProblem where `load_texts` would raise it; looks at sizes alone."""
    files = find_files(config)
    random.Random(seed).shuffle(files)
    for path in files:
        if not os.access(path, os.R_OK):
            raise ArgumentProblem(f"data: {path} cannot be read; its permissions forbid it")
    sizes = [path.stat().st_size for path in files]
    if len(sizes) == 1:
        cut = int(sizes[0] * (1.0 - config.held_out))
        sizes = [sizes[0] - cut, cut]
    count = _held_out_files(config, len(sizes))
    _check_lengths(config, sum(sizes[count:]), sum(sizes[:count]))


def _held_out_files(config: DataConfig, files: int) -> int:
    return min(files - 1, max(1, round(config.held_out * files)))


def _check_lengths(config: DataConfig, training: int, held_out: int) -> None:
    for name, size in (("training", training), ("held-out", held_out)):
        if size <= config.length:
            raise ArgumentProblem(
                f"data: the {name} text has {size} bytes, fewer than one sequence of "
                f"data.length = {config.length} and the byte after it; give more text or a smaller "
                "data.length"
            )


class Sampler:
    """Batches of a text by number: sample k is a window, each window once an epoch."""

    def __init__(self, text: Text, config: DataConfig, seed: int) -> None:
        self.text = text
        self.length = config.length
        self.packed = config.packed
        self.seed = seed
        self.count = text.windows(config.length)
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def training(self, first: int, count: int) -> Batch:
        """Samples first .. first + count - 1 of the shuffled, endless order."""
        return self._batch([self._shuffled(number) for number in range(first, first + count)])

    def spread(self, total: int, numbers: Iterable[int]) -> Batch:
        """Of `total` windows spread evenly over the text, those of these numbers; a number from
        `total` on has ignored labels only."""
        numbers = list(numbers)
        batch = self._batch([(n % total) * self.count // total for n in numbers])
        for row, number in enumerate(numbers):
            if number >= total:
                batch.labels[row] = IGNORED_LABEL
        return batch

    def _shuffled(self, number: int) -> int:
        epoch, place = divmod(number, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.count, generator=generator)
            self._epoch = epoch
        return int(self._order[place])

    def _batch(self, windows: list[int]) -> Batch:
        rows = torch.stack([self._row(window) for window in windows])
        tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        if not self.packed:
            return Batch(tokens, labels)
        if len(windows) != 1:
            raise ValueError(
                f"data.packed needs one sequence a rank and micro-batch, got {len(windows)}"
            )
        begin = windows[0] * self.length
        starts = self.text.starts - begin
        opened = starts[(starts > 0) & (starts <= self.length)]
        labels[0, opened - 1] = IGNORED_LABEL
        inside = opened[opened < self.length]
        return Batch(tokens, labels, torch.tensor([0, *inside.tolist(), self.length]))

    def _row(self, window: int) -> Tensor:
        begin = window * self.length
        return self.text.data[begin : begin + self.length + 1].long()


def entropies(text: Text) -> tuple[float, float]:
    """Bits per byte of the text under its own byte counts, and under its counts of byte pairs."""
    data = text.data.long()
    single = _entropy(torch.bincount(data))
    pair = _entropy(torch.bincount(data[:-1] * 256 + data[1:]))
    return single, pair - single


def _entropy(counts: Tensor) -> float:
    chances = counts[counts > 0].double() / counts.sum()
    return float(-(chances * chances.log2()).sum())
