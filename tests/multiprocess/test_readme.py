"""The code of the README, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexla_dist.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- run: (one process|two processes) -->\n```python\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text())


def execute(rank: int, world: int, source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def lines_of_code(source: str) -> int:
    return len([line for line in source.splitlines() if line.strip()])


def test_blocks_are_there_and_short() -> None:
    lengths = {where: lines_of_code(code) for where, code in BLOCKS}
    assert set(lengths) == {"one process", "two processes"}
    assert lengths["one process"] <= 15 and lengths["two processes"] <= 10


@pytest.mark.parametrize(("where", "code"), BLOCKS, ids=[where for where, _ in BLOCKS])
def test_block_runs(where: str, code: str) -> None:
    path = ROOT / "README.md"
    assert path.exists()
    run_ranks(execute, 1 if where == "one process" else 2, code)


def test_files_that_are_named_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"(?:launch|configs|flexla_dist)/[\w./]*\w", text):
        assert (ROOT / name).exists(), name
