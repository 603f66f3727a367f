"""Bytes of files as training sequences: split, order, packing, entropies."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexla_dist.train.config import DataConfig
from flexla_dist.train.data import (
    IGNORED_LABEL,
    Sampler,
    Text,
    entropies,
    find_files,
    load_texts,
)

CONFIG = DataConfig(length=8, suffixes=[".txt"], held_out=0.25)


def write_files(folder: Path, count: int = 8, size: int = 50) -> DataConfig:
    for number in range(count):
        (folder / f"{number}.txt").write_bytes(bytes([65 + number]) * size)
    (folder / "other.md").write_text("not read")
    return replace(CONFIG, paths=[str(folder)])


def test_split_by_file_is_seeded_and_disjoint(tmp_path: Path) -> None:
    config = write_files(tmp_path)
    training, held_out = load_texts(config, seed=3)
    again, _ = load_texts(config, seed=3)
    other, _ = load_texts(config, seed=4)
    assert torch.equal(training.data, again.data) and not torch.equal(training.data, other.data)
    assert (len(training.data), len(held_out.data)) == (300, 100)
    assert not set(training.data.tolist()) & set(held_out.data.tolist())
    assert training.starts.tolist() == [0, 50, 100, 150, 200, 250]


def test_one_file_is_split_by_place(tmp_path: Path) -> None:
    config = write_files(tmp_path, count=1, size=400)
    training, held_out = load_texts(config, seed=0)
    assert (len(training.data), len(held_out.data)) == (300, 100)


def test_standard_library_is_there_without_its_tests() -> None:
    files = find_files(DataConfig())
    assert len(files) > 100 and files == sorted(files)
    assert all(path.suffix == ".py" for path in files)
    assert not any({"test", "site-packages"} & set(path.parts[-3:-1]) for path in files)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"paths": ["no/such/place"]}, "no such file or folder: no/such/place"),
        ({"suffixes": [".nothing"]}, "no file that ends in .nothing"),
        ({"length": 100000}, "fewer than one sequence of data.length = 100000"),
    ],
)
def test_missing_text_is_an_error(tmp_path: Path, changes: dict, text: str) -> None:
    config = replace(write_files(tmp_path), **changes)
    with pytest.raises(ValueError, match=text):
        load_texts(config, seed=0)


def counting(total: int = 41, starts: tuple[int, ...] = (0, 5, 16, 20)) -> Text:
    return Text(torch.arange(total, dtype=torch.uint8), torch.tensor(starts))


def test_every_window_once_an_epoch_however_it_is_cut() -> None:
    whole = Sampler(counting(), CONFIG, seed=1).training(0, 10)
    assert sorted(whole.tokens[:5, 0].tolist()) == [0, 8, 16, 24, 32]
    assert sorted(whole.tokens[5:, 0].tolist()) == [0, 8, 16, 24, 32]
    parts = Sampler(counting(), CONFIG, seed=1)
    cut = [parts.training(first, 2).tokens for first in range(0, 10, 2)]
    assert torch.equal(torch.cat(cut), whole.tokens)
    assert torch.equal(whole.labels, whole.tokens + 1)


def test_packed_rows_mark_documents_and_hide_their_last_label() -> None:
    sampler = Sampler(counting(), replace(CONFIG, packed=True), seed=0)
    rows = {int(b.tokens[0, 0]): b for b in (sampler.training(n, 1) for n in range(5))}
    first = rows[0]
    assert first.cu_seqlens is not None and first.cu_seqlens.tolist() == [0, 5, 8]
    assert first.labels[0].tolist() == [1, 2, 3, 4, IGNORED_LABEL, 6, 7, 8]
    assert first.tokens[0].tolist() == list(range(8))
    at_start = rows[16]
    assert at_start.cu_seqlens is not None and at_start.cu_seqlens.tolist() == [0, 4, 8]
    inside = rows[24]
    assert inside.cu_seqlens is not None and inside.cu_seqlens.tolist() == [0, 8]
    with pytest.raises(ValueError, match="one sequence a rank"):
        sampler.training(0, 2)


def test_document_that_starts_after_the_row_is_no_target_of_it() -> None:
    """The byte after a packed row may open the next document: predicting it is not asked."""
    text = Text(torch.arange(17, dtype=torch.uint8), torch.tensor([0, 8]))
    sampler = Sampler(text, replace(CONFIG, packed=True), seed=0)
    rows = {int(b.tokens[0, 0]): b for b in (sampler.training(n, 1) for n in range(2))}
    assert rows[0].labels[0, -1] == IGNORED_LABEL


def test_evaluation_is_spread_and_padded_with_ignored_labels() -> None:
    sampler = Sampler(counting(), CONFIG, seed=0)
    batch = sampler.spread(3, range(4))
    assert batch.tokens[:3, 0].tolist() == [0, 8, 24]
    assert (sampler.spread(3, [3]).tokens >= 0).all()
    assert (batch.labels[3] == IGNORED_LABEL).all() and (batch.labels[:3] >= 0).all()


def test_entropies() -> None:
    even = Text.of([bytes([0, 1, 2, 3] * 64)])
    single, pair = entropies(even)
    assert math.isclose(single, 2.0, abs_tol=1e-6) and abs(pair) < 0.02
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(4, (200_000,), generator=generator, dtype=torch.uint8)
    single, pair = entropies(Text(noise, torch.tensor([0])))
    assert abs(single - 2.0) < 0.01 and abs(pair - 2.0) < 0.01
