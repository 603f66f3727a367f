"""Kept measurements, and the survey of a group played by threads of one process."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flexla_dist.comm.chooser.cache import cache_folder, read_cache, write_cache
from flexla_dist.comm.chooser.links import Curve, Link, Rates
from flexla_dist.comm.chooser.measure import SIZES, measure_link, measure_rates
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.survey import Survey, survey_group

LINK = Link(
    Curve(((1, 0.5), (10, 1.5))), Curve(((1, 0.5), (10, 2.5))), 2.0, 0.1, 0.2, True, "today"
)
RATES = Rates(1.0, 2.0, 3.0, 4, True, "today")


class MadeUp:
    """A link of alpha 1 ms and 1 us a KiB; both ways take twice as long."""

    name = "made_up"

    def __init__(self, panel: float | None = None):
        self.per_byte, self.calls, self.met, self.panel_beta = 1e-6 / 1024, 0, False, panel

    def gather(self, size: int) -> float:
        self.met = True
        return 2e-3 + 3 * size * self.per_byte

    def _one(self, size: int) -> float:
        self.calls += 1
        return 1e-3 + size * self.per_byte

    def there_and_back(self, peer: int, size: int, first: bool) -> float:
        return 2 * self._one(size)

    def both_ways(self, peer: int, size: int) -> float:
        return 2 * self._one(size)

    def burst(self, peer: int, size: int, count: int, first: bool) -> float:
        return 2 * self._one(size) + (count - 1) * 1e-4

    def panel(self, peer: int, size: int, first: bool) -> float | None:
        return None if self.panel_beta is None else 2 * (1e-3 + size * self.panel_beta)


# -- files ----------------------------------------------------------------------------------------


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    assert read_cache("key", tmp_path) == ({}, None)
    write_cache("key", {"nvlink": LINK}, RATES, tmp_path / "deep")
    assert read_cache("key", tmp_path / "deep") == ({"nvlink": LINK}, RATES)
    assert read_cache("other", tmp_path / "deep") == ({}, None)
    free = Link(LINK.one, None, math.inf, measured=True)
    write_cache("key", {"network": free}, None, tmp_path / "deep")
    assert read_cache("key", tmp_path / "deep") == ({"nvlink": LINK, "network": free}, RATES)


def test_assumptions_are_not_kept(tmp_path: Path) -> None:
    write_cache("key", {"nvlink": Link(LINK.one)}, Rates(1.0, 1.0, 1.0), tmp_path)
    assert read_cache("key", tmp_path) == ({}, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"gap"', '"gaps"'),
        lambda text: text.replace("0.5", '"half"'),
        lambda text: text.replace('"key": "key"', '"key": "another"'),
        lambda text: text.replace('"links": {', '"links": 7, "x": {'),
    ],
)
def test_a_broken_file_counts_as_none_and_is_replaced(
    change: Callable[[str], str], tmp_path: Path
) -> None:
    write_cache("key", {"nvlink": LINK}, RATES, tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(change(path.read_text()))
    assert read_cache("key", tmp_path) == ({}, None)
    write_cache("key", {"pcie": LINK}, None, tmp_path)
    assert read_cache("key", tmp_path) == ({"pcie": LINK}, None)
    path.write_bytes(b"\xff\xfe\x00")
    assert read_cache("key", tmp_path) == ({}, None)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_cache("key", {"nvlink": LINK}, RATES, tmp_path / "file" / "below")


def test_many_write_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(40):
            pool.submit(write_cache, "key", {"nvlink": LINK}, RATES, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert read_cache("key", tmp_path) == ({"nvlink": LINK}, RATES)


def test_the_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "flexla_dist" / "links"


# -- measuring ------------------------------------------------------------------------------------


def test_a_link_is_found_from_its_times() -> None:
    link = measure_link(MadeUp(panel=2e-9), 1, True)
    assert link.measured and link.alpha == pytest.approx(1e-3)
    assert link.beta == pytest.approx(1e-6 / 1024)
    assert link.seconds(2 << 20) == pytest.approx(1e-3 + 2048e-6)
    assert link.wire(1 << 20, 2) == pytest.approx(1e-3 + 2 * 1024e-6)
    assert link.gap == pytest.approx(1e-4) and link.panel_beta == pytest.approx(2e-9)


def test_noise_makes_no_message_free() -> None:
    class Noisy(MadeUp):
        def there_and_back(self, peer: int, size: int, first: bool) -> float:
            return 1.0 if size == SIZES[0] else 0.5

    link = measure_link(Noisy(), 1, True)
    assert link.beta == 0.0 and link.seconds(1 << 30) == link.alpha == 0.5


def test_rates_of_this_machine() -> None:
    rates = measure_rates(torch.device("cpu"))
    assert rates.measured and rates.programs == 1
    assert 1e8 < rates.stream < 1e13 and 1e8 < rates.flops < 1e14 and 0 < rates.launch < 0.1


# -- the survey -----------------------------------------------------------------------------------


class Meeting:
    """Gathers of texts among threads."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=30)
        self.texts = [""] * size
        self.gathers = 0

    def gather(self, rank: int, what: str, text: str) -> list[str]:
        self.texts[rank] = text
        self.barrier.wait()
        found = list(self.texts)
        self.gathers += rank == 0
        self.barrier.wait()
        return found


def survey(size: int, folder: Path, **more: object) -> tuple[list[Survey], list[MadeUp], int]:
    """The surveys of all ranks, their transports, and how often texts were gathered."""
    meeting, transports = Meeting(size), [MadeUp() for _ in range(size)]

    def run(rank: int) -> Survey:
        return survey_group(
            rank,
            lambda what, text: meeting.gather(rank, what, text),
            transports[rank],
            torch.device("cpu"),
            folder=folder,
            **more,  # type: ignore[arg-type]
        )

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    return found, transports, meeting.gathers


def test_a_pair_measures_and_all_know(tmp_path: Path) -> None:
    found, transports, gathers = survey(3, tmp_path)
    assert all(each == found[0] for each in found) and gathers == 2
    assert found[0].topology.runs == (3,) and found[0].topology.inside == "same_process"
    link = found[0].links["same_process"]
    assert link.measured and link.alpha == pytest.approx(1e-3) and found[0].rates.measured
    assert [t.calls > 0 for t in transports] == [True, True, False]
    assert all(t.met for t in transports)
    gather = found[0].gather
    assert gather is not None and gather.alpha == pytest.approx(2e-3)
    payload = Payload.of_heads("none", 16)
    gathered = found[0].choose(payload, "all_gather").table[3]
    assert gathered.latency + gathered.wire == pytest.approx(2e-3 + 3 * 1024e-6)
    again, transports, gathers = survey(3, tmp_path)
    assert again[0].links == found[0].links and gathers == 1
    assert not any(t.calls for t in transports)
    _, transports, gathers = survey(3, tmp_path, fresh=True)
    assert transports[0].calls and gathers == 2


def test_nothing_is_measured_unless_wanted(tmp_path: Path) -> None:
    found, transports, _ = survey(2, tmp_path, measure=False)
    assert not found[0].links["same_process"].measured and not found[0].rates.measured
    assert not any(t.calls for t in transports) and not list(tmp_path.iterdir())


def test_given_nodes_decide(tmp_path: Path) -> None:
    found, _, _ = survey(4, tmp_path, nodes=(0, 0, 1, 1))
    assert found[3].topology.runs == (2, 2)
    choice = found[3].choose(Payload.of_heads("dense", 8))
    assert {e.strategy for e in choice.table} >= {"chain", "hierarchical"}
    assert found[3].choose(Payload.of_heads("dense", 8), "all_gather").strategy == "all_gather"
    assert all(
        each.choose(Payload.of_heads("full", 8)) == found[0].choose(Payload.of_heads("full", 8))
        for each in found
    )


def test_kept_files_are_readable_json(tmp_path: Path) -> None:
    survey(2, tmp_path)
    [path] = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert content["key"].endswith("|cpu|made_up") and "same_process" in content["links"]
